"""The execution tests can fail: a kernel with one fault is found wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla import dispatch
from tests.kernels import test_matrix as matrix
from tests.kernels.test_rocm_execution import implementation
from tests.support import problems
from tests.support.amdgcn import MemoryFault
from tests.support.hip import needs_clang
from tests.support.matrix_cases import PLANS
from tests.support.problems import Case, build
from tests.support.rocm import Executor, executed, through_public_functions
from tests.support.tolerance import assert_lse, assert_output, precision_of

pytestmark = needs_clang
CPU = torch.device("cpu")
#: Several key tiles a wave, several pages a sequence, rows beyond the last wave; with scale 1 maxima that move.
CASE = Case(lengths=((90, 70), (40, 3)), heads=1, page_size=16)

PREFILL = {
    "barrier_dropped": ("    barrier();  // the stage", "    // barrier();  // the stage"),
    "value_column_swapped": ("value_place(own.column + c,", "value_place((own.column + 3 * c) % kVDim,"),
    "key_chunk_swapped": ("kRowChunks + item(i) % kRopeRowChunks))", "kRowChunks + (item(i) % kRopeRowChunks ^ 1)))"),
    "swizzle_of_reads_only": (
        "key[i] = key_place(row, 2 * i + half)",
        "key[i] = row * kKeyPitch + (2 * i + half) * kChunkBytes",
    ),
    "page_index_wrong": ("source.offset + key) / kPageSize]", "source.offset + key) / kPageSize ^ 1]"),
    "diagonal_shifted": ("mask_visible(mask, b, h, first + ahead,", "mask_visible(mask, b, h, first + ahead + 1,"),
    "rows_not_clamped": ("WHOLE ? row : smaller(row, last)", "row"),
    "rescale_dropped": ("o[d] *= factor;", "o[d] *= 1.0f;"),
    "key_order_of_values": ("chunk % 2 * 4 + half * 2 * kKeys", "chunk % 2 * 2 * kKeys + half * 4"),
}
FP8_ROWS = Case(lengths=((90, 70), (40, 3)), heads=1, page_size=16, dtypes="fp8", v_scale="row", scale=1.0)
FP8_HEADS = replace(FP8_ROWS, v_transposed=True, v_scale="head")
MIXED = replace(FP8_HEADS, dtypes="fp8+bf16_rope", prescaled=False, rope="ragged")
FP8 = {
    "key_order_of_scales": (FP8_ROWS, "register_key(lane_id() % 16) + lane_key()", "lane_id() % 32"),
    "key_order_of_values": (FP8_ROWS, "chunk % 2 * 4 + half * 2 * kKeys", "chunk % 2 * 2 * kKeys + half * 4"),
    "bytes_of_values_swapped": (FP8_ROWS, "kBytes = 0x05010400", "kBytes = 0x01050004"),
    "unit_of_weights_dropped": (FP8_ROWS, "s *= kUnitWeight * inverse", "s *= kUnitWeight"),
    "range_of_another_format": (FP8_HEADS, "kLargestLog2<e4m3fnuz> = 7", "kLargestLog2<e4m3fnuz> = 12"),
    "rope_scale_dropped": (FP8_HEADS, "scaled(sum, scales.rope[block]) +", "sum +"),
    "halves_of_transposed_values": (FP8_HEADS, "+ run % 2 * 8)", "+ (run % 2 ^ 1) * 8)"),
    "scale_of_a_head_doubled": (FP8_HEADS, "weight *= p.v_scale.data", "weight *= 2.0f; weight *= p.v_scale.data"),
    "scale_of_a_query_dropped": (MIXED, "scaled(sum, scales.key[block]) * q.scale", "scaled(sum, scales.key[block])"),
}


def mutated(monkeypatch: pytest.MonkeyPatch, old: str, new: str, seed: int) -> Executor:
    executor = executed(monkeypatch, "gfx942", lambda text: text.replace(old, new), seed)
    through_public_functions(monkeypatch, executor)
    monkeypatch.setattr(problems, "fp8_dtype", lambda device: torch.float8_e4m3fnuz)
    return executor


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, seed: int) -> Iterator[Executor]:
    yield mutated(monkeypatch, *request.param, seed)
    dispatch.forget()


def survives(test: Any) -> bool:
    try:
        test()
    except (AssertionError, MemoryFault):
        return False
    return True


def check(case: Case, seed: int) -> None:
    problem = build(case, CPU, seed)
    expected, expected_lse = problem.expect()
    output, lse = problem.run("rocm")
    assert_output(output, expected, precision_of(case.dtypes))
    assert_lse(lse, expected_lse, precision_of(case.dtypes))


@pytest.mark.parametrize("executor", PREFILL.values(), ids=PREFILL, indirect=True)
def test_prefill_fault_is_caught(executor: Executor, seed: int) -> None:
    cases = (CASE, replace(CASE, scale=1.0), CASE)
    assert not all(survives(lambda case=case: check(case, seed)) for case in cases), "the fault was not seen"


@pytest.mark.parametrize(("case", "old", "new"), FP8.values(), ids=FP8)
def test_fp8_fault_is_caught(case: Case, old: str, new: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    mutated(monkeypatch, old, new, seed)
    assert not survives(lambda: check(case, seed)), "the fault was not seen"
    dispatch.forget()


@pytest.mark.parametrize(
    "executor",
    [("  barrier();\n  const int64_t waves", "  const int64_t waves")],
    ids=["barrier_dropped"],
    indirect=True,
)
def test_plan_fault_is_caught(executor: Executor) -> None:
    case = next(case for case in PLANS if case.name == "many")
    arguments = (implementation("plan"), CPU, case, "rocm")
    assert not all(survives(lambda: matrix.test_plan(*arguments)) for _ in range(4)), "the fault was not seen"
