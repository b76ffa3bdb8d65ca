"""What the kernels of several backends share: parts of parameter blocks, and which problems are compiled ahead.

The structures are those of ``paged`` and ``sequence`` in ``kernels/cuda/include`` and ``kernels/rocm/include``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from ctypes import Structure, c_float, c_int, c_longlong, c_uint, c_void_p, sizeof
from typing import TYPE_CHECKING

from mla.masks import CausalMask, NullMask
from mla.problem import Problem

if TYPE_CHECKING:
    import torch

    from mla.kv_cache import PagedKVCache
    from mla.masks import Mask
    from mla.problem import PrefillArgs

#: Names of element types in ``types.cuh`` and ``types.hpp`` by the short names of problems, and their bytes.
C_TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "float", "fp8": "e4m3", "fp8_fnuz": "e4m3fnuz"}
C_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "fp8_fnuz": 1}
#: Page sizes that kernels are compiled ahead for.
PAGE_SIZES = (1, 16, 32, 64, 128, 256)


#: Output and features of a prefill that is whole, whole with its LSE, and a part to be merged.
_RESULTS: tuple[tuple[str, tuple[str, ...]], ...] = (("bf16", ()), ("bf16", ("lse",)), ("fp32", ("lse",)))


def _paged(
    dtypes: str, mask: Mask, *features: str, dims: tuple[int, int] = (192, 128), granularity: int = 0
) -> Iterator[Problem]:
    for page_size in PAGE_SIZES:
        for out_dtype, lse in _RESULTS:
            yield Problem(
                "prefill", dtypes, out_dtype, dims, page_size, rope="paged", mask=mask.program, granularity=granularity,
                features=frozenset({"batch_invariant", *features, *lse}),
            )  # fmt: skip


def usual_prefills(dims: tuple[int, int] = (192, 128)) -> Iterator[Problem]:
    """Yield the prefill problems of a model in bf16 that are compiled ahead."""
    for mask in (CausalMask(), NullMask()):
        yield from _paged("bf16", mask, dims=dims)


def usual_prefills_beside_fp8() -> Iterator[Problem]:
    """Yield those of a model in bf16 whose cache, rope included, is fp8."""
    yield from _paged("bf16+fp8_rope", CausalMask(), "scales", granularity=128)


def usual_fp8_prefills() -> Iterator[Problem]:
    """Yield those of chunks that are attended to in fp8, V^T made from a weight or rows of V by a callable."""
    scales = "q_scale", "k_scales", "v_scale"
    for layout in (("v_transposed",), ()):
        yield from _paged("fp8+bf16_rope", CausalMask(), *scales, *layout, "split_q", "rope_prescaled")
        yield from _paged("fp8", CausalMask(), *scales, *layout, "scales", granularity=128)


class PageTable(Structure):
    """Page ids of the batch."""

    _fields_ = [("pages", c_void_p), ("indptr", c_void_p), ("row_stride", c_longlong)]


class PagedRows(Structure):
    """One part of the cache's rows, strides in bytes."""

    _fields_ = [("data", c_void_p), ("page_stride", c_longlong), ("token_stride", c_longlong)]


class SequenceArgs(Structure):
    """What the geometry of a sequence is computed from."""

    _fields_ = [
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("cache_offsets", c_void_p),
        ("lengths", c_void_p),
        ("start_positions", c_void_p),
        ("kv_lengths", c_void_p),
        ("lengths_include_new", c_int),
        ("rope_rows", c_int),
    ]


class GatherParams(Structure):
    """Parameter block of the gather."""

    _fields_ = [
        ("latent", PagedRows),
        ("scales", PagedRows),
        ("table", PageTable),
        ("row_offsets", c_void_p),
        ("cache_offsets", c_void_p),
        ("length", c_void_p),
        ("output", c_void_p),
        ("output_stride", c_longlong),
        ("batch_size", c_int),
        ("rows", c_int),
    ]


