"""The plan said a second time, by laying out every row, and the worked examples of the specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mla.kv_cache import PagedKVCacheCollection


class Tables(NamedTuple):
    """A plan as lists."""

    buffer_row_offsets: list[list[int]]
    cache_offsets: list[list[int]]
    buffer_lengths: list[int]
    required_chunks: int


class Example(NamedTuple):
    """One row of the specification's table."""

    page_size: int
    buffer_token_size: int
    chunks: int
    cached: list[int]
    new: list[int]
    tables: Tables


def rows_by_hand(
    cached: Sequence[int], new: Sequence[int], page_size: int, buffer_token_size: int, chunks: int
) -> Tables:
    """Assign each padded row to its chunk, one by one, and count."""
    rows = []
    for s, (before, now) in enumerate(zip(cached, new, strict=True)):
        count = before + now
        while count % page_size:
            count += 1
        rows += [s] * count
    fills = [rows[first : first + buffer_token_size] for first in range(0, len(rows), buffer_token_size)]
    held = [0] * len(cached)
    row_offsets, offsets, lengths = [], [], []
    for c in range(chunks):
        fill = fills[c] if c < len(fills) else []
        row_offsets.append([sum(owner < s for owner in fill) for s in range(len(cached) + 1)])
        offsets.append(list(held))
        lengths.append(len(fill) if fill else -1)
        for owner in fill:
            held[owner] += 1
    return Tables(row_offsets, offsets, lengths, len(fills))


def lengths_only(cached: Sequence[int], page_size: int, columns: int, **options: object) -> PagedKVCacheCollection:
    """Return a cache whose pages lie on the meta device: a plan needs lengths only."""
    pages = torch.empty(1, page_size, 576, dtype=torch.bfloat16, device="meta")
    table = torch.zeros(len(cached), columns, dtype=torch.int32)
    return PagedKVCacheCollection.from_pages(pages, table, torch.tensor(list(cached), dtype=torch.int32), **options)


EXAMPLES = {
    "A": Example(
        128, 256, 16, [0, 0], [160, 200],
        Tables([[0, 256, 256], [0, 0, 256], *[[0, 0, 0]] * 14], [[0, 0], [256, 0], *[[256, 256]] * 14],
               [256, 256, *[-1] * 14], 2),
    ),
    "C": Example(128, 256, 3, [0], [12], Tables([[0, 128], [0, 0], [0, 0]], [[0], [128], [128]], [128, -1, -1], 1)),
    "D": Example(128, 512, 1, [500], [9], Tables([[0, 512]], [[0]], [512], 1)),
    "E": Example(
        128, 384, 4, [900], [100],
        Tables([[0, 384], [0, 384], [0, 256], [0, 0]], [[0], [384], [768], [1024]], [384, 384, 256, -1], 3),
    ),
    "F": Example(
        128, 256, 4, [0, 256], [256, 256],
        Tables([[0, 256, 256], [0, 0, 256], [0, 0, 256], [0, 0, 0]],
               [[0, 0], [256, 0], [256, 256], [256, 512]], [256, 256, 256, -1], 3),
    ),
    "G": Example(
        128, 256, 3, [0, 0, 0], [100, 0, 200],
        Tables([[0, 128, 128, 256], [0, 0, 0, 128], [0, 0, 0, 0]],
               [[0, 0, 0], [128, 0, 128], [128, 0, 256]], [256, 128, -1], 2),
    ),
    "H": Example(
        128, 512, 3, [300, 128], [0, 64],
        Tables([[0, 384, 512], [0, 0, 128], [0, 0, 0]], [[0, 0], [384, 128], [384, 256]], [512, 128, -1], 2),
    ),
    "K": Example(
        128, 200, 3, [0], [160], Tables([[0, 200], [0, 56], [0, 0]], [[0], [200], [256]], [200, 56, -1], 2)
    ),
    "L": Example(
        128, 512, 4, [0, 130, 0, 640], [5, 7, 128, 1],
        Tables([[0, 128, 384, 512, 512], [0, 0, 0, 0, 512], [0, 0, 0, 0, 256], [0] * 5],
               [[0, 0, 0, 0], [128, 256, 128, 0], [128, 256, 128, 512], [128, 256, 128, 768]],
               [512, 512, 256, -1], 3),
    ),
    "P1": Example(
        1, 32, 3, [0, 0], [10, 30],
        Tables([[0, 10, 32], [0, 0, 8], [0, 0, 0]], [[0, 0], [10, 22], [10, 30]], [32, 8, -1], 2),
    ),
}  # fmt: skip
