"""The parameter block of ``sm90/prefill_fp8.cu``: descriptors, addresses and strides of one call."""

from __future__ import annotations

import math
from ctypes import Structure, c_int, c_longlong, c_void_p
from typing import TYPE_CHECKING

import torch

from mla import mask_code
from mla.backends import params
from mla.backends.cuda.prefill_sm90_block import RESULT_FIELDS, fill_result
from mla.backends.cuda.runtime import TensorMap, with_tail
from mla.backends.cuda.tensor_map import tensor_map
from mla.backends.params import PagedRows, PageTable, SequenceArgs
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM

if TYPE_CHECKING:
    from mla.problem import PrefillArgs

#: Query rows of a block, and keys of a tile that are permuted among themselves.
_BLOCK = 64


class PrefillParams(Structure):
    """Parameter block of ``sm90/prefill_fp8.cu``."""

    _fields_ = with_tail(
        [
            ("q", TensorMap),
            ("q_rope", TensorMap),
            ("k", TensorMap),
            ("v", TensorMap),
            ("rope", TensorMap),
            ("sequences", SequenceArgs),
            ("page_table", PageTable),
            ("rope_rows", PagedRows),
            ("rope_scales", PagedRows),
            ("values", c_void_p),
            ("values_stride_h", c_longlong),
            ("values_stride_d", c_longlong),
            ("mask", mask_code.MaskArgs),
            ("q_scale", c_void_p),
            ("k_scales", c_void_p),
            ("v_scale", c_void_p),
            ("q_scale_stride", c_longlong),
            ("k_scales_stride", c_longlong),
            ("v_scale_stride", c_longlong),
            *RESULT_FIELDS,
            ("rows", c_int),
            ("rows_q", c_int),
            ("batch", c_int),
            ("heads", c_int),
            ("processors", c_int),
        ]
    )


def rope_box(page_size: int) -> int:
    """Return the keys that one TMA box of rope rows spans; 0 where half of them fill no whole atoms of 8."""
    box = math.gcd(page_size, _BLOCK)
    return 0 if box % 16 else box


def make(args: PrefillArgs, block_n: int) -> PrefillParams:
    """Fill in a parameter block, apart from counters and what lies in the workspace."""
    block = PrefillParams()
    block.q, block.q_rope = _query_maps(args)
    block.k = block.v = block.rope = block.q
    if args.k.shape[0]:
        block.k, block.v, block.rope = _key_map(args.k), _value_map(args.v, block_n), _rope_map(args) or block.q
    block.sequences = params.sequence_args(args)
    if args.cache is not None:
        block.page_table = params.page_table(args.cache)
        block.rope_rows = params.paged_rows(args.cache.rope)
    block.rope_scales = _rope_scales(args)
    block.values = args.v.data_ptr()
    block.rows, block.rows_q = args.k.shape[0], args.q.shape[0]
    block.values_stride_h, block.values_stride_d = args.v.stride(1), args.v.stride(2)
    block.mask = mask_code.c_args(args.mask, args.q.device)
    for name, scale in (("q_scale", args.q_scale), ("k_scales", args.k_scales), ("v_scale", args.v_scale)):
        if scale is not None:
            setattr(block, name, scale.data_ptr())
            setattr(block, f"{name}_stride", scale.stride(0) if scale.shape[0] > 1 else 0)
    fill_result(block, args)
    if args.softcap:
        block.softcap_scale = 2.0 / args.softcap
    return block


def _query_maps(args: PrefillArgs) -> tuple[TensorMap, TensorMap]:
    """Describe the nope and the rope part of q, 64 rows of one head a box; in fp8 both lie in one tensor."""
    q, rope = args.q, args.q_rope
    if rope is None:
        nope = q.shape[2] - QK_ROPE_HEAD_DIM
        q, rope = q[..., :nope], q[..., nope:]
    return _rows_map(q, _BLOCK), _rows_map(rope, _BLOCK)


def _rows_map(rows: torch.Tensor, span: int, step: int = 1) -> TensorMap:
    """Describe [T, H, width] rows; a box has the width and, over `span` rows of one head, every `step`-th."""
    count, heads, width = rows.shape
    size = rows.element_size()
    strides = (size * rows.stride(1), size * rows.stride(0))
    return tensor_map(
        rows.data_ptr(), rows.dtype, (width, heads, count), strides, (width, 1, span),
        steps=(1, 1, step), swizzle=size * width,
    )  # fmt: skip


def _key_map(k: torch.Tensor) -> TensorMap:
    """Describe k, every second row of 64."""
    return _rows_map(k, _BLOCK, 2)


def _value_map(v: torch.Tensor, block_n: int) -> TensorMap:
    """Describe v as k, or V^T as [H, dv, L], all columns of one head and a tile of keys a box."""
    if v.stride(2) == 1:
        return _rows_map(v, _BLOCK, 2)
    rows, heads, width = v.shape
    return tensor_map(v.data_ptr(), v.dtype, (rows, width, heads), (v.stride(2), v.stride(1)), (block_n, width, 1))


def _rope_map(args: PrefillArgs) -> TensorMap | None:
    """Describe rope as [pages or sequences, rows, dr], every second row of a box, where there are boxes at all."""
    if args.cache is not None:
        rope = args.cache.rope
        box = rope_box(rope.shape[1])
    else:
        assert args.rope is not None
        rope = args.rope if args.rope_kind == "batched" else args.rope[None]
        box = _BLOCK
    if box == 0 or rope.numel() == 0:
        return None
    outer, rows, width = rope.shape
    size = rope.element_size()
    strides = (size * rope.stride(1), size * rope.stride(0))
    return tensor_map(
        rope.data_ptr(), rope.dtype, (width, rows, outer), strides, (width, box, 1), steps=(1, 2, 1),
        swizzle=size * width,
    )  # fmt: skip


def _rope_scales(args: PrefillArgs) -> PagedRows:
    """Describe the scales of an fp8 rope: rows as the rope's, at the one scale of its 64 columns."""
    if args.cache is not None:
        cache = args.cache
        if cache.scales is None:
            return PagedRows()
        return params.paged_rows(cache.scales[..., KV_LORA_RANK // cache.quantization_granularity :])
    if args.rope_scales is None:
        return PagedRows()
    scales, base = args.rope_scales, args.rope_scale_base
    granularity = next(g for g in (64, 128, 576) if scales.shape[-1] == -(-(base + QK_ROPE_HEAD_DIM) // g))
    first = base // granularity
    return params.paged_rows(scales[..., first:] if args.rope_kind == "batched" else scales[None, ..., first:])
