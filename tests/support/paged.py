"""Builders of paged caches as engines have them: scattered, poisoned, strided, layer-interleaved, quantised.

Whatever the layout, the logical rows are kept beside the cache, so that a test can say what a kernel has to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch

from mla.kv_cache import PagedKVCacheCollection

LAYOUTS = ("pages", "head_last", "head_first", "layers", "padded", "blocks", "split", "fused")
GARBAGE = (-1, 2**31 - 1, 2**30 + 7)


def on(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor on a device; `settle` waits for all of them, for each wait takes the turns of other processes."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def settle(device: torch.device | str) -> None:
    """Wait until what was put on a device is there, for every stream."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class PagedData:
    """A cache and what is in it."""

    cache: PagedKVCacheCollection
    layer_idx: int
    latent: list[torch.Tensor]  # per sequence [cached + new, 512], f32, after dequantisation
    rope: list[torch.Tensor]  # per sequence [cached + new, 64], f32, after dequantisation
    page_table: torch.Tensor  # int64 [B, cols] on the CPU, garbage behind each sequence
    pages: list[list[int]]  # live pages of each sequence
    input_row_offsets: torch.Tensor  # int32 [B+1] on the device
    cached: list[int]
    new: list[int]


def offsets_of(counts: Sequence[int], first: int = 0) -> list[int]:
    """Return the cumulative offsets of counts."""
    return list(accumulate(counts, initial=first))


