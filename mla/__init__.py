"""Multi-head latent attention prefill over paged caches, for NVIDIA, AMD and the CPU."""

from __future__ import annotations

from mla import logging, torch_ops  # noqa: F401  (torch_ops registers torch.ops.mla)
from mla.chunked import chunked_prefill
from mla.dispatch import explain
from mla.errors import (
    ArgumentError,
    BufferOverflowError,
    CompileError,
    DeviceError,
    DTypeError,
    MissingPackageError,
    MlaError,
    RegistryError,
    ShapeError,
    TargetError,
    UnsupportedError,
)
from mla.explanation import Explanation
from mla.gather import generic_flare_mla_decompress_k_cache_ragged_paged
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection
from mla.masks import (
    CausalMask,
    CausalPaddingMask,
    ChunkedCausalMask,
    ChunkedMask,
    Mask,
    MaterializedMask,
    NullMask,
    SlidingWindowCausalMask,
    SlidingWindowNonCausalMask,
)
from mla.merge import merge_attn_states
from mla.plan import PlanChunk, PrefillPlan, generic_flare_mla_prefill_ragged_paged_plan, prefill_plan
from mla.prefill import flare_mla_prefill, prefill
from mla.quantize import (
    PrefillOperands,
    quantize_for_prefill,
    quantize_per_block,
    quantize_per_head,
    quantize_per_tensor,
    quantize_per_token,
    quantize_with_scale,
)
from mla.registry import register
from mla.target import Target
from mla.warmup import warmup
from mla.workspace import workspace_size

__all__ = [
    "ArgumentError",
    "BufferOverflowError",
    "CausalMask",
    "CausalPaddingMask",
    "ChunkedCausalMask",
    "ChunkedMask",
    "CompileError",
    "DTypeError",
    "DeviceError",
    "Explanation",
    "Mask",
    "MaterializedMask",
    "MissingPackageError",
    "MlaError",
    "NullMask",
    "PagedKVCache",
    "PagedKVCacheCollection",
    "PlanChunk",
    "PrefillOperands",
    "PrefillPlan",
    "RegistryError",
    "ShapeError",
    "SlidingWindowCausalMask",
    "SlidingWindowNonCausalMask",
    "Target",
    "TargetError",
    "UnsupportedError",
    "chunked_prefill",
    "explain",
    "flare_mla_prefill",
    "generic_flare_mla_decompress_k_cache_ragged_paged",
    "generic_flare_mla_prefill_ragged_paged_plan",
    "merge_attn_states",
    "prefill",
    "prefill_plan",
    "quantize_for_prefill",
    "quantize_per_block",
    "quantize_per_head",
    "quantize_per_tensor",
    "quantize_per_token",
    "quantize_with_scale",
    "register",
    "warmup",
    "workspace_size",
]

logging.set_level_from_environment()
