"""The oracle's own properties: it is the specification in code, so that it is checked against mathematics alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from mla import masks, reference
from tests.support.paged import make_paged
from tests.support.problems import MASKS, Case, build

SCALE = 192**-0.5


def dense(new: int, keys: int, heads: int = 3) -> dict[str, torch.Tensor]:
    """Return one sequence with a ragged rope."""
    return {
        "q": torch.randn(new, heads, 192),
        "k": torch.randn(keys, heads, 128),
        "v": torch.randn(keys, heads, 128),
        "k_rope": torch.randn(keys, 1, 64),
        "valid_length": torch.tensor([0, new]),
        "cache_row_offsets": torch.tensor([0, keys]),
    }


def test_rows_of_probabilities_sum_to_one() -> None:
    problem = dense(7, 20)
    problem["v"] = torch.ones(20, 3, 128)
    out, _ = reference.prefill(**problem, mask=masks.CausalMask(), scale=SCALE)
    torch.testing.assert_close(out, torch.ones_like(out))


def test_agrees_with_softmax_written_out() -> None:
    problem = dense(7, 20)
    out, lse = reference.prefill(**problem, mask=masks.NullMask(), scale=SCALE)
    for h in range(3):
        keys = torch.cat((problem["k"][:, h], problem["k_rope"][:, 0]), -1).double()
        scores = problem["q"][:, h].double() @ keys.T * SCALE
        torch.testing.assert_close(lse[:, h], scores.exp().sum(-1).log())
        torch.testing.assert_close(out[:, h], scores.softmax(-1) @ problem["v"][:, h].double())


def test_a_shift_of_all_scores_moves_the_lse_alone() -> None:
    problem = dense(5, 16)
    bias = torch.zeros(1, 5, 16)
    out, lse = reference.prefill(**problem, mask=masks.MaterializedMask(bias), scale=SCALE)
    shifted, shifted_lse = reference.prefill(**problem, mask=masks.MaterializedMask(bias + 3.5), scale=SCALE)
    torch.testing.assert_close(shifted, out)
    torch.testing.assert_close(shifted_lse, lse + 3.5)


def test_the_order_of_keys_does_not_matter() -> None:
    problem = dense(5, 16)
    out, lse = reference.prefill(**problem, mask=masks.NullMask(), scale=SCALE)
    order = torch.randperm(16)
    problem.update({name: problem[name][order] for name in ("k", "v", "k_rope")})
    again, again_lse = reference.prefill(**problem, mask=masks.NullMask(), scale=SCALE)
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(again_lse, lse)


@pytest.mark.parametrize("mask", ["none", "causal", "sliding", "checkered"])
@pytest.mark.parametrize("cut", [0, 1, 64, 100, 256])
def test_merging_a_partition_gives_the_whole(mask: str, cut: int, seed: int) -> None:
    case = Case(dtypes="fp32", lengths=((100, 70), (0, 3)), mask=mask, spare_rows=(0, 0))
    whole = build(case, seed=seed)
    expected, expected_lse = whole.expect()
    starts = whole.operands["cache_row_offsets"].tolist()
    parts = []
    for lower, upper in ((0, cut), (cut, 10**6)):
        rows = [(a + min(lower, b - a), a + min(upper, b - a)) for a, b in pairwise(starts)]
        pick = torch.cat([torch.arange(a, b) for a, b in rows])
        counts = torch.tensor([0, *(b - a for a, b in rows)]).cumsum(0)
        operands = {**whole.operands, "k": whole.operands["k"][pick], "v": whole.operands["v"][pick]}
        operands["cache_row_offsets"] = counts
        offsets = torch.tensor([a - start for (a, _), start in zip(rows, starts, strict=False)])
        parts += reference.prefill(**operands, cache_offsets=offsets)
    out, lse = reference.merge(*parts)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("name", [name for name in MASKS if "bias" not in name])
def test_hidden_keys_have_no_weight(name: str, seed: int) -> None:
    """With values that are one-hot in the key, the output is the row of probabilities: zero where the mask hides."""
    problem = build(Case(dtypes="fp32", lengths=((30, 20),), mask=name, spare_rows=(0, 0)), seed=seed)
    mask = problem.operands["mask"]
    values = torch.zeros(64, 4, 128)
    values[:, :, :64] = torch.eye(64)[:, None]
    out, lse = reference.prefill(**{**problem.operands, "v": values}, **problem.keywords)
    for h in range(4):
        for i in range(20):
            seen = [bool(mask.visible(torch.tensor(0), torch.tensor(h), torch.tensor(30 + i), torch.tensor(k)))
                    for k in range(50)]  # fmt: skip
            assert (out[i, h, :50] > 0).tolist() == seen
            assert (out[i, h, 50:] == 0).all()
            assert (lse[i, h] == -math.inf) == (not any(seen))


def test_sinks_take_their_share() -> None:
    problem = dense(4, 9)
    sinks = torch.tensor([0.5, -1.0, 2.0])
    out, lse = reference.prefill(**problem, mask=masks.NullMask(), scale=SCALE)
    with_sinks, with_lse = reference.prefill(**problem, mask=masks.NullMask(), scale=SCALE, sinks=sinks)
    torch.testing.assert_close(with_lse, (lse.exp() + sinks.double().exp()).log())
    torch.testing.assert_close(with_sinks, out * (lse - with_lse).exp()[..., None])


def test_rope_is_read_by_position() -> None:
    data = make_paged((70,), (5,), 16, dtype=torch.float32)
    cache = data.cache.layer(0)
    latent, rope = reference.cache_rows(cache, 0, torch.tensor([0, 15, 16, 74]))
    torch.testing.assert_close(latent, data.latent[0][[0, 15, 16, 74]].double())
    torch.testing.assert_close(rope, data.rope[0][[0, 15, 16, 74]].double())


def test_softcap_bounds_the_scores() -> None:
    problem = dense(4, 9)
    _, lse = reference.prefill(**problem, mask=masks.NullMask(), scale=100.0, softcap=2.0)
    assert (lse.abs() <= 2.0 + math.log(9)).all()
