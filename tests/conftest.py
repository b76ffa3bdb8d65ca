"""Random seeds that every run prints, and skips that name the missing device.

``MLA_TEST_SEED=n`` repeats a run. ``MLA_REQUIRE_DEVICE=cuda`` (or ``rocm``) turns the skips of that device's tests into
failures: a runner that claims a device must have it.
"""

from __future__ import annotations

import os
import random
import zlib

import pytest
import torch

SEED_VARIABLE = "MLA_TEST_SEED"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--problems", type=int, default=200, help="random problems for each GPU target")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Tensors here are small: on two busy cores, tests of the prefill took 161 s with two threads and 20 s with one.
    torch.set_num_threads(1)
    os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(2**31)))
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = os.environ[SEED_VARIABLE]


def pytest_report_header() -> str:
    return f"random seed: {os.environ[SEED_VARIABLE]} (repeat with {SEED_VARIABLE}={os.environ[SEED_VARIABLE]})"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own, the same whichever tests run beside it."""
    return (int(os.environ[SEED_VARIABLE]) + zlib.crc32(request.node.nodeid.encode())) % 2**31


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def _missing(marker: str) -> str | None:
    """Name what a test of this marker lacks on this machine, if anything."""
    vendor = None if not torch.cuda.is_available() else "cuda" if torch.version.hip is None else "rocm"
    if marker == "triton":
        return None if vendor else "needs an NVIDIA or AMD GPU; torch sees none"
    return None if vendor == marker else f"needs {'an NVIDIA' if marker == 'cuda' else 'an AMD'} GPU; torch sees none"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in ("cuda", "rocm", "triton"):
        if item.get_closest_marker(marker) and (reason := _missing(marker)):
            required = os.environ.get("MLA_REQUIRE_DEVICE")
            if required and marker in (required, "triton"):
                pytest.fail(f"{reason}, but MLA_REQUIRE_DEVICE={required}")
            pytest.skip(reason)
