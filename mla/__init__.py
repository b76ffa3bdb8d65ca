"""Multi-head latent attention prefill over paged caches, for NVIDIA, AMD and the CPU."""

from __future__ import annotations

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
from mla.registry import register
from mla.target import Target

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
    "explain",
    "register",
]