class StoreParams(Structure):
    """Parameter block of the store."""

    _fields_ = [
        ("latent", PagedRows),
        ("rope", PagedRows),
        ("scales", PagedRows),
        ("table", PageTable),
        ("row_offsets", c_void_p),
        ("lengths", c_void_p),
        ("latent_source", c_void_p),
        ("rope_source", c_void_p),
        ("latent_stride", c_longlong),
        ("rope_stride", c_longlong),
        ("lengths_include_new", c_int),
        ("batch_size", c_int),
        ("rows", c_int),
    ]


class HeadRows(Structure):
    """[T, H, ...] or [T, H], strides in bytes; those of scales that are shared are 0."""

    _fields_ = [("data", c_void_p), ("token_stride", c_longlong), ("head_stride", c_longlong)]


def head_rows(tensor: torch.Tensor) -> HeadRows:
    """Describe [T, H, ...] or [T, H]."""
    size = tensor.element_size()
    return HeadRows(tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(1) * size)


class MergeParams(Structure):
    """Parameter block of the merge."""

    _fields_ = [
        ("output", HeadRows),
        ("prefix", HeadRows),
        ("suffix", HeadRows),
        ("prefix_lse", HeadRows),
        ("suffix_lse", HeadRows),
        ("output_lse", HeadRows),
        ("tokens", c_int),
        ("heads", c_int),
    ]


class QuantizeParams(Structure):
    """Parameter block of the quantize."""

    _fields_ = [
        ("x", HeadRows),
        ("output", HeadRows),
        ("scale", HeadRows),
        ("tokens", c_int),
        ("heads", c_int),
        ("width", c_int),
    ]


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's first element, or None for a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def packer(params: type[Structure]) -> Callable[..., bytes]:
    """Return what makes the bytes of a parameter block from its scalars, nested ones in place, a null pointer as 0.

    Packing takes a fraction of the time of filling a ctypes structure, and the bytes are the same.
    """
    return struct.Struct(_format(params)).pack


def _format(params: type[Structure]) -> str:
    """Spell a structure's scalars and padding as `struct` does, without alignment of its own."""
    letters = {c_void_p: "P", c_longlong: "q", c_int: "i", c_uint: "I", c_float: "f"}
    text, end = "", 0
    for name, kind, *_ in params._fields_:
        start = getattr(params, name).offset
        text += f"{start - end}x" + (_format(kind) if issubclass(kind, Structure) else letters[kind])
        end = start + sizeof(kind)
    return f"{text}{sizeof(params) - end}x"


def table_fields(cache: PagedKVCache) -> tuple[int, int, int]:
    """Return the scalars of a `PageTable`, for either form."""
    table, indptr = cache.page_table, cache.page_indptr
    return (table.data_ptr(), 0, table.stride(0)) if indptr is None else (table.data_ptr(), indptr.data_ptr(), 0)


def row_fields(rows: torch.Tensor | None, element_size: int) -> tuple[int, int, int]:
    """Return address and both outer strides in bytes of [num_pages, P, width] or [T, H, width] rows; zeros for None."""
    if rows is None:
        return (0, 0, 0)
    outer, inner, *_ = rows.stride()
    return (rows.data_ptr(), outer * element_size, inner * element_size)


def page_table(cache: PagedKVCache) -> PageTable:
    """Describe the page table of a cache, in either form."""
    return PageTable(*table_fields(cache))


def paged_rows(rows: torch.Tensor) -> PagedRows:
    """Describe [num_pages, P, width] rows."""
    return PagedRows(*row_fields(rows, rows.element_size()))


def sequence_fields(args: PrefillArgs) -> tuple[int, ...]:
    """Return the scalars of a `SequenceArgs`."""
    cache = args.cache
    return (
        args.cu_seqlens_q.data_ptr(),
        args.cu_seqlens_k.data_ptr(),
        pointer(args.cache_offsets) or 0,
        0 if cache is None else cache.lengths.data_ptr(),
        pointer(args.start_positions) or 0,
        pointer(args.kv_lengths) or 0,
        cache is not None and cache.lengths_include_new,
        args.rope.shape[1] if args.rope_kind == "batched" and args.rope is not None else 0,
    )


def sequence_args(args: PrefillArgs) -> SequenceArgs:
    """Describe the geometry of a prefill call."""
    return SequenceArgs(*sequence_fields(args))
