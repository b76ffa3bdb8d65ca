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
from mla.masks import CausalMask
from tests.kernels import test_matrix as matrix
from tests.support import problems
from tests.support.hip import ARCHS, needs_clang
from tests.support.matrix_cases import EDGES, GATHERS, MERGES, PLANS, PREFILLS, QUANTIZATIONS, STORES
from tests.support.paged import make_paged
from tests.support.problems import Case, build
from tests.support.rocm import Executor, executed, through_public_functions
from tests.support.tolerance import assert_lse, assert_output

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

#: ... and what gfx950 runs in fp8.
FP8 = [
    Case(dtypes="fp8", lengths=((37, 70), (0, 0), (64, 1)), heads=2, mask="checkered"),
    Case(dtypes="fp8", lengths=((90, 70), (40, 3)), heads=1, scale=1.0, page_size=1, v_scale="row"),
    Case(dtypes="fp8", lengths=((40, 30), (0, 33)), heads=1, dims=(256, 256), out_dtype="fp32", v_transposed=True,
         csr=True),
    Case(dtypes="fp8+bf16_rope", lengths=EDGES, heads=1, rope="ragged", v_transposed=True, v_scale="", sinks=True),
    Case(dtypes="fp8+bf16_rope", lengths=((90, 70), (5, 3)), heads=1, dims=(256, 256), rope="batched", chunk=(64, 64),
         prescaled=False, softcap=15.0, mask="sink_window"),
]  # fmt: skip

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


NARROW = [smaller(case) for case in PREFILLS if not case.dtypes.startswith("fp32")]
PREFILL_CASES = [
    *(("gfx942", case) for case in (*NARROW, FEW[1], FP8[4])),
    *((arch, case) for arch in ("gfx90a", "gfx950") for case in FEW),
    *(("gfx950", case) for case in FP8),
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


def test_fp8_is_refused_without_its_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    through_public_functions(monkeypatch, executed(monkeypatch, "gfx90a"))
    with pytest.raises(UnsupportedError, match="gfx90a multiplies no fp8 matrices"):
        build(FP8[0], CPU).run("rocm")


@pytest.mark.parametrize("arch", ["gfx942"])
def test_scales_of_values_that_differ_by_decades(arch: str, executor: Executor, seed: int) -> None:
    """Each row's weights keep their precision, whatever keys that count little for it have as scales."""
    case = Case(dtypes="fp8", lengths=((90, 70), (40, 3)), heads=1, scale=2.0, v_scale="row")
    problem = build(case, CPU, seed)
    scales = problem.keywords["v_scale"]
    decades = torch.rand(scales.shape, generator=torch.Generator().manual_seed(seed)) * 6 - 3
    scales *= 10**decades
    scales[:64] *= 1e6  # a whole tile, which later ones leave behind
    problem.operands["k"][:64].copy_((problem.operands["k"][:64].float() * 0.01).to(problem.operands["k"].dtype))
    problem.keywords["k_scales"][:64] *= 0.01
    output, lse = problem.run("rocm")
    expected, expected_lse = problem.expect()
    assert_output(output, expected, "fp8")
    assert_lse(lse, expected_lse, "fp8")
    for row in (~expected.isnan().all(-1)).nonzero():  # each row by itself: a few large ones would hide the others
        assert_output(output[tuple(row)][None], expected[tuple(row)][None], "fp8", 2.0)


@pytest.mark.parametrize(("arch", "narrow_cache"), [("gfx942", True), ("gfx950", False)])
def test_a_job_attended_in_fp8(
    arch: str, narrow_cache: bool, executor: Executor, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two chunks, from the plan to the merge, beside the same job on the reference."""
    fp8 = problems.fp8_dtype(CPU)
    cache = make_paged((70, 0), (5, 64), 64, dtype=fp8 if narrow_cache else torch.bfloat16)
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(69, 1, 192, generator=random).to(torch.bfloat16)
    weight = (torch.randn(256, 512, generator=random) * 512**-0.5).to(torch.bfloat16)
    given = (q, cache.cache, cache.layer_idx, weight, cache.input_row_offsets, CausalMask(), 192**-0.5)
    options = {"buffer_token_size": 128, "seq_lens_cpu": [75, 64], "return_lse": True, "attention_dtype": fp8}
    output, lse = mla.chunked_prefill(*given, **options, target="rocm")
    executed_kernels = [name for stats in executor.stats for name in stats.program.kernels]
    assert executed_kernels.count("mla_prefill") == 2
    monkeypatch.undo()  # the reference runs as it is
    dispatch.forget()
    expected, expected_lse = mla.chunked_prefill(*given, **options, target="cpu")
    assert_output(output, expected.double(), "fp8")
    assert_lse(lse, expected_lse.double(), "fp8")


@pytest.mark.parametrize(("arch", "dtypes"), [("gfx942", "bf16"), ("gfx942", "fp8")])
def test_a_sequence_does_not_depend_on_its_company(arch: str, dtypes: str, executor: Executor, seed: int) -> None:
    """Bitwise the same rows, alone and behind another sequence, whichever tile and wave they fall into."""
    case = Case(
        lengths=((30, 150), (77, 45)), heads=1, spare_rows=(0, 0), strided=False, mask="sink_window", dtypes=dtypes,
        v_scale="row",
    )  # fmt: skip
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
    scales = {
        name: scale[row if name == "q_scale" else key :] for name, scale in both.keywords.items() if "scale" in name
    }
    again, again_lse = torch.empty_like(output[row:]), torch.empty_like(lse[row:])
    dispatch.forget()
    mla.prefill(**alone, **scales, output=again, lse=again_lse, target="rocm")
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
