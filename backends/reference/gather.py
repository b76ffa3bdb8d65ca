"""Latent rows out of the pages in torch."""

from __future__ import annotations

import torch

from mla.errors import ArgumentError, ShapeError
from mla.kv_cache import PagedKVCache
from mla.problem import GatherArgs


@torch.inference_mode()
def gather(args: GatherArgs) -> None:
    """Copy the rows of one chunk by the plan's map, dequantised; rows past the last sequence become zero."""
    length = max(int(args.buffer_length), 0)
    cache, output = args.cache, args.output
    offsets = args.buffer_row_offsets.to(torch.int64)
    first, last = min(int(offsets[0]), length), min(int(offsets[-1]), length)
    row = torch.arange(first, last, device=output.device)
    sequence = torch.searchsorted(offsets[1:], row, right=True)
    position = row - offsets[sequence] + args.cache_offsets.to(torch.int64)[sequence]
    page, slot = locate(cache, sequence, position)
    rows = cache.latent[page, slot]
    if cache.scales is not None:
        scale = cache.scales[page, slot].repeat_interleave(cache.quantization_granularity, dim=1)
        rows = rows.to(torch.float32) * scale[:, : rows.shape[1]]
    output[first:last] = rows
    output[:first] = 0
    output[last:length] = 0


def locate(cache: PagedKVCache, sequence: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return page ids and slots, int64, of the tokens at `position` of each `sequence`; checked: it is free here."""
    index, slot = position // cache.page_size, position % cache.page_size
    if cache.page_indptr is None:
        columns: torch.Tensor | int = cache.page_table.shape[1]
    else:
        columns = cache.page_indptr.to(torch.int64).diff()[sequence]
    if bool((index >= columns).any()):
        raise ShapeError(
            f"page table too narrow: a token at position {int(position.max())} lies past its sequence's pages"
        )
    page = cache.page_ids(sequence, index)
    if page.numel() and (int(page.min()) < 0 or int(page.max()) >= cache.num_pages):
        raise ArgumentError(
            f"page ids must be in [0, {cache.num_pages}), got values from {int(page.min())} to {int(page.max())}"
        )
    return page, slot
