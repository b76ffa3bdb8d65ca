"""Multi-head latent attention prefill over paged caches, for NVIDIA, AMD and the CPU."""

from __future__ import annotations

from mla.chunked import chunked_prefill
from mla.dispatch import explain
from mla.errors import (
    ArgumentError,
    BufferOverflowError,
    CompileError,
    DeviceError,
    DTypeError,
    MlaError,
    RegistryError,
    ShapeError,
    TargetError,
    UnsupportedError,
)
from mla.explanation import Explanation
from mla.merge import merge_attn_states
from mla.prefill import flare_mla_prefill, prefill
from mla.registry import register
from mla.target import Target
from mla.workspace import workspace_size

__all__ = [
    "ArgumentError",
    "BufferOverflowError",
    "CompileError",
    "DTypeError",
    "DeviceError",
    "Explanation",
    "MlaError",
    "RegistryError",
    "ShapeError",
    "Target",
    "TargetError",
    "UnsupportedError",
    "chunked_prefill",
    "explain",
    "flare_mla_prefill",
    "merge_attn_states",
    "prefill",
    "register",
    "workspace_size",
]
