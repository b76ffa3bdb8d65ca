"""The Hopper prefill in 16 bits run on the host, block by block, and compared with the oracle.

Not a run on NVIDIA hardware: see tests/support/cuda_execution.hpp and cuda_execution_sm90.cuh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mla import dispatch
from mla.backends.cuda import prefill_sm90_workspace
from mla.backends.cuda.prefill_sm90 import PrefillSm90
from mla.masks import Mask
from tests.support.cuda_execution import Executor, Mutation, executed, needs_compiler
from tests.support.problems import Case, PrefillProblem, build
from tests.support.tolerance import assert_lse, assert_output, precision_of

pytestmark = needs_compiler
Run = Callable[..., Executor]

SMALL = Case(lengths=((200, 130), (0, 1), (5, 80)), heads=1)
CASES = [
    dataclasses.replace(SMALL, mask="sliding", sinks=True, page_size=16, heads=2),
    dataclasses.replace(SMALL, chunk=(100, 150), out_dtype="fp32", dtypes="fp16"),
    dataclasses.replace(SMALL, softcap=5.0, mask="causal_bias"),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> Iterator[Run]:
    """Return what lets the public functions run the kernel here."""

    def run(mutate: Mutation | None = None) -> Executor:
        return executed(monkeypatch, "sm_90a", PrefillSm90, folder, mutate, seed)

    yield run
    dispatch.forget()


def check(problem: PrefillProblem) -> None:
    output, lse = problem.run("cuda")
    expected, expected_lse = problem.expect()
    precision = precision_of(problem.case.dtypes)
    assert_output(output, expected, precision)
    assert_lse(lse, expected_lse, precision)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill(case: Case, on_host: Run, seed: int) -> None:
    executor = on_host()
    check(build(case, "cpu", seed))
    assert len(executor.launched) == 1


def test_any_role_may_be_late(on_host: Run, seed: int) -> None:
    executor, problem = on_host(), build(CASES[1], "cpu", seed)
    for _ in executor.each_late(threads=512):
        check(problem)


def test_items_without_keys_among_others(on_host: Run, seed: int) -> None:
    """They have Q and no tiles: nothing waits for a V that is not on its way."""
    on_host()
    problem = build(Case(lengths=((150, 10), (149, 10), (148, 9), (147, 8), (0, 5)), heads=2), "cpu", seed)
    seen = torch.tensor([1, 0, 0, 1, 0], dtype=torch.int32)
    problem.operands["mask"] = Mask.from_function(lambda b, h, q, k: (k <= q) & (seen[b] > 0))
    check(problem)


def test_references_follow_scores_that_grow(on_host: Run, seed: int) -> None:
    """Keys grow tile by tile, past what the references of the first one bear."""
    case = Case(lengths=((330, 70),), heads=1, mask="none", dtypes="fp16")

    def growing() -> PrefillProblem:
        problem = build(case, "cpu", seed)
        k = problem.operands["k"]
        k[:330] *= torch.tensor([60.0, 8.0, 1.0]).repeat_interleave(128)[:330, None, None]
        return problem

    on_host()
    check(growing())

    def blind(text: str) -> str:
        changed = text.replace("bool large = !", "bool large = false && !")
        assert changed != text
        return changed

    on_host(blind)
    with pytest.raises(AssertionError):
        check(growing())


def test_a_row_is_bitwise_the_same_beside_rows_that_grow(on_host: Run, seed: int) -> None:
    on_host()
    problem = build(Case(lengths=((330, 70),), heads=1, mask="none", spare_rows=(0, 0)), "cpu", seed)
    quiet, quiet_lse = problem.run("cuda")
    problem.operands["q"] = problem.operands["q"].clone()
    problem.operands["q"][1::2] *= 60.0
    loud, loud_lse = problem.run("cuda")
    assert torch.equal(loud[::2], quiet[::2]) and torch.equal(loud_lse[::2], quiet_lse[::2])
    assert not torch.equal(loud[1::2], quiet[1::2])


@pytest.mark.parametrize("batch", [3, 35])
def test_keys_in_parts(batch: int, on_host: Run, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """One multiprocessor gains nothing by parts unless they are made cheaper than nothing."""
    monkeypatch.setattr(prefill_sm90_workspace, "_LEAST_PART", 128)

    def cheap(text: str) -> str:
        changed = text.replace("kLeastPart = 2048, kPartCost = 512", "kLeastPart = 128, kPartCost = -64")
        assert changed != text
        return changed

    on_host(cheap)
    lengths = ((500, 70), (300, 10), (3, 5), *((0, 1),) * (batch - 3))
    problem = build(Case(lengths=lengths, heads=1, sinks=True, spare_rows=(0, 0)), "cpu", seed)
    check(problem)
    output, lse = problem.run("cuda")
    alone = build(problem.case, "cpu", seed)
    offsets = alone.operands["valid_length"]
    alone.operands["q"] = alone.operands["q"][:70]
    alone.operands["valid_length"] = offsets.clamp(max=70)
    own, own_lse = alone.run("cuda")
    assert torch.equal(own, output[:70]) and torch.equal(own_lse, lse[:70])
