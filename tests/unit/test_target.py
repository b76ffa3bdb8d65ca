from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from mla.errors import TargetError
from mla.target import TARGET_BACKENDS, Target, device_arch, runs_on


@pytest.mark.parametrize(
    "text",
    [*TARGET_BACKENDS, "cuda:sm_90a", "cuda:sm_120", "rocm:gfx90a", "rocm:gfx1100", "triton:gfx942", "gpu:gfx950"],
)
def test_round_trip(text: str) -> None:
    parsed = Target.parse(text)
    assert str(parsed) == text
    assert Target.parse(parsed) is parsed
    assert hash(Target.parse(text)) == hash(parsed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cudo", ["'cudo'", "'cuda'", "gpu, cuda, rocm, triton, cpu"]),
        ("tritn", ["'triton'"]),
        ("", ["''", "gpu, cuda"]),
        ("cuda:sm90a", ["'sm90a'", "'sm_90a'", "sm_80"]),
        ("cuda:gfx942", ["'gfx942'", "sm_90a"]),
        ("rocm:sm_90a", ["'sm_90a'", "gfx942"]),
        ("rocm:gfx94", ["'gfx94'", "'gfx942'"]),
        ("cuda:", ["''", "sm_90a"]),
        ("cpu:avx512", ["takes no architecture"]),
        ("reference", ["'reference'", "cpu"]),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(text: str, words: list[str]) -> None:
    with pytest.raises(TargetError) as caught:
        Target.parse(text)
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


def test_only_text_is_a_target() -> None:
    with pytest.raises(TargetError, match="not device"):
        Target.parse(torch.device("cpu"))  # type: ignore[arg-type]


def test_a_backend_of_the_users_own_is_a_target() -> None:
    with pytest.raises(TargetError):
        Target.parse("metal")
    assert Target.parse("metal:m3", backends=["metal"]) == Target("metal", "m3")
    assert Target("metal").backends == ("metal",)


@pytest.mark.parametrize(
    ("text", "backends"),
    [
        ("gpu", ("cuda", "rocm", "triton")),
        ("gpu:sm_90a", ("cuda", "triton")),
        ("gpu:gfx942", ("rocm", "triton")),
        ("cuda", ("cuda",)),
        ("cpu", ("reference",)),
    ],
)
def test_backends(text: str, backends: tuple[str, ...]) -> None:
    assert Target.parse(text).backends == backends


@pytest.mark.parametrize(
    ("major", "minor", "arch"),
    [(7, 5, "sm_75"), (8, 9, "sm_89"), (9, 0, "sm_90a"), (10, 0, "sm_100"), (12, 0, "sm_120")],
)
def test_arch_of_an_nvidia_device(monkeypatch: pytest.MonkeyPatch, major: int, minor: int, arch: str) -> None:
    _pretend(monkeypatch, SimpleNamespace(major=major, minor=minor), hip=None)
    assert device_arch(torch.device("cuda", 0)) == arch


@pytest.mark.parametrize(("name", "arch"), [("gfx942:sramecc+:xnack-", "gfx942"), ("gfx1100", "gfx1100")])
def test_arch_of_an_amd_device_has_no_features(monkeypatch: pytest.MonkeyPatch, name: str, arch: str) -> None:
    _pretend(monkeypatch, SimpleNamespace(major=9, minor=4, gcnArchName=name), hip="6.4")
    assert device_arch(torch.device("cuda", 0)) == arch


@pytest.mark.parametrize(("hip", "backends"), [(None, {"cuda", "triton"}), ("6.4", {"rocm", "triton"})])
def test_where_backends_run(monkeypatch: pytest.MonkeyPatch, hip: str | None, backends: set[str]) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    names = ("reference", "cuda", "rocm", "triton")
    assert {name for name in names if runs_on(name, torch.device("cuda", 0))} == backends
    assert {name for name in names if runs_on(name, torch.device("cpu"))} == {"reference"}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert {name for name in names if runs_on(name, torch.device("cpu"))} == {"reference", "triton"}


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    device_arch.cache_clear()
    yield
    device_arch.cache_clear()


def _pretend(monkeypatch: pytest.MonkeyPatch, properties: object, hip: str | None) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
