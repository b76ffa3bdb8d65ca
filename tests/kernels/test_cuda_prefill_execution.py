"""The mma.sync prefill kernel run on the host, block by block, and compared with the oracle; its faults are found.

Not a run on NVIDIA hardware: see tests/support/cuda_execution.hpp.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mla import dispatch
from mla.backends.cuda.prefill_sm80 import PrefillSm80
from tests.kernels.test_cuda_prefill_sm80 import shifted
from tests.support.cuda_execution import Executor, HostFault, Mutation, executed, needs_compiler
from tests.support.matrix_cases import EDGES
from tests.support.problems import Case, build
from tests.support.tolerance import assert_lse, assert_output, precision_of

pytestmark = needs_compiler
Run = Callable[..., Executor]

#: Architectures whose shared memory gives each tile.
ARCHS = ("sm_80", "sm_89", "sm_90a")
CASES = [
    Case(scale=1.0, lengths=((90, 70), (40, 3)), heads=1),
    Case(lengths=((100, 400), (0, 0), (3, 140)), heads=2, mask="sink_window", page_size=1),
    Case(out_dtype="fp32", lengths=EDGES, sinks=True, heads=1),
    Case(dims=(256, 256), lengths=((40, 30), (0, 140)), heads=1),
    Case(rope="batched", chunk=(64, 64), softcap=5.0, mask="causal_bias"),
    Case(rope="ragged", mask="windows_of_heads", dtypes="fp16", scale=-0.1),
    Case(csr=True, page_size=16, mask="documents", lse_layout="HT"),
    Case(heads=18, lengths=((0, 65), (5, 1)), mask="none"),
]
#: Each on an architecture that widens fp8 (sm_80) or multiplies it as it is (sm_89, narrow values).
FP8_CASES = [
    ("sm_89", Case(dtypes="bf16+fp8_rope", scale=1.0, lengths=((90, 70), (40, 3)), heads=1, granularity=576)),
    ("sm_80", Case(dtypes="fp16+fp8_rope", rope="batched", rope_width=192, granularity=64, heads=2)),
    ("sm_80", Case(dtypes="bf16+fp8_rope", rope="ragged", dims=(256, 256), heads=1, scale=-0.1)),
    ("sm_80", Case(dtypes="fp8", lengths=((90, 70), (40, 3)), heads=1, sinks=True, v_scale="number")),
    ("sm_89", Case(dtypes="fp8", lengths=((90, 70), (40, 3)), heads=2, sinks=True, scale=0.15)),
    ("sm_89", Case(dtypes="fp8", lengths=((40, 30), (0, 140)), heads=1, v_scale="row", granularity=64)),
    ("sm_80", Case(dtypes="fp8", rope="batched", rope_width=192, granularity=64, chunk=(64, 64), mask="causal_bias")),
    ("sm_89", Case(dtypes="fp8+bf16_rope", lengths=((90, 70), (40, 3)), heads=1, v_scale="")),
    ("sm_89", Case(dtypes="fp8", lengths=((40, 30), (0, 140), (3, 7)), page_size=1, heads=2, v_transposed=True)),
    ("sm_80", Case(dtypes="fp8+bf16_rope", lengths=((70, 30), (0, 64)), dims=(256, 256), heads=1, v_transposed=True)),
    ("sm_80", Case(dtypes="fp8+bf16_rope", rope="ragged", prescaled=False, dims=(256, 256), heads=2, softcap=5.0)),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> Iterator[Run]:
    """Return what lets the public functions run the kernel of an architecture here."""

    def run(arch: str, mutate: Mutation | None = None) -> Executor:
        return executed(monkeypatch, arch, PrefillSm80, folder, mutate, seed)

    yield run
    dispatch.forget()


def check(case: Case, seed: int, elements: int = 0) -> None:
    problem = build(case, "cpu", seed)
    if elements:
        for name in ("q", "k", "v"):
            problem.operands[name] = shifted(problem.operands[name], elements)
    output, lse = problem.run("cuda")
    expected, expected_lse = problem.expect()
    assert_output(output, expected, precision_of(case.dtypes))
    assert_lse(lse, expected_lse, precision_of(case.dtypes))


@pytest.mark.parametrize(
    ("arch", "case"),
    [*itertools.product(ARCHS, CASES), *FP8_CASES],
    ids=str,
)
def test_prefill(arch: str, case: Case, on_host: Run, seed: int) -> None:
    executor = on_host(arch)
    check(case, seed)
    assert len(executor.launched) == 1


@pytest.mark.parametrize(("elements", "dtypes"), [(1, "bf16"), (2, "bf16"), (4, "bf16"), (1, "fp8"), (4, "fp8")])
def test_rows_that_are_not_aligned(elements: int, dtypes: str, on_host: Run, seed: int) -> None:
    executor = on_host("sm_80")
    check(Case(lengths=((90, 70), (40, 3)), heads=2, dtypes=dtypes, strided=False, poison=math.inf), seed, elements)
    assert f"a{elements * (2 if dtypes == 'bf16' else 1)}m" in executor.launched[0]


def test_tall_and_short_tiles_give_the_same_bits(on_host: Run, seed: int) -> None:
    """Few items take short tiles; the same sequence among others takes tall ones."""
    executor = on_host("sm_90a")
    few = build(Case(lengths=((70, 80),), heads=1, rope="ragged", spare_rows=(0, 0), scale=1.0), "cpu", seed)
    output, lse = few.run("cuda")
    again = {**few.operands, **{name: few.operands[name].repeat(4, 1, 1) for name in ("q", "k", "v", "k_rope")}}
    for name in ("valid_length", "cache_row_offsets"):
        again[name] = few.operands[name][1] * torch.arange(5, dtype=torch.int32)
    few.operands = again
    few.keywords = {
        name: value.repeat(4) if isinstance(value, torch.Tensor) else value for name, value in few.keywords.items()
    }
    many, many_lse = few.run("cuda")
    assert ["m64n" in name for name in executor.launched] == [True, False]
    for b in range(4):
        rows = slice(b * len(output), (b + 1) * len(output))
        assert torch.equal(many[rows], output) and torch.equal(many_lse[rows], lse)


def test_a_large_batch(on_host: Run, seed: int) -> None:
    """More sequences than a search step of one warp tells apart, most of them empty."""
    lengths = tuple((b % 7, 1 if b % 97 == 5 else 0) for b in range(1100))
    on_host("sm_89")
    check(Case(lengths=lengths, heads=1, page_size=16), seed)


FAULTS = {
    "diagonal_shifted": ("int ahead = item.q_position", "int ahead = 1 + item.q_position"),
    "scale_wrong": ("kScaleScores ? 1.0f : p.logit_scale", "1.02f * p.logit_scale"),
    "page_index_wrong": ("/ kPageSize])", "/ kPageSize ^ 1])"),
    "last_key_ignored": ("bool visible = column_step(j, e) < limit", "bool visible = true"),
    "values_past_the_last_key": ("cp_async_cg_16(to, from, counts ? 16 : 0)", "cp_async_cg_16(to, from, 16)"),
    "rescale_dropped": ("if (__any_sync(~0u, moved))", "if (false)"),
    "swizzle_of_reads_only": ("(at ^ step % kSteps * SPAN)", "(at + step % kSteps * SPAN)"),
    "first_barrier_dropped": ("__syncthreads();  // barrier 1", ""),
    "second_barrier_dropped": ("__syncthreads();  // barrier 2", ""),
    "wait_for_values_dropped": ("cp_async_wait_group<1>()", "cp_async_wait_group<2>()"),
    "stages_swapped": ("k_at + (stage ^ 1) * kKBytes", "k_at + stage * kKBytes"),
    "slots_counted_short": ("/ kBlockM + b;", "/ kBlockM + b / 2;"),
}
FP8_FAULTS = {
    "probabilities_of_other_keys": (
        "four[4] = {x[first], x[first + 1], y[first], y[first + 1]}",
        "four[4] = {y[first], y[first + 1], x[first], x[first + 1]}",
    ),
    "scale_of_another_key": ("s[i][j][e] *= e % 2 ? scale.y : scale.x", "s[i][j][e] *= scale.x"),
    "rope_scale_dropped": ("kFp8Data ? of_pass(scale, pass) : 1.0f", "1.0f"),
    "rope_in_the_stage_that_is_read": ("rope.store(k_at + (stage ^ 1)", "rope.store(k_at + stage"),
    "columns_of_two_keys_mixed": ("prmt(b[2 * half], 0, 0x3120)", "prmt(b[2 * half], 0, 0x3210)"),
}


@pytest.mark.parametrize(("old", "new"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(old: str, new: str, on_host: Run, seed: int) -> None:
    on_host("sm_89", lambda text: text.replace(old, new))
    found = False
    for mask, scale in (("causal", 1.0), ("none", 0.05)):
        try:
            check(Case(lengths=((60, 80), (40, 3), (5, 1)), heads=1, page_size=16, scale=scale, mask=mask), seed)
        except (AssertionError, HostFault):
            found = True
    assert found, "the fault was not seen"


@pytest.mark.parametrize(("old", "new"), FP8_FAULTS.values(), ids=FP8_FAULTS)
def test_a_fault_of_fp8_is_caught(old: str, new: str, on_host: Run, seed: int) -> None:
    on_host("sm_80" if "prmt" in old else "sm_89", lambda text: text.replace(old, new))
    case = Case(dtypes="fp8", lengths=((60, 80), (40, 3)), heads=1, page_size=16, mask="none", v_transposed=True)
    with pytest.raises((AssertionError, HostFault)):
        check(case, seed)