def make_paged(
    cached: Sequence[int],
    new: Sequence[int],
    page_size: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "pages",
    order: str = "scattered",
    poison: float = float("nan"),
    granularity: int = 128,
    csr: bool = False,
    seq_lens: bool = False,
    index_dtype: torch.dtype = torch.int32,
    spare_pages: int = 3,
    spare_columns: int = 2,
    seed: int = 0,
    **options: Any,
) -> PagedData:
    """Build a cache that holds random rows for ``cached[b] + new[b]`` tokens of each sequence.

    Parameters
    ----------
    layout : str
        One of `LAYOUTS`. ``fused`` is the 656-byte row and ignores `dtype` and `granularity`.
    order : str
        ``identity``, ``reversed`` or ``scattered``: which page holds which part of the batch. The rows depend on `seed`
        alone.
    poison : float
        What every slot and scale holds that belongs to no token.
    csr : bool
        Give the page table in the indptr/indices form.
    seq_lens : bool
        Give cached + new lengths in place of cached ones.
    options
        Further arguments of the collection.
    """
    random = torch.Generator().manual_seed(seed)
    lengths = [c + n for c, n in zip(cached, new, strict=True)]
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + spare_pages
    ids = {
        "identity": torch.arange(num_pages),
        "reversed": torch.arange(num_pages).flip(0),
        "scattered": torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed + 1)),
    }[order].tolist()
    bounds = offsets_of(counts)
    pages = [ids[bounds[b] : bounds[b + 1]] for b in range(len(lengths))]
    columns = max(counts, default=0) + spare_columns
    table = torch.tensor(GARBAGE).repeat(len(lengths) * columns)[: len(lengths) * columns].view(len(lengths), columns)
    for b, row in enumerate(pages):
        table[b, : len(row)] = torch.tensor(row, dtype=torch.int64)

    kv_cache, kwargs, views = _storage(layout, num_pages, page_size, dtype, granularity, poison)
    latent, rope = [], []
    for row, length in zip(pages, lengths, strict=True):
        position = torch.arange(length)
        where = (torch.tensor(row, dtype=torch.int64)[position // page_size], position % page_size)
        block = views.write(where, torch.randn(length, 576, generator=random), random)
        latent.append(block[:, :512])
        rope.append(block[:, 512:])

    kv_cache = on(kv_cache, device)  # views are taken afterwards, so that the strides survive
    kwargs = {name: on(t, device) if isinstance(t, torch.Tensor) else t for name, t in kwargs.items()}
    given = on(torch.tensor(lengths if seq_lens else list(cached), dtype=torch.int64).to(index_dtype), device)
    kwargs.update({"seq_lens" if seq_lens else "cache_lengths": given, **options})
    if csr:
        flat = on(torch.tensor(list(chain.from_iterable(pages)), dtype=torch.int64).to(index_dtype), device)
        indptr = on(torch.tensor(bounds, dtype=torch.int64).to(index_dtype), device)
        collection = PagedKVCacheCollection.from_csr(_one_layer(kv_cache, layout), indptr, flat, **kwargs)
    else:
        # Rows of a wider table: engines slice theirs, so that a row's stride is more than its columns.
        wide = torch.full((len(lengths), columns + 5), GARBAGE[1], dtype=torch.int64)
        wide[:, :columns] = table
        rows = wide.to(torch.int32).view(index_dtype) if index_dtype == torch.uint32 else wide.to(index_dtype)
        rows = on(rows, device)[:, :columns]
        if layout == "blocks":
            collection = PagedKVCacheCollection(kv_cache, lookup_table=rows, **{"cache_lengths": None, **kwargs})
        else:
            collection = PagedKVCacheCollection.from_pages(_one_layer(kv_cache, layout), rows, **kwargs)
    offsets = on(torch.tensor(offsets_of(new), dtype=torch.int32), device)
    layer_idx = 1 if layout == "blocks" else 0
    settle(device)
    return PagedData(collection, layer_idx, latent, rope, table, pages, offsets, list(cached), list(new))


def slots_of(data: PagedData, sequence: int, first: int, last: int) -> list[tuple[int, int]]:
    """Return (page, slot) of the tokens [first, last) of a sequence."""
    page_size = data.cache.page_size
    return [(data.pages[sequence][t // page_size], t % page_size) for t in range(first, last)]


@dataclass
class _Views:
    latent: torch.Tensor  # [num_pages, P, 512]
    rope: torch.Tensor
    scales: torch.Tensor | None
    granularity: int

    def write(
        self, where: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor, random: torch.Generator
    ) -> torch.Tensor:
        """Write rows [n, 576] and return what they read back as, f32."""
        latent, rope = rows[:, :512].to(self.latent.dtype), rows[:, 512:].to(self.rope.dtype)
        self.latent[where], self.rope[where] = latent, rope
        read = torch.cat([latent.float(), rope.float()], dim=1)
        if self.scales is not None:
            scales = torch.rand(rows.shape[0], self.scales.shape[-1], generator=random) * 1.5 + 0.5
            self.scales[where] = scales
            scaled = 576 if self.rope.dtype == self.latent.dtype else 512
            read[:, :scaled] *= scales[:, torch.arange(scaled) // self.granularity]
        return read


def _storage(
    layout: str, num_pages: int, page_size: int, dtype: torch.dtype, granularity: int, poison: float
) -> tuple[torch.Tensor, dict[str, Any], _Views]:
    """Return the engine's tensor, further arguments of the collection, and flat views to write through."""
    kwargs: dict[str, Any] = {}
    if layout == "fused":
        raw = torch.zeros(num_pages, page_size, 656, dtype=torch.uint8)
        latent = raw[..., :512].view(torch.float8_e4m3fn)
        scales, rope = raw[..., 512:528].view(torch.float32), raw[..., 528:].view(torch.bfloat16)
        for part in (latent, scales, rope):
            part.copy_(torch.full((), poison))
        return raw, kwargs, _Views(latent, rope, scales, 128)
    width = 512 if layout == "split" else 640 if layout == "padded" else 576
    shape = {
        "pages": (num_pages, page_size, width),
        "split": (num_pages, page_size, width),
        "padded": (num_pages, page_size, width),
        "head_last": (num_pages, page_size, 1, width),
        "head_first": (num_pages, 1, page_size, width),
        "layers": (num_pages, 3, page_size, width),
        "blocks": (num_pages, 1, 3, page_size, 1, width),
    }[layout]
    storage = torch.full(shape, poison).to(dtype)
    rows = {
        "head_last": lambda: storage[:, :, 0],
        "head_first": lambda: storage[:, 0],
        "layers": lambda: storage[:, 1],
        "blocks": lambda: storage[:, 0, 1, :, 0],
    }.get(layout, lambda: storage)()
    if layout == "split":
        rope = torch.full((num_pages, page_size, 64), poison).to(dtype)
        kwargs["kpe_cache"] = rope
    else:
        rope = rows[..., 512:576]
    scales = None
    if dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        count = -(-576 // granularity)
        all_scales = torch.full((*shape[:-1], count) if layout == "blocks" else (num_pages, page_size, count), poison)
        scales = all_scales[:, 0, 1, :, 0] if layout == "blocks" else all_scales
        kwargs.update(scales=all_scales, quantization_granularity=granularity)
    return storage, kwargs, _Views(rows[..., :512], rope, scales, granularity)


def _one_layer(storage: torch.Tensor, layout: str) -> torch.Tensor:
    return storage[:, 1] if layout == "layers" else storage[..., :576] if layout == "padded" else storage
