from __future__ import annotations

import dataclasses
import json
import threading
import timeit
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mla
from mla import dispatch, registry
from mla.errors import ArgumentError, DeviceError, TargetError, UnsupportedError
from mla.masks import CausalMask, NullMask
from mla.problem import Problem
from mla.registry import Registry
from mla.target import Availability, device_arch

CPU = torch.device("cpu")
MERGE = Problem("merge", "bf16", "bf16")
PREFILL = Problem("prefill", "bf16", "bf16", page_size=64, rope="paged", features=frozenset({"lse"}))

prepared: list[tuple[Problem, torch.device]] = []
refusal: dict[str, str | None] = {}


class Entry:
    """An implementation that notes what it is asked."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        return refusal.get(arch)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[Any], None]:
        prepared.append((problem, device))
        return lambda args: args.append(problem.op)


def _entry(identifier: str, priority: int, **requires: Any) -> dict[str, Any]:
    backend, _, op, _ = identifier.split(".")
    entry = {"id": identifier, "op": op, "backend": backend, "entry": f"{__name__}:Entry", "priority": priority}
    return entry | ({"requires": requires} if requires else {})


@pytest.fixture(autouse=True)
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A registry of our own, and machines that are told instead of probed."""
    own = Registry()
    told = {
        "reference": Availability(None, ("cpu",)),
        "cuda": Availability("torch sees no NVIDIA GPU"),
        "rocm": Availability("hip-python is not installed: pip install 'mla-prefill[rocm]'"),
        "triton": Availability("no GPU"),
    }
    monkeypatch.setattr(registry, "default", lambda: own)
    monkeypatch.setattr(dispatch, "availability", lambda backend: told.get(backend, Availability(None)))
    prepared.clear()
    refusal.clear()
    dispatch.forget()

    def add(*entries: dict[str, Any]) -> None:
        own.add({"schema": 1, "implementations": list(entries)})

    yield SimpleNamespace(add=add, told=told)
    dispatch.forget()


def test_the_first_that_fits_is_prepared_once(scene: SimpleNamespace) -> None:
    scene.add(
        _entry("reference.cpu.merge.narrow", 20, dtypes=["fp16"]),
        _entry("reference.cpu.merge.wide", 10),
        _entry("reference.cpu.merge.last", 1),
    )
    assert dispatch.chosen(MERGE, "cpu", CPU).id == "reference.cpu.merge.wide"
    run = dispatch.resolve(MERGE, "cpu", CPU)
    assert dispatch.resolve(dataclasses.replace(MERGE), "cpu", CPU) is run
    assert prepared == [(MERGE, CPU)]
    seen: list[str] = []
    run(seen)
    assert seen == ["merge"]
    half = dataclasses.replace(MERGE, dtypes="fp16")
    assert dispatch.chosen(half, "cpu", CPU).id == "reference.cpu.merge.narrow"


def test_many_threads_prepare_once(scene: SimpleNamespace) -> None:
    scene.add(_entry("reference.cpu.merge.one", 1))
    gate = threading.Barrier(8)
    runners: list[object] = []

    def work() -> None:
        gate.wait()
        runners.append(dispatch.resolve(MERGE, "cpu", CPU))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(prepared) == 1 and len(set(map(id, runners))) == 1


def test_a_hit_is_cheap(scene: SimpleNamespace) -> None:
    scene.add(_entry("reference.cpu.merge.one", 1))
    dispatch.resolve(MERGE, "cpu", CPU)
    best = min(timeit.repeat(lambda: dispatch.resolve(MERGE, "cpu", CPU), number=2000, repeat=5)) / 2000
    assert best < 10e-6, f"{best * 1e6:.2f} us a look-up"


def test_a_memory_is_bounded_and_forgets() -> None:
    memory = dispatch.Memo(limit=3)
    for key in range(5):
        assert memory.remember(key, str(key)) == str(key)
    assert list(memory) == [2, 3, 4]
    dispatch.forget()
    assert memory.get(4) is None


def test_registering_changes_the_choice(scene: SimpleNamespace) -> None:
    scene.add(_entry("reference.cpu.merge.old", 1))
    dispatch.resolve(MERGE, "cpu", CPU)
    mla.register({"schema": 1, "implementations": [_entry("reference.cpu.merge.new", 2)]})
    assert dispatch.chosen(MERGE, "cpu", CPU).id == "reference.cpu.merge.new"
    dispatch.resolve(MERGE, "cpu", CPU)
    assert len(prepared) == 2


