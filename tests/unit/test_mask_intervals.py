"""Tile classes: sound for any expression, exact for the built-in masks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mla.masks import (
    TILE_HIDDEN,
    TILE_PARTIAL,
    TILE_VISIBLE,
    CausalMask,
    CausalPaddingMask,
    ChunkedCausalMask,
    ChunkedMask,
    Mask,
    MaterializedMask,
    NullMask,
    SlidingWindowCausalMask,
    SlidingWindowNonCausalMask,
    maximum,
    minimum,
    where,
)
from tests.support.mask_expressions import BATCH, HEADS, build, conditions, meaning

positions = st.tuples(st.integers(-40, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def truth(visible: torch.Tensor) -> int:
    return TILE_VISIBLE if visible.all() else TILE_PARTIAL if visible.any() else TILE_HIDDEN


@settings(max_examples=300, deadline=None)
@given(tree=conditions, b=st.integers(0, BATCH - 1), h=st.integers(0, HEADS - 1), q=positions, k=positions)
@example(tree=("<=", ("%", ("q",), ("k",)), ("q",)), b=0, h=0, q=(0, 0), k=(2, 2))  # a divisor that is one number here
@example(tree=("<=", ("//", ("q",), ("k",)), ("q",)), b=0, h=0, q=(3, 3), k=(0, 0))
def test_the_class_of_any_tile_of_any_mask_is_sound(tree: Any, b: int, h: int, q: Any, k: Any) -> None:
    mask = build(tree)
    rows, columns = range(q[0], q[1] + 1), range(k[0], k[1] + 1)
    points = torch.tensor([bool(meaning(tree, b, h, x, y)) for x, y in itertools.product(rows, columns)])
    answer = mask.tile_class(b, h, *q, *k)
    assert answer in (truth(points), TILE_PARTIAL)
    assert mask.tile_class(torch.tensor([b]), h, *q, *k).tolist() == [answer]
    if len(points) == 1:
        assert answer != TILE_PARTIAL, "a tile of one point is known exactly"


BUILT_IN = {
    "null": NullMask(),
    "causal": CausalMask(),
    "chunked": ChunkedMask(5),
    "chunked causal": ChunkedCausalMask(5),
    "window": SlidingWindowCausalMask(6),
    "window of one": SlidingWindowCausalMask(1),
    "window, non-causal": SlidingWindowNonCausalMask(6),
    "padding": CausalPaddingMask(torch.tensor([0, 4, 100])),
    "chunk start written with %": Mask.from_function(lambda b, h, q, k: (k <= q) & (k >= q - q % 5)),
}


@pytest.mark.parametrize("mask", BUILT_IN.values(), ids=BUILT_IN.keys())
def test_built_in_masks_are_classified_exactly(mask: Mask) -> None:
    lo, size = torch.arange(-13, 13), torch.tensor([0, 1, 3, 4, 7])
    q_lo, k_lo = lo.view(-1, 1, 1, 1), lo.view(-1, 1, 1)
    q_hi, k_hi = q_lo + size.view(-1, 1), k_lo + size
    for b in range(3 if mask.program.captures else 1):
        classes = mask.tile_class(b, 0, q_lo, q_hi, k_lo, k_hi)
        assert classes.dtype == torch.int8
        assert classes.shape == (26, 26, 5, 5)
        grid = mask.visible(b, 0, torch.arange(-13, 21)[:, None], torch.arange(-13, 21))
        for i, j, m, n in itertools.product(range(0, 26, 3), range(0, 26, 2), range(5), range(5)):
            tile = grid[i : i + int(size[m]) + 1, j : j + int(size[n]) + 1]
            assert classes[i, j, m, n] == truth(tile), (b, i - 13, j - 13, m, n)


def test_a_long_window_with_sinks_skips_the_tiles_between() -> None:
    mask = Mask.from_function(lambda b, h, q, k: (k <= q) & ((q - k < 4096) | (k < 64)))
    keys = torch.arange(0, 65536, 64)
    classes = mask.tile_class(0, 0, torch.tensor(65408), torch.tensor(65535), keys, keys + 63).tolist()
    visible = [i for i, answer in enumerate(classes) if answer != TILE_HIDDEN]
    assert visible == [0, *range((65408 - 4095) // 64, 1024)]
    assert classes[0] == TILE_VISIBLE
    assert classes[(65535 - 4095) // 64 + 1 : 65408 // 64] == [TILE_VISIBLE] * (1022 - 961)


def test_a_bias_is_never_skipped_over() -> None:
    mask = CausalMask() & MaterializedMask(torch.zeros(1, 8, 8))
    assert mask.tile_class(0, 0, 4, 7, 0, 3) == TILE_PARTIAL
    assert mask.tile_class(0, 0, 0, 3, 4, 7) == TILE_HIDDEN


VALUES = torch.arange(-160, 161, dtype=torch.int32)
OPERATIONS: dict[str, Any] = {
    "q + k": lambda q, k: q + k,
    "q - k": lambda q, k: q - k,
    "-3 * q": lambda q, k: -3 * q,
    "q * k": lambda q, k: q * k,
    "q // 5": lambda q, k: q // 5,
    "q // -5": lambda q, k: q // -5,
    "q // k": lambda q, k: q // k,
    "q % 5": lambda q, k: q % 5,
    "q % -5": lambda q, k: q % -5,
    "q % k": lambda q, k: q % k,
    "abs(q)": lambda q, k: abs(q),
    "minimum": lambda q, k: minimum(q, k),
    "maximum": lambda q, k: maximum(q, k),
    "where, the lower first": lambda q, k: where(q < k, q - 20, k),
    "where, the higher first": lambda q, k: where(q < k, k, q - 20),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_the_interval_of_an_operation_holds_every_value_it_takes(operation: Any) -> None:
    takes = Mask.from_function(lambda b, h, q, k: operation(q, k) == VALUES[b])
    lo, size = torch.randint(-12, 12, (200, 2)), torch.randint(0, 7, (200, 2))
    (q_lo, k_lo), (q_hi, k_hi) = lo.T, (lo + size).T
    classes = takes.tile_class(torch.arange(len(VALUES))[:, None], 0, q_lo, q_hi, k_lo, k_hi)
    for tile in range(200):
        q = torch.arange(int(q_lo[tile]), int(q_hi[tile]) + 1).view(-1, 1)
        k = torch.arange(int(k_lo[tile]), int(k_hi[tile]) + 1)
        taken = takes.visible(torch.arange(len(VALUES)).view(-1, 1, 1), 0, q, k).flatten(1)
        assert bool((classes[:, tile][taken.any(1)] > TILE_HIDDEN).all())
        assert bool((classes[:, tile][~taken.all(1)] < TILE_VISIBLE).all())
