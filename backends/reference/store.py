"""This step's rows into the pages in torch."""

from __future__ import annotations

import torch

from mla.backends.reference.gather import locate
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
        stored, scales = quantize(values, cache.quantization_granularity, cache.latent.dtype)
        cache.scales[page, slot] = scales
        latent = stored[:, : latent.shape[1]]
        rope = stored[:, latent.shape[1] :] if rope_is_scaled else rope
    cache.latent[page, slot] = latent
    cache.rope[page, slot] = rope


def quantize(values: torch.Tensor, granularity: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [n, D] to fp8 with one scale for each `granularity` columns.

    The largest magnitude of a block becomes the largest fp8 number. A scale is at least the smallest normal f32, so
    that a block of zeros divides to zeros.

    Returns
    -------
    tuple of torch.Tensor
        The stored values [n, D] and their scales, f32 [n, ceil(D / granularity)].
    """
    limits, width = torch.finfo(dtype), values.shape[1]
    blocks = -(-width // granularity)
    padded = torch.nn.functional.pad(values.to(torch.float32), (0, blocks * granularity - width))
    padded = padded.view(-1, blocks, granularity)
    scales = (padded.abs().amax(dim=2) / limits.max).clamp_(min=torch.finfo(torch.float32).tiny)
    stored = (padded / scales[..., None]).clamp_(limits.min, limits.max).to(dtype)
    return stored.view(-1, blocks * granularity)[:, :width], scales
