"""The ROCm kernels' compiled code, executed instruction by instruction and compared with the oracle.

Not a run on AMD hardware: clang's assembly for each architecture goes through the interpreter of tests/support/amdgcn,
launched by the backend's own entries with their own parameter blocks. The waves of a workgroup run in a random order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla
from mla import dispatch, registry
from mla.backends.rocm import prefill
from mla.errors import UnsupportedError
from tests.kernels import test_matrix as matrix
from tests.support import problems
from tests.support.hip import ARCHS, needs_clang
from tests.support.matrix_cases import EDGES, GATHERS, MERGES, PLANS, PREFILLS, QUANTIZATIONS, STORES
from tests.support.problems import Case, build
from tests.support.rocm import Executor, executed, through_public_functions

pytestmark = needs_clang
CPU = torch.device("cpu")

#: gfx942 runs every case of the matrix that the registry admits; what gfx90a and gfx950 run of prefill ...
FEW = [
    Case(),
    Case(scale=1.0, lengths=((90, 70), (40, 3)), heads=1),
    Case(dtypes="fp16", mask="checkered"),
    Case(out_dtype="fp32", lengths=EDGES, sinks=True),
    Case(dims=(256, 256), lengths=((40, 30), (0, 33))),
    Case(rope="batched", chunk=(64, 64), softcap=5.0, mask="causal_bias"),
    Case(rope="ragged", mask="windows_of_heads", page_size=1),
    Case(csr=True, page_size=16, mask="documents"),
    Case(dtypes="bf16+fp8_rope", page_size=16),
]


#: ... and of the other operations: every how many-th case.
STRIDE = {"gfx90a": 3, "gfx942": 1, "gfx950": 3}


def every(cases: list[Any]) -> pytest.MarkDecorator:
    """Parametrise by architecture and case."""
    pairs = [(arch, case) for arch in ARCHS for case in cases[:: STRIDE[arch]]]
    return pytest.mark.parametrize(("arch", "case"), pairs, ids=str)


def implementation(op: str) -> Any:
    (one,) = (one for one in registry.default() if one.backend == "rocm" and one.op == op)
    return one


@pytest.fixture
def executor(arch: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Executor]:
    executor = executed(monkeypatch, arch, seed=seed)
    through_public_functions(monkeypatch, executor)
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


def smaller(case: Case) -> Case:
    """The case with as few heads as its mask tells apart, for a second or two in the interpreter."""
    return replace(case, heads=2 if case.mask in ("checkered", "windows_of_heads", "causal_bias") else 1)


SIXTEEN_BITS = [smaller(case) for case in PREFILLS if not case.dtypes.startswith(("fp32", "fp8"))]
PREFILL_CASES = [("gfx942", case) for case in (*SIXTEEN_BITS, FEW[1])] + [
    (a, case) for a in ("gfx90a", "gfx950") for case in FEW
]


@pytest.mark.parametrize(("arch", "case"), PREFILL_CASES, ids=str)
def test_prefill(arch: str, case: Case, executor: Executor, seed: int) -> None:
    run(matrix.test_prefill, executor, implementation("prefill"), CPU, case, "rocm", seed)


@pytest.mark.parametrize("arch", ["gfx942"])
def test_more_sequences_than_lanes(arch: str, executor: Executor, seed: int) -> None:
    """Beyond 64 sequences a wave finds its tile by bisection."""
    lengths = tuple((i % 5, 3 if i in (0, 63, 70) else 0) for i in range(71))
    run(matrix.test_prefill, executor, implementation("prefill"), CPU, Case(lengths=lengths, heads=1), "rocm", seed)


@pytest.mark.parametrize("arch", ["gfx942"])
def test_more_tiles_than_one_grid_dimension(
    arch: str, executor: Executor, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(prefill, "_MAX_GRID_Y", 2)
    case = Case(lengths=((3, 5), (0, 1), (9, 2)), heads=1)
    run(matrix.test_prefill, executor, implementation("prefill"), CPU, case, "rocm", seed)


@pytest.mark.parametrize("arch", ["gfx942"])
def test_a_sequence_does_not_depend_on_its_company(arch: str, executor: Executor, seed: int) -> None:
    """Bitwise the same rows, alone and behind another sequence, whichever tile and wave they fall into."""
    case = Case(lengths=((30, 150), (77, 45)), heads=1, spare_rows=(0, 0), strided=False, mask="sink_window")
    both = build(case, CPU, seed)
    output, lse = both.run("rocm")
    given = both.operands
    row, key = int(given["valid_length"][1]), int(given["cache_row_offsets"][1])
    cache = given["k_rope"]
    alone = {
        **given,
        "q": given["q"][row:],
        "k": given["k"][key:],
        "v": given["v"][key:],
        "k_rope": replace(cache, page_table=cache.page_table[1:], lengths=cache.lengths[1:], batch_size=1),
        "valid_length": given["valid_length"][1:] - row,
        "cache_row_offsets": given["cache_row_offsets"][1:] - key,
    }
    again, again_lse = torch.empty_like(output[row:]), torch.empty_like(lse[row:])
    dispatch.forget()
    mla.prefill(**alone, output=again, lse=again_lse, target="rocm")
    assert torch.equal(again, output[row:])
    assert torch.equal(again_lse, lse[row:])


@every(PLANS)
def test_plan(arch: str, case: Any, executor: Executor) -> None:
    run(matrix.test_plan, executor, implementation("plan"), CPU, case, "rocm")


@every(GATHERS)
def test_gather(arch: str, case: Any, executor: Executor) -> None:
    for known_length in (True, False):
        run(matrix.test_gather, executor, implementation("gather"), CPU, case, known_length, "rocm")


@every(STORES)
def test_store(arch: str, case: Any, executor: Executor, seed: int) -> None:
    run(matrix.test_store, executor, implementation("store"), CPU, case, "rocm", seed)


@every(MERGES)
def test_merge(arch: str, case: Any, executor: Executor, seed: int) -> None:
    run(matrix.test_merge, executor, implementation("merge"), CPU, case, "rocm", seed)


@every(QUANTIZATIONS)
def test_quantize(arch: str, case: Any, executor: Executor, seed: int) -> None:
    run(matrix.test_quantize, executor, implementation("quantize"), CPU, case, "rocm", seed)
