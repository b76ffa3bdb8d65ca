"""This step's rows into the pages in torch."""

from __future__ import annotations

import torch

from mla.backends.reference.gather import locate
from mla.backends.reference.quantize import quantize_rows
from mla.problem import StoreArgs


@torch.inference_mode()
def store(args: StoreArgs) -> None:
    """Scatter the rows to their pages, quantised where the cache has scales."""
    cache = args.cache
    offsets = args.input_row_offsets.to(torch.int64)
    row = torch.arange(int(offsets[0]), int(offsets[-1]), device=offsets.device)
    sequence = torch.searchsorted(offsets[1:], row, right=True)
    position = row - offsets[sequence] + cache.cached_lengths(offsets)[sequence]
    page, slot = locate(cache, sequence, position)
    latent, rope = args.latent[row], args.rope[row]
    if cache.scales is not None:
        rope_is_scaled = cache.rope.dtype == cache.latent.dtype
        values = torch.cat([latent, rope], dim=1) if rope_is_scaled else latent
        stored, scales = quantize_rows(values, cache.quantization_granularity, cache.latent.dtype)
        cache.scales[page, slot] = scales
        latent = stored[:, : latent.shape[1]]
        rope = stored[:, latent.shape[1] :] if rope_is_scaled else rope
    cache.latent[page, slot] = latent
    cache.rope[page, slot] = rope
