"""Parts of parameter blocks that several kernels share, as the headers of ``kernels/rocm/include`` declare them."""

from __future__ import annotations

from ctypes import Structure, c_int, c_longlong, c_void_p
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mla.kv_cache import PagedKVCache
    from mla.problem import PrefillArgs

#: Names of element types in ``types.hpp`` by the short names of problems.
C_TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "float", "fp8": "e4m3", "fp8_fnuz": "e4m3fnuz"}
#: Page sizes that kernels are compiled ahead for.
PAGE_SIZES = (1, 16, 32, 64, 128, 256)


def fp8_name(arch: str) -> str:
    """Name the 8-bit format of an architecture's matrix unit and of caches made for it."""
    return "fp8_fnuz" if arch.startswith("gfx94") else "fp8"


class PageTable(Structure):
    """``paged.hpp``: page ids of the batch."""

    _fields_ = [("pages", c_void_p), ("indptr", c_void_p), ("row_stride", c_longlong)]


class PagedRows(Structure):
    """``paged.hpp``: one part of the cache's rows, strides in bytes."""

    _fields_ = [("data", c_void_p), ("page_stride", c_longlong), ("token_stride", c_longlong)]


class SequenceArgs(Structure):
    """``sequence.hpp``: what the geometry of a sequence is computed from."""

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


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's first element, or None for a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def page_table(cache: PagedKVCache) -> PageTable:
    """Describe the page table of a cache, in either form."""
    table = cache.page_table
    if cache.page_indptr is not None:
        return PageTable(table.data_ptr(), cache.page_indptr.data_ptr(), 0)
    return PageTable(table.data_ptr(), None, table.stride(0))


def paged_rows(rows: torch.Tensor) -> PagedRows:
    """Describe [num_pages, P, width] rows."""
    size = rows.element_size()
    return PagedRows(rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size)


def sequence_args(args: PrefillArgs) -> SequenceArgs:
    """Describe the geometry of a prefill call."""
    cache = args.cache
    return SequenceArgs(
        args.cu_seqlens_q.data_ptr(),
        args.cu_seqlens_k.data_ptr(),
        pointer(args.cache_offsets),
        None if cache is None else cache.lengths.data_ptr(),
        pointer(args.start_positions),
        pointer(args.kv_lengths),
        cache is not None and cache.lengths_include_new,
        args.rope.shape[1] if args.rope_kind == "batched" and args.rope is not None else 0,
    )
