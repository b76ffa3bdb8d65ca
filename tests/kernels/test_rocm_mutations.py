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
from tests.support.amdgcn import MemoryFault
from tests.support.hip import needs_clang
from tests.support.matrix_cases import PLANS
from tests.support.problems import Case, build
from tests.support.rocm import Executor, executed, through_public_functions
from tests.support.tolerance import assert_lse, assert_output

pytestmark = needs_clang
CPU = torch.device("cpu")
#: Several key tiles a wave, several pages a sequence, rows beyond the last wave; with scale 1 maxima that move.
CASE = Case(lengths=((90, 70), (40, 3)), heads=1, page_size=16)

PREFILL = {
    "barrier_dropped": ("    barrier();  // the stage", "    // barrier();  // the stage"),
    "value_column_swapped": ("value_place(block.column + 1,", "value_place((block.column + 3) % kVDim,"),
    "key_chunk_swapped": ("kRowChunks + item(i) % kRopeRowChunks))", "kRowChunks + (item(i) % kRopeRowChunks ^ 1)))"),
    "swizzle_of_reads_only": (
        "key[i] = key_place(row, 2 * i + half)",
        "key[i] = row * kKeyPitch + (2 * i + half) * kChunkBytes",
    ),
    "page_index_wrong": ("source.offset + key) / kPageSize]", "source.offset + key) / kPageSize ^ 1]"),
    "diagonal_shifted": ("mask_visible(mask, b, h, first + ahead,", "mask_visible(mask, b, h, first + ahead + 1,"),
    "rows_not_clamped": ("WHOLE ? row : smaller(row, last)", "row"),
    "rescale_dropped": ("o[d] *= alpha;", "o[d] *= 1.0f;"),
    "key_order_of_values": ("(chunk % 2 + 2 * half) * 4", "(2 * (chunk % 2) + half) * 4"),
}


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, seed: int) -> Iterator[Executor]:
    old, new = request.param
    executor = executed(monkeypatch, "gfx942", lambda text: text.replace(old, new), seed)
    through_public_functions(monkeypatch, executor)
    yield executor
    dispatch.forget()


def survives(test: Any) -> bool:
    try:
        test()
    except (AssertionError, MemoryFault):
        return False
    return True


@pytest.mark.parametrize("executor", PREFILL.values(), ids=PREFILL, indirect=True)
def test_prefill_fault_is_caught(executor: Executor, seed: int) -> None:
    def check(case: Case) -> None:
        problem = build(case, CPU, seed)
        expected, expected_lse = problem.expect()
        output, lse = problem.run("rocm")
        assert_output(output, expected, "bf16")
        assert_lse(lse, expected_lse, "bf16")

    cases = (CASE, replace(CASE, scale=1.0), CASE)
    assert not all(survives(lambda case=case: check(case)) for case in cases), "the fault was not seen"


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
