"""Triton's compiled code for AMD GPUs, executed instruction by instruction and compared with the oracle.

Not a run on AMD hardware: the assembly that Triton makes for each architecture goes through the interpreter of
tests/support/amdgcn, launched by the backend's own entries. The waves of a workgroup run in a random order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla import dispatch, registry
from mla.errors import UnsupportedError
from tests.kernels import test_matrix as matrix
from tests.support import problems
from tests.support.matrix_cases import EDGES, GATHERS, MERGES, PLANS, QUANTIZATIONS, STORES
from tests.support.problems import Case
from tests.support.triton_amd import Executor, executed

pytest.importorskip("triton")
CPU = torch.device("cpu")
ARCHS = ("gfx90a", "gfx942", "gfx950")

PREFILLS = [
    Case(),
    Case(lengths=EDGES, heads=1, out_dtype="fp32", sinks=True),
    Case(lengths=((5, 150), (0, 1), (130, 2)), heads=1, mask="none", dtypes="fp16"),
    Case(lengths=((40, 30), (0, 33)), heads=1, dims=(256, 256)),
    Case(heads=1, csr=True, page_size=1, mask="documents"),
    Case(heads=2, page_size=16, mask="sink_window", chunk=(100, 40)),
    Case(heads=2, mask="windows_of_heads", layout="layers"),
    Case(heads=1, rope="batched", chunk=(64, 64), softcap=5.0, mask="causal_bias", dtypes="fp16"),
    Case(heads=1, rope="ragged", mask="checkered", lengths=((37, 70), (100, 7))),
    Case(heads=1, lengths=((20, 40), (0, 5)), dtypes="fp32"),
]
FP8 = [
    Case(dtypes="fp8", heads=1, lengths=((20, 40), (0, 5), (0, 0)), v_transposed=True),
    Case(dtypes="fp8", heads=1, lengths=((5, 30),), rope="batched", rope_width=576, v_scale="row"),
    Case(dtypes="fp8+bf16_rope", heads=1, lengths=((20, 40),), prescaled=False, v_scale="row", v_transposed=True),
    Case(dtypes="fp8+bf16_rope", heads=1, lengths=((0, 35),), page_size=1, csr=True),
    Case(dtypes="bf16+fp8_rope", heads=1, lengths=((9, 25), (0, 5)), page_size=16, granularity=576),
    Case(dtypes="fp32+fp8_rope", heads=1, lengths=((0, 20),), rope="ragged", granularity=64),
]
#: gfx942 runs every case; the others every how many-th.
STRIDE = {"gfx90a": 4, "gfx942": 1, "gfx950": 4}


def every(cases: list[Any]) -> pytest.MarkDecorator:
    """Parametrise by architecture and case."""
    pairs = [(arch, case) for arch in ARCHS for case in cases[:: STRIDE[arch]]]
    return pytest.mark.parametrize(("arch", "case"), pairs, ids=str)


def implementation(op: str) -> Any:
    return next(one for one in registry.default() if (one.backend, one.op, one.requires.arch) == ("triton", op, None))


@pytest.fixture
def executor(arch: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Executor]:
    executor = Executor(arch, seed)
    executed(monkeypatch, executor)
    fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    for module in (matrix, problems):
        monkeypatch.setattr(module, "fp8_dtype", lambda device: fp8)
    yield executor
    dispatch.forget()


def run(test: Any, executor: Executor, *arguments: Any) -> None:
    """Run a test of the matrix; a case that the registry refuses is skipped with the reason."""
    try:
        test(*arguments)
    except UnsupportedError as refusal:
        pytest.skip(f"refused: {refusal}")
    assert executor.stats, "nothing was executed"


@every(PREFILLS)
def test_prefill(arch: str, case: Case, executor: Executor, seed: int) -> None:
    run(matrix.test_prefill, executor, implementation("prefill"), CPU, case, "triton", seed)
    assert {name for name, _ in executor.stats} == {"prefill.schedule", "prefill.prefill"}


@every(FP8)
def test_prefill_fp8(arch: str, case: Case, executor: Executor, seed: int) -> None:
    run(matrix.test_prefill, executor, implementation("prefill"), CPU, case, "triton", seed)


@every(PLANS)
def test_plan(arch: str, case: Any, executor: Executor) -> None:
    run(matrix.test_plan, executor, implementation("plan"), CPU, case, "triton")


@every(GATHERS)
@pytest.mark.parametrize("length_on_device", [False, True], ids=["host_length", "device_length"])
def test_gather(arch: str, case: Any, length_on_device: bool, executor: Executor) -> None:
    run(matrix.test_gather, executor, implementation("gather"), CPU, case, length_on_device, "triton")


@every(STORES)
def test_store(arch: str, case: Any, executor: Executor, seed: int) -> None:
    run(matrix.test_store, executor, implementation("store"), CPU, case, "triton", seed)


@every(MERGES)
def test_merge(arch: str, case: Any, executor: Executor, seed: int) -> None:
    run(matrix.test_merge, executor, implementation("merge"), CPU, case, "triton", seed)


@every(QUANTIZATIONS)
def test_quantize(arch: str, case: Any, executor: Executor, seed: int) -> None:
    run(matrix.test_quantize, executor, implementation("quantize"), CPU, case, "triton", seed)


@pytest.mark.parametrize("arch", ["gfx942"])
def test_a_wrong_instruction_is_noticed(arch: str, executor: Executor, seed: int) -> None:
    """The comparison can fail: scores with the exponent's sign turned are not those of the oracle."""
    executor.mutated = "prefill.prefill"
    executor.mutate = lambda text: text.replace("v_exp_f32", "v_rcp_f32")
    case = replace(Case(), lengths=((10, 40),), heads=1)
    with pytest.raises(AssertionError, match="bound"):
        matrix.test_prefill(implementation("prefill"), CPU, case, "triton", seed)