def test_a_refusal_carries_every_reason(scene: SimpleNamespace) -> None:
    refusal["cpu"] = "needs more memory"
    scene.add(
        _entry("reference.cpu.merge.picky", 3),
        _entry("reference.cpu.merge.half", 2, dtypes=["fp16"]),
    )
    with pytest.raises(UnsupportedError) as caught:
        dispatch.resolve(MERGE, "cpu", CPU)
    explanation = caught.value.explanation
    assert explanation is not None and explanation.chosen is None
    assert [one.against for one in explanation.candidates] == [
        ("needs more memory",),
        ("dtype bf16 is not in fp16",),
    ]
    for word in ("nothing serves this problem on target 'cpu'", "needs more memory", "dtype bf16 is not in fp16"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("cuda", ["'cuda'", "an NVIDIA GPU", "'cpu'", "target='cpu'"]),
        ("rocm:gfx942", ["an AMD GPU"]),
        ("triton", ["a GPU", "TRITON_INTERPRET=1"]),
        ("gpu", ["a GPU", "target='cpu'"]),
    ],
)
def test_tensors_must_lie_where_the_target_runs(
    scene: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, target: str, words: list[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    scene.add(*(_entry(f"{name}.any.merge.x", 1) for name in ("cuda", "rocm", "triton", "reference")))
    with pytest.raises(DeviceError) as caught:
        dispatch.resolve(MERGE, target, CPU)
    for word in words:
        assert word in str(caught.value)
    assert not prepared


def test_gpu_tensors_are_refused_by_the_cpu_target(scene: SimpleNamespace) -> None:
    scene.add(_entry("reference.cpu.merge.x", 1))
    with pytest.raises(DeviceError, match="needs tensors on the CPU, but they are on 'cuda:0': pass target='gpu'"):
        dispatch.resolve(MERGE, "cpu", torch.device("cuda", 0))


def test_an_unknown_target_is_named(scene: SimpleNamespace) -> None:
    with pytest.raises(TargetError, match="did you mean 'cuda'"):
        dispatch.resolve(MERGE, "cudda", CPU)


@pytest.fixture
def hopper(scene: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A machine with one device of compute capability 9.0."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9, minor=0))
    monkeypatch.setattr(dispatch, "_runtime", lambda backend: SimpleNamespace(arch_of=device_arch))
    scene.told |= {"cuda": Availability(None, ("sm_90a",)), "triton": Availability(None, ("sm_90a",))}
    device_arch.cache_clear()
    yield torch.device("cuda", 0)
    device_arch.cache_clear()


def test_gpu_means_the_vendor_of_the_device(scene: SimpleNamespace, hopper: torch.device) -> None:
    scene.add(
        _entry("rocm.any.merge.x", 90),
        _entry("cuda.sm80.merge.x", 50, arch=["sm_8*"]),
        _entry("triton.any.merge.x", 20),
        _entry("cuda.any.merge.slow", 20, arch=["sm_9*"]),
    )
    explanation = dispatch.explain("merge", MERGE, target="gpu", device=hopper)
    assert [one.id for one in explanation.candidates] == [
        "cuda.sm80.merge.x",
        "cuda.any.merge.slow",
        "triton.any.merge.x",
    ]
    assert dispatch.chosen(MERGE, "gpu", hopper).id == "cuda.any.merge.slow"
    assert dispatch.chosen(MERGE, "triton", hopper).id == "triton.any.merge.x"
    assert explanation.candidates[0].against == ("architecture sm_90a is not in sm_8*",)


def test_a_named_backend_does_not_fall_back(scene: SimpleNamespace, hopper: torch.device) -> None:
    scene.told["cuda"] = Availability("cuda-core is not installed: pip install 'mla-prefill[cuda]'")
    scene.add(_entry("cuda.any.merge.x", 50), _entry("triton.any.merge.x", 20))
    with pytest.raises(UnsupportedError, match=r"pip install 'mla-prefill\[cuda\]'"):
        dispatch.resolve(MERGE, "cuda", hopper)
    assert dispatch.chosen(MERGE, "gpu", hopper).id == "triton.any.merge.x"


def test_the_named_architecture_must_be_the_devices(scene: SimpleNamespace, hopper: torch.device) -> None:
    scene.add(_entry("cuda.any.merge.x", 50))
    assert dispatch.chosen(MERGE, "cuda:sm_90a", hopper).id == "cuda.any.merge.x"
    with pytest.raises(DeviceError, match=r"names sm_80, but cuda:0 is sm_90a"):
        dispatch.chosen(MERGE, "cuda:sm_80", hopper)


@pytest.mark.parametrize(
    ("target", "chosen", "against"),
    [
        ("cuda:sm_90a", "cuda.sm90.prefill.x", {"cuda.sm80.prefill.x": ()}),
        ("cuda:sm_80", "cuda.sm80.prefill.x", {"cuda.sm90.prefill.x": ("architecture sm_80 is not in sm_90a",)}),
        ("cuda:sm_75", None, {"cuda.sm80.prefill.x": ("architecture sm_75 is not in sm_8*, sm_9*",)}),
        ("rocm:gfx942", "rocm.cdna.prefill.x", {}),
        ("rocm:gfx1100", None, {"rocm.cdna.prefill.x": ("architecture gfx1100 is not in gfx90a, gfx94*",)}),
        (
            "gpu:gfx1100",
            "triton.any.prefill.x",
            {"rocm.cdna.prefill.x": ("architecture gfx1100 is not in gfx90a, gfx94*",)},
        ),
        ("cuda:sm_86", None, {"cuda.sm80.prefill.x": ("not enough shared memory",)}),
    ],
)
def test_explains_hardware_that_is_not_here(
    scene: SimpleNamespace, target: str, chosen: str | None, against: dict[str, tuple[str, ...]]
) -> None:
    refusal["sm_86"] = "not enough shared memory"
    scene.add(
        _entry("cuda.sm90.prefill.x", 100, arch=["sm_90a"]),
        _entry("cuda.sm80.prefill.x", 50, arch=["sm_8*", "sm_9*"]),
        _entry("rocm.cdna.prefill.x", 100, arch=["gfx90a", "gfx94*"]),
        _entry("triton.any.prefill.x", 10),
    )
    explanation = dispatch.explain("prefill", target=target)
    assert explanation.chosen == chosen
    by_id = {one.id: one for one in explanation.candidates}
    for identifier, reasons in against.items():
        assert by_id[identifier].against == reasons
    for one in explanation.candidates:
        assert one.notes == (f"cannot run here: {scene.told[one.backend].reason}",)


@pytest.mark.parametrize(
    ("requires", "fields", "sentence"),
    [
        ({"dtypes": ["fp16"]}, {}, "dtype bf16 is not in fp16"),
        ({"out_dtypes": ["bf16"]}, {"out_dtype": "fp32"}, "output dtype fp32 is not in bf16"),
        ({"dims": [[192, 128]]}, {"dims": (256, 256)}, "(q_depth, v_head_dim) (256, 256) is not in (192, 128)"),
        ({"rope": ["ragged"]}, {}, "rope paged is not in ragged"),
        ({"page_size": {"min": 64}}, {"page_size": 16}, "page size 16 is not at least 64 and a multiple of 1"),
        ({"page_size": {"multiple_of": 16}}, {"page_size": 24}, "page size 24 is not at least 1 and a multiple of 16"),
        (
            {"page_size": {"max": 128}},
            {"page_size": 256},
            "page size 256 is not at least 1, at most 128 and a multiple of 1",
        ),
        ({"granularity": [64]}, {"granularity": 576}, "granularity 576 is not in 64"),
        ({"masks": ["NullMask"]}, {}, "mask CausalMask is not in NullMask"),
        ({"features": ["lse"]}, {"features": ["lse", "sinks", "bias"]}, "does not do bias, sinks"),
        ({"alignment": 16}, {"alignment": 2}, "alignment 2 bytes is not at least 16"),
    ],
)
def test_each_failed_condition_is_a_sentence(
    scene: SimpleNamespace, requires: dict[str, Any], fields: dict[str, Any], sentence: str
) -> None:
    scene.add(_entry("reference.cpu.prefill.x", 1, **requires))
    (candidate,) = dispatch.explain("prefill", target="cpu", **fields).candidates
    assert candidate.against == (sentence,)


def test_met_conditions_speak_for_a_candidate(scene: SimpleNamespace) -> None:
    scene.add(
        _entry("reference.cpu.prefill.x", 1, dtypes=["bf16"], masks=["CausalMask"], features=["lse"], alignment=16)
    )
    explanation = dispatch.explain("prefill", target="cpu")
    (candidate,) = explanation.candidates
    assert not candidate.against
    assert candidate.merits == (
        "dtype bf16 is in bf16",
        "mask CausalMask is in CausalMask",
        "does lse",
        "alignment 16 bytes is at least 16",
    )
    assert "reference.cpu.prefill.x (priority 1): chosen" in str(explanation)
    assert repr(explanation) == str(explanation)


def test_without_a_device_an_architecture_is_asked_for(scene: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    scene.add(_entry("cuda.sm90.merge.x", 1, arch=["sm_90a"]))
    (candidate,) = dispatch.explain("merge", target="cuda").candidates
    assert candidate.against == (
        "torch sees no NVIDIA GPU",
        "needs architecture sm_90a, and neither a device here nor the target says which",
    )


def test_the_usual_problem_may_be_changed(scene: SimpleNamespace) -> None:
    scene.add(_entry("reference.cpu.prefill.x", 1))
    told = str(dispatch.explain("prefill", target="cpu"))
    for word in ("dtype bf16", "q_depth 192, v_head_dim 128", "page size 64", "paged rope", "CausalMask", "lse"):
        assert word in told
    told = str(dispatch.explain("prefill", target="cpu", mask=NullMask(), page_size=1, csr=True))
    assert "NullMask" in told and "page size 1 (csr)" in told
    with_program = dataclasses.replace(PREFILL, mask=CausalMask().program)
    assert "CausalMask" in str(dispatch.explain("prefill", with_program, target="cpu"))


@pytest.mark.parametrize(
    ("op", "fields", "scales"),
    [
        ("prefill", {"dtypes": "fp8"}, {"q_scale", "k_scales", "v_scale", "scales"}),
        ("prefill", {"dtypes": "fp8+bf16_rope"}, {"q_scale", "k_scales", "split_q"}),
        ("prefill", {"dtypes": "fp16+fp8_rope", "features": ["sinks"]}, {"scales", "sinks"}),
        ("prefill", {"dtypes": "bf16"}, set()),
        ("gather", {"dtypes": "fp8"}, {"scales"}),
        ("store", {"out_dtype": "fp8+bf16_rope"}, {"scales"}),
    ],
)
def test_explain_describes_a_call_with_the_scales_of_its_dtypes(
    op: str, fields: dict[str, Any], scales: set[str]
) -> None:
    told = str(dispatch.explain(op, target="cpu", **fields)).splitlines()[1]
    assert set(told.split(", ")) & {"q_scale", "k_scales", "v_scale", "scales", "split_q", "sinks"} == scales
    assert ("granularity 128" in told) == ("scales" in scales)


def test_wrong_questions_are_refused(scene: SimpleNamespace) -> None:
    with pytest.raises(ArgumentError, match="'decode' is not one of plan, gather"):
        dispatch.explain("decode", target="cpu")
    with pytest.raises(ArgumentError, match="pages: no such field of a problem; fields: alignment"):
        dispatch.explain("prefill", target="cpu", pages=1)
    with pytest.raises(ArgumentError, match="it is a merge problem, but op is 'prefill'"):
        dispatch.explain("prefill", MERGE, target="cpu")


def test_an_empty_answer_says_so(scene: SimpleNamespace) -> None:
    explanation = dispatch.explain("merge", target="cuda:sm_90a")
    assert explanation.notes == ("no implementation of merge is registered for cuda",)
    assert "no implementation fits" in str(explanation)


def test_an_answer_is_plain_data(scene: SimpleNamespace) -> None:
    scene.add(_entry("rocm.cdna.merge.x", 1, arch=["gfx942"]))
    told = json.loads(json.dumps(dispatch.explain("merge", target="rocm:gfx942").to_dict()))
    assert told["chosen"] == "rocm.cdna.merge.x" and told["target"] == "rocm:gfx942"
    assert told["candidates"][0]["merits"] == ["architecture gfx942 is in gfx942"]


def test_a_backend_of_the_users_own_serves_its_target(scene: SimpleNamespace) -> None:
    scene.add(_entry("acme.any.merge.x", 1))
    dispatch.resolve(MERGE, "acme", CPU)
    assert prepared == [(MERGE, CPU)]


def test_an_entry_that_cannot_be_imported_is_a_reason(scene: SimpleNamespace) -> None:
    scene.add(_entry("reference.cpu.merge.x", 1) | {"entry": "no_such_module:Merge"})
    with pytest.raises(UnsupportedError, match="no_such_module:Merge cannot be imported: No module named"):
        dispatch.resolve(MERGE, "cpu", CPU)
