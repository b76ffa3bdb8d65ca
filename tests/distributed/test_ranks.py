"""Two and four ranks on gloo against one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.shards import CASES, MESH_CASE, Case, build, one_device, run_ranks, share_of_heads
from tests.support.tolerance import assert_lse, assert_output


@pytest.fixture(scope="module", params=[2, 4], ids="{}ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(request.param, folder)


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(str, CASES))
def test_keys_on_several_ranks(ranks: list[Any], index: int) -> None:
    case: Case = CASES[index]
    outputs, lses = zip(*(rank[index]["context"] for rank in ranks), strict=True)
    expected, expected_lse = one_device(build(case))
    # Both are within one bound of the truth.
    assert outputs[0].dtype == expected.dtype
    assert_output(torch.cat(outputs, 1), expected, case.precision, factor=2)
    lse = torch.cat(lses, 1) if case.lse_layout == "TH" else torch.cat(lses, 0).T
    # In 16 bits one device rounds keys as the ranks do, so that scores are the same numbers.
    assert_lse(lse, expected_lse, case.precision, factor=case.lse_factor)


@pytest.mark.parametrize("ranks", [4], indirect=True, ids="{}ranks".format)
def test_heads_on_one_dimension_of_a_mesh_and_keys_on_the_other(ranks: list[Any]) -> None:
    outputs, lses = zip(*(rank[MESH_CASE]["mesh"] for rank in ranks), strict=True)
    expected, expected_lse = one_device(build(CASES[MESH_CASE]))
    assert_output(torch.cat(outputs, 1), expected, "fp32", factor=2)
    assert_lse(torch.cat(lses, 1), expected_lse, "fp32", factor=2)


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(str, CASES))
def test_heads_on_several_ranks(ranks: list[Any], index: int) -> None:
    case: Case = CASES[index]
    problem = build(case)
    expected, expected_lse = one_device(problem)
    for r, rank in enumerate(ranks):
        heads, weight, sinks = share_of_heads(problem, r, len(ranks))
        output, lse = rank[index]["heads"]
        assert_output(output, expected[:, heads], case.precision, factor=2)
        assert_lse(lse, expected_lse[:, heads], case.precision, factor=case.lse_factor)
        if case.mask in ("heads", "bias"):
            continue  # what these masks say of a head depends on its number
        own = one_device(problem, q=problem.q[:, heads], weight=weight, sinks=sinks)
        assert torch.equal(output, own[0]) and torch.equal(lse, own[1])
