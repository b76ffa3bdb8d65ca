"""Triton prefill in fp8 on a GPU: values that lie as columns (V^T) and begin at any row, all scales, tall tiles.

The copy engine takes columns that begin at a multiple of 16 bytes only; what a sequence's neighbours hold there is NaN.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from mla.backends.triton import configs
from tests.support.problems import Case, build
from tests.support.tolerance import assert_lse, assert_output, precision_of

pytestmark = pytest.mark.triton

#: Keys of the sequences, cached and new: their sum, the columns' stride, is a multiple of 16, their starts are odd.
LENGTHS = ((37, 70), (0, 129), (200, 12))
CASES = [
    Case(dtypes=dtypes, prescaled=prescaled, v_scale=v_scale, v_transposed=True, page_size=page_size, lengths=LENGTHS)
    for (dtypes, prescaled), v_scale, page_size in itertools.product(
        (("fp8", True), ("fp8+bf16_rope", True), ("fp8+bf16_rope", False)), ("", "number", "head", "row"), (1, 64)
    )
    if v_scale or dtypes != "fp8"
]
#: The same and values that lie as rows, for the tall query tiles of sm_90, which sequences of this length do not get.
TALL = [
    dataclasses.replace(case, v_transposed=v_transposed)
    for case, v_transposed in itertools.product(CASES, (True, False))
    if case.page_size == 64 and case.v_scale in ("head", "row")
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_as_columns(case: Case, seed: int) -> None:
    check(case, seed)


@pytest.mark.parametrize("case", TALL, ids=str)
def test_tall_query_tiles(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "HOPPER_TALL_TOKENS", 0)
    check(case, seed)


def check(case: Case, seed: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    problem = build(case, "cuda", seed)
    output, lse = problem.run("triton")
    expected, expected_lse = problem.expect()
    assert_output(output, expected, precision_of(case.dtypes))
    assert_lse(lse, expected_lse, precision_of(case.dtypes))
