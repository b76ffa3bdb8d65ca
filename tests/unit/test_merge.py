"""merge_attn_states: what it takes, what it refuses, and its algebra."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla import DTypeError, MlaError, ShapeError, merge_attn_states, reference
from tests.support.tolerance import assert_lse, assert_output


def parts(dtype: torch.dtype = torch.float32, total: int = 9, heads: int = 3) -> list[torch.Tensor]:
    return [
        torch.randn(total, heads, 128).to(dtype), torch.randn(total, heads),
        torch.randn(total, heads, 128).to(dtype), torch.randn(total, heads),
    ]  # fmt: skip


def test_order_and_grouping_do_not_matter() -> None:
    (a, la, b, lb), (c, lc, _, _) = parts(), parts()

    def merged(x: torch.Tensor, lx: torch.Tensor, y: torch.Tensor, ly: torch.Tensor) -> list[torch.Tensor]:
        out, lse = torch.empty_like(x), torch.empty_like(lx)
        merge_attn_states(out, x, lx, y, ly, lse, target="cpu")
        return [out, lse]

    first = merged(*merged(a, la, b, lb), c, lc)
    for other in (merged(a, la, *merged(b, lb, c, lc)), merged(*merged(c, lc, a, la), b, lb)):
        torch.testing.assert_close(other, first)


@pytest.mark.parametrize("total", [0, 1, 1023, 1024, 1025, 2500])
def test_every_row_is_merged(total: int) -> None:
    a, la, b, lb = parts(total=total, heads=1)
    out = torch.full_like(a, math.nan)
    merge_attn_states(out, a, la, b, lb, target="cpu")
    assert_output(out, reference.merge(a, la, b, lb)[0], "fp32")


@given(st.lists(st.sampled_from([0.0, 40.0, -1e4, 1e4, -math.inf, math.inf]), min_size=2, max_size=2))
def test_extreme_lse(lses: list[float]) -> None:
    a, _, b, _ = parts(total=1, heads=1)
    la, lb = (torch.full((1, 1), value) for value in lses)
    for part, lse in ((a, la), (b, lb)):
        if lse.isinf().all():
            part.fill_(math.nan)
    out, lse = torch.empty_like(a), torch.empty_like(la)
    merge_attn_states(out, a, la, b, lb, lse, target="cpu")
    expected, expected_lse = reference.merge(a, la, b, lb)
    assert_output(out, expected, "fp32")
    assert_lse(lse, expected_lse, "fp32")


def test_a_nan_lse_is_not_hidden() -> None:
    a, la, b, lb = parts()
    la[3, 1] = math.nan
    out, lse = torch.empty_like(a), torch.empty_like(la)
    merge_attn_states(out, a, la, b, lb, lse, target="cpu")
    assert out[3, 1].isnan().all() and lse[3, 1].isnan()
    assert out.isnan().sum() == 128 and lse.isnan().sum() == 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({0: torch.empty(8, 3, 128)}, ShapeError, "prefix_output must have shape"),
        ({1: torch.empty(9, 3, 128, dtype=torch.float16)}, DTypeError, "prefix_output"),
        ({2: torch.empty(3, 9)}, ShapeError, "prefix_lse must have shape (9, 3)"),
        ({4: torch.empty(9, 3, dtype=torch.float64)}, DTypeError, "suffix_lse must be float32"),
        ({0: torch.empty(9, 3, 256)[..., ::2]}, ShapeError, "output must be contiguous in its last dimension"),
        ({0: "out"}, DTypeError, "output must be a torch.Tensor"),
        ({0: torch.empty(9, 3, 128, requires_grad=True)}, MlaError, "output requires a gradient"),
        ({i: torch.empty(9, 3, 96) for i in (0, 1, 3)}, ShapeError, "allowed: 128, 256"),
    ],
)
def test_refusals(change: dict[int, object], error: type[Exception], words: str) -> None:
    a, la, b, lb = parts()
    arguments: list[object] = [torch.empty_like(a), a, la, b, lb]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(error) as caught:
        merge_attn_states(*arguments, target="cpu")  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_unknown_layout() -> None:
    a, la, b, lb = parts()
    with pytest.raises(MlaError, match="lse_layout must be 'TH' or 'HT', got 'BHT'"):
        merge_attn_states(a, a, la, b, lb, lse_layout="BHT", target="cpu")
