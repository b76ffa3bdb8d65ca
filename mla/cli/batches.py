"""A batch as a serving engine has it: scattered pages, NaN in what belongs to no token, rows stored by the library."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from mla.kv_cache import PagedKVCacheCollection
from mla.kv_layouts import ROW_DIM
from mla.problem import KV_LORA_RANK
from mla.store import store
from mla.target import Target


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's cache and the rows in it."""

    collection: PagedKVCacheCollection
    input_row_offsets: torch.Tensor  # int32 [B+1], on the device
    rows: tuple[torch.Tensor, ...]  # of each sequence [cached + new, 576], before any quantisation
    pages: tuple[tuple[int, ...], ...]  # of each sequence, in order


def make_batch(
    cached: tuple[int, ...],
    new: tuple[int, ...],
    page_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device,
    target: Target | str,
    seed: int,
) -> Batch:
    """Fill a cache with N(0, 1) rows in two steps, the cached tokens and then the new ones, on pages in random order.

    A tenth of the pages stay free. An fp8 `dtype` has scales of 128 elements and bf16 rows.
    """
    random = torch.Generator(device).manual_seed(seed)
    quantised = dtype.itemsize == 1
    counts = [-(-(c + n) // page_size) for c, n in zip(cached, new, strict=True)]
    num_pages = sum(counts) + sum(counts) // 10 + 1
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    borders = list(accumulate(counts, initial=0))
    pages = tuple(tuple(order[first : first + count]) for first, count in zip(borders, counts, strict=False))
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.int32)

    blocks = torch.full((num_pages, 1, 1, page_size, 1, ROW_DIM), torch.nan, device=device).to(dtype)
    scales = torch.full((*blocks.shape[:-1], 5), torch.nan, device=device) if quantised else None
    rows = tuple(
        torch.randn(c + n, ROW_DIM, generator=random, device=device).to(torch.bfloat16 if quantised else dtype)
        for c, n in zip(cached, new, strict=True)
    )
    empty = PagedKVCacheCollection(
        blocks,
        torch.zeros(len(new), dtype=torch.int32, device=device),
        table.to(device),
        scales=scales,
        quantization_granularity=128 if quantised else None,
    )
    filled = empty.with_batch(
        torch.tensor(cached, dtype=torch.int32, device=device), table.to(device), max(new), max(map(len, rows))
    )
    _store(empty, [row[:c] for row, c in zip(rows, cached, strict=True)], target)
    offsets = _store(filled, [row[c:] for row, c in zip(rows, cached, strict=True)], target)
    return Batch(filled, offsets, rows, pages)


def _store(collection: PagedKVCacheCollection, parts: list[torch.Tensor], target: Target | str) -> torch.Tensor:
    """Store rows behind those that the collection counts as cached; return the row offsets."""
    offsets = list(accumulate(map(len, parts), initial=0))
    input_row_offsets = torch.tensor(offsets, dtype=torch.int32, device=collection.device)
    together = torch.cat(parts)
    store(collection, 0, input_row_offsets, together[:, :KV_LORA_RANK], together[:, KV_LORA_RANK:], target=target)
    return input_row_offsets
