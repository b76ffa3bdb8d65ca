"""Views of the cache layouts of other engines: latent, rope and scales of every layer, without a copy."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mla._check import (
    FP8_DTYPES,
    require_device,
    require_dtype,
    require_last_dim_contiguous,
    require_shape,
    require_tensor,
)
from mla.errors import ArgumentError, DTypeError, ShapeError
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM

ROW_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM
GRANULARITIES = (64, 128, 576)

# FlashMLA's row in bytes: 512 fp8 latent, one f32 scale for each 128 of them, 64 bf16 rope.
FUSED_ROW_BYTES = 656
_FUSED_GRANULARITY = 128
_FUSED_SCALES_END = KV_LORA_RANK + 4 * KV_LORA_RANK // _FUSED_GRANULARITY

_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CacheViews(NamedTuple):
    """The cache of all layers as strided views; the last dimension of each is contiguous."""

    latent: torch.Tensor  # [num_pages, num_layers, P, 512]
    rope: torch.Tensor  # [num_pages, num_layers, P, 64]
    scales: torch.Tensor | None  # f32 [num_pages, num_layers, P, n]
    quantization_granularity: int  # 0 where there are no scales


def as_blocks(kv_cache: torch.Tensor, name: str) -> torch.Tensor:
    """View a layer [num_pages, P, D], [num_pages, P, 1, D] or [num_pages, 1, P, D] as 6-D blocks."""
    require_tensor(kv_cache, name, (3, 4))
    if kv_cache.ndim == 4:
        if kv_cache.shape[2] == 1:
            kv_cache = kv_cache.squeeze(2)
        elif kv_cache.shape[1] == 1:
            kv_cache = kv_cache.squeeze(1)
        else:
            raise ShapeError(
                f"{name} must have shape [num_pages, P, D], [num_pages, P, 1, D] or [num_pages, 1, P, D], "
                f"got {tuple(kv_cache.shape)}"
            )
    return kv_cache.unsqueeze(1).unsqueeze(1).unsqueeze(4)


def split_blocks(
    blocks: torch.Tensor,
    kpe_blocks: torch.Tensor | None,
    scales: torch.Tensor | None,
    quantization_granularity: int | None,
) -> CacheViews:
    """Split blocks [num_pages, 1, num_layers, P, 1, D] into views, where D tells the layout.

    D = 576 holds latent and rope; D = 512 needs `kpe_blocks` beside it; D = 656 (uint8 or float8_e4m3fn) is
    FlashMLA's fused row, which carries its own scales.
    """
    rows = _drop_unit_dims(blocks, "blocks")
    width = rows.shape[-1]
    if width == FUSED_ROW_BYTES:
        return _split_fused(rows, kpe_blocks, scales, quantization_granularity)
    if rows.dtype not in (*_PLAIN_DTYPES, *FP8_DTYPES):
        hint = "; view an fp8 cache with .view(torch.float8_e4m3fn)" if rows.dtype in (torch.uint8, torch.int8) else ""
        allowed = ", ".join(str(d) for d in (*_PLAIN_DTYPES, *FP8_DTYPES))
        raise DTypeError(f"blocks must be {allowed}, got {rows.dtype}{hint}")
    if rows.dtype == torch.float8_e4m3fnuz and rows.device.type == "cuda" and torch.version.hip is None:
        raise DTypeError("float8_e4m3fnuz is AMD's format; an NVIDIA device takes float8_e4m3fn")
    if kpe_blocks is not None:
        if width != KV_LORA_RANK:
            raise ShapeError(
                f"beside kpe_cache the latent must be {KV_LORA_RANK} wide, got shape {tuple(blocks.shape)}"
            )
        latent, rope = rows, _drop_unit_dims(kpe_blocks, "kpe_cache")
        require_shape(
            rope, "kpe_cache", (*latent.shape[:-1], QK_ROPE_HEAD_DIM), f"the latent has {tuple(latent.shape)}"
        )
        require_device(rope, "kpe_cache", latent.device)
        require_dtype(
            rope, "kpe_cache", (latent.dtype, torch.bfloat16) if latent.dtype in FP8_DTYPES else (latent.dtype,)
        )
    elif width == ROW_DIM:
        latent, rope = rows[..., :KV_LORA_RANK], rows[..., KV_LORA_RANK:]
    else:
        raise ShapeError(
            f"a cache row must be {ROW_DIM} wide (or {KV_LORA_RANK} with kpe_cache, or {FUSED_ROW_BYTES} bytes), "
            f"got shape {tuple(blocks.shape)}; slice a padded row to [..., :{ROW_DIM}]"
        )
    if latent.dtype not in FP8_DTYPES:
        if scales is not None or quantization_granularity is not None:
            raise ArgumentError(f"scales and quantization_granularity need an fp8 cache, but blocks are {latent.dtype}")
        return CacheViews(latent, rope, None, 0)
    if scales is None:
        raise ArgumentError(
            f"a {latent.dtype} cache needs scales (f32); where values are stored unscaled pass torch.ones, "
            "for example of shape [num_pages, P, 1] with quantization_granularity=576"
        )
    scales = _drop_unit_dims(scales, "scales")
    require_dtype(scales, "scales", (torch.float32,))
    require_device(scales, "scales", latent.device)
    scaled = KV_LORA_RANK + (QK_ROPE_HEAD_DIM if rope.dtype in FP8_DTYPES else 0)
    granularity = _granularity(scales.shape[-1], scaled, quantization_granularity)
    why = f"the cache has {tuple(latent.shape[:-1])} rows of {scaled} scaled elements and granularity {granularity}"
    require_shape(scales, "scales", (*latent.shape[:-1], -(-scaled // granularity)), why)
    return CacheViews(latent, rope, scales, granularity)


def _split_fused(
    rows: torch.Tensor, kpe_blocks: torch.Tensor | None, scales: torch.Tensor | None, granularity: int | None
) -> CacheViews:
    require_dtype(rows, f"blocks of {FUSED_ROW_BYTES}-byte rows", (torch.uint8, torch.float8_e4m3fn))
    if kpe_blocks is not None or scales is not None or granularity not in (None, _FUSED_GRANULARITY):
        raise ArgumentError(
            f"a {FUSED_ROW_BYTES}-byte row carries its own rope and scales (granularity {_FUSED_GRANULARITY}); "
            "kpe_cache, scales and another quantization_granularity cannot be given with it"
        )
    strides_and_base = (*(s for n, s in zip(rows.shape, rows.stride(), strict=True) if n > 1), rows.storage_offset())
    if any(value % 4 for value in strides_and_base[:-2] + strides_and_base[-1:]):
        raise ShapeError(f"{FUSED_ROW_BYTES}-byte rows must start at multiples of 4 bytes, got strides {rows.stride()}")
    return CacheViews(
        rows[..., :KV_LORA_RANK].view(torch.float8_e4m3fn),
        rows[..., _FUSED_SCALES_END:].view(torch.bfloat16),
        rows[..., KV_LORA_RANK:_FUSED_SCALES_END].view(torch.float32),
        _FUSED_GRANULARITY,
    )


def _drop_unit_dims(blocks: torch.Tensor, name: str) -> torch.Tensor:
    require_tensor(blocks, name, 6)
    if blocks.shape[1] != 1 or blocks.shape[4] != 1:
        raise ShapeError(f"{name} must have shape [num_pages, 1, num_layers, P, 1, D], got {tuple(blocks.shape)}")
    if blocks.shape[3] < 1:
        raise ShapeError(f"{name} must hold at least one token a page, got shape {tuple(blocks.shape)}")
    require_last_dim_contiguous(blocks, name)
    return blocks.squeeze(4).squeeze(1)


def _granularity(num_scales: int, scaled: int, given: int | None) -> int:
    if given is not None:
        if given not in GRANULARITIES:
            raise ArgumentError(f"quantization_granularity must be one of {GRANULARITIES}, got {given}")
        return given
    for granularity in GRANULARITIES:
        if -(-scaled // granularity) == num_scales:
            return granularity
    counts = {g: -(-scaled // g) for g in GRANULARITIES}
    raise ShapeError(f"scales have {num_scales} columns; {scaled} elements at granularity: columns allow {counts}")
