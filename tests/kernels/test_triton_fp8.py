"""Triton prefill in fp8 for sm_90 on a GPU: references that have to move, scales that are no numbers, the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mla.backends.triton import configs
from mla.target import device_arch
from tests.support.problems import Case, PrefillProblem, build
from tests.support.tolerance import assert_lse, assert_output, same_bits

pytestmark = pytest.mark.triton

#: Sequences whose last tiles are masked and whose first ones are not; their keys are a multiple of 16.
LONG = ((0, 700), (1500, 130), (300, 74))


@pytest.fixture(params=["low", "tall"])
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return an sm_90 device; query tiles are of both heights there."""
    if not torch.cuda.is_available() or device_arch(torch.device("cuda", 0)) != "sm_90a":
        pytest.skip("needs an H100 or H200")
    monkeypatch.setattr(configs, "HOPPER_TALL_TOKENS", 0 if request.param == "tall" else 1 << 30)
    return torch.device("cuda", 0)


def with_growing_keys(problem: PrefillProblem, device: torch.device) -> PrefillProblem:
    """Make keys larger towards the end, so that sums grow beyond what e4m3 holds in tiles that are seen whole."""
    growing = torch.linspace(1, 8, len(problem.operands["k"]), device=device)[:, None, None]
    problem.operands["k"] = (problem.operands["k"].float().nan_to_num() * growing).to(torch.float8_e4m3fn)
    return problem


@pytest.mark.parametrize("dtypes", ["fp8", "fp8+bf16_rope"])
@pytest.mark.parametrize("one_scale", [False, True])
def test_references_follow_scores_that_grow(hopper: torch.device, dtypes: str, one_scale: bool, seed: int) -> None:
    case = Case(dtypes=dtypes, lengths=((2900, 150), (0, 710)), heads=3, spare_rows=(0, 0), v_transposed=True)
    problem = with_growing_keys(build(case, hopper, seed), hopper)
    if one_scale:
        problem.with_one_key_scale()
    problem.keywords["q_scale"] *= torch.where(torch.arange(860, device=hopper) % 3 == 0, -1.0, 1.0)[:, None]
    output, lse = problem.run("triton")
    expected, expected_lse = problem.expect()
    assert_output(output, expected, "fp8")
    assert_lse(lse, expected_lse, "fp8")


def test_a_row_does_not_depend_on_its_neighbours(hopper: torch.device, seed: int) -> None:
    """Rows whose scores grow begin a tile anew; the others of their warp come out the same, to the bit."""
    case = Case(dtypes="fp8+bf16_rope", lengths=((1900, 64),), heads=4, mask="none", spare_rows=(0, 0))
    problem = with_growing_keys(build(case, hopper, seed).with_one_key_scale(), hopper)
    output, _ = problem.run("triton")
    problem.operands["q"] = problem.operands["q"].clone()
    problem.operands["q"][1::2] = 0.0
    others, _ = problem.run("triton")
    assert same_bits(output[::2], others[::2])
    assert not same_bits(output[1::2], others[1::2])


@pytest.mark.parametrize("dtypes", ["fp8", "fp8+bf16_rope"])
def test_a_scale_that_is_no_number(hopper: torch.device, dtypes: str, seed: int) -> None:
    """No sum is small enough then, and a tile is begun anew only once."""
    problem = build(Case(dtypes=dtypes, lengths=((900, 65), (0, 300)), heads=3, spare_rows=(0, 0)), hopper, seed)
    problem.keywords["k_scales"] = torch.full((1, 1), torch.nan, device=hopper).expand(len(problem.operands["k"]), 1)
    output, lse = problem.run("triton")
    assert output.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("dtypes", ["fp8", "fp8+bf16_rope"])
def test_values_as_rows_give_the_bits_of_columns(hopper: torch.device, dtypes: str, seed: int) -> None:
    """Call after call, values from memory: they come late."""
    case = Case(dtypes=dtypes, heads=16, spare_rows=(0, 0), lengths=(*LONG, (0, 33), (700, 1), (0, 898)))
    rows, columns = (build(dataclasses.replace(case, v_transposed=t), hopper, seed) for t in (False, True))
    expected, expected_lse = columns.run("triton")
    flush = torch.empty(1 << 27, dtype=torch.uint8, device=hopper)
    for problem in (rows, columns) * 20:
        flush.zero_()
        output, lse = problem.run("triton")
        assert same_bits(output, expected) and torch.equal(lse, expected_lse)


def test_heights_of_tiles_give_the_same_bits(hopper: torch.device, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    problem = build(Case(dtypes="fp8", lengths=LONG, heads=3, spare_rows=(0, 0), v_transposed=True), hopper, seed)
    expected, expected_lse = problem.run("triton")
    for tokens in (0, 1 << 30):
        monkeypatch.setattr(configs, "HOPPER_TALL_TOKENS", tokens)
        output, lse = problem.run("triton")
        assert same_bits(output, expected) and torch.equal(lse, expected_lse)
