"""The parameter block of ``sm90/prefill.cu``: descriptors, addresses and strides of one call."""

from __future__ import annotations

import math
from ctypes import Structure, c_float, c_int, c_longlong, c_void_p
from typing import TYPE_CHECKING

import torch

from mla import mask_code
from mla.backends import params
from mla.backends.cuda.runtime import TensorMap, with_tail
from mla.backends.cuda.tensor_map import tensor_map
from mla.backends.params import PagedRows, PageTable, SequenceArgs
from mla.problem import QK_ROPE_HEAD_DIM

if TYPE_CHECKING:
    from mla.problem import PrefillArgs

#: Elements of a row of swizzled shared memory, and query rows of a block.
_BLOCK = 64

#: Fields of both prefill kernels of Hopper, from the results to the numbers that scores are multiplied by.
RESULT_FIELDS: tuple[tuple[str, type], ...] = (
    ("output", c_void_p),
    ("lse", c_void_p),
    ("sinks", c_void_p),
    ("table", c_void_p),
    ("counters", c_void_p),
    ("arrivals", c_void_p),
    ("slots", c_void_p),
    ("output_stride_t", c_longlong),
    ("output_stride_h", c_longlong),
    ("lse_stride_t", c_longlong),
    ("lse_stride_h", c_longlong),
    ("logit_scale", c_float),
    ("softcap_scale", c_float),
    ("softcap_logit", c_float),
)


class ScheduleParams(Structure):
    """Parameter block of ``sm90/prefill_schedule.cu``."""

    _fields_ = [
        ("sequences", SequenceArgs),
        ("table", c_void_p),
        ("batch", c_int),
        ("heads", c_int),
        ("grid", c_int),
        ("processors", c_int),
        ("arrivals", c_void_p),
    ]


class PrefillParams(Structure):
    """Parameter block of ``sm90/prefill.cu``."""

    _fields_ = with_tail(
        [
            ("q", TensorMap),
            ("k", TensorMap),
            ("v", TensorMap),
            ("rope", TensorMap),
            ("sequences", SequenceArgs),
            ("page_table", PageTable),
            ("rope_rows", PagedRows),
            ("mask", mask_code.MaskArgs),
            *RESULT_FIELDS,
            ("batch", c_int),
            ("heads", c_int),
            ("processors", c_int),
            ("rows_q", c_int),
            ("rows_k", c_int),
        ]
    )


def rope_box(page_size: int, block_n: int) -> int:
    """Return the rope rows of one TMA box, within a page and whole swizzle atoms of 8 rows; 0 where there is none."""
    box = math.gcd(page_size, block_n)
    return 0 if box % 8 else box


def make(args: PrefillArgs, block_n: int) -> PrefillParams:
    """Fill in a parameter block, apart from counters and what lies in the workspace."""
    block = PrefillParams()
    block.q = _rows_map(args.q, _BLOCK)
    block.k, block.v, block.rope = _key_maps(args, block_n, block.q)
    block.sequences = params.sequence_args(args)
    if args.cache is not None:
        block.page_table = params.page_table(args.cache)
        block.rope_rows = params.paged_rows(args.cache.rope)
    block.rows_q, block.rows_k = args.q.shape[0], args.k.shape[0]
    block.mask = mask_code.c_args(args.mask, args.q.device)
    fill_result(block, args)
    if args.softcap:
        block.softcap_scale = 2.0 * args.softmax_scale * math.log2(math.e) / args.softcap
    return block


def fill_result(block: Structure, args: PrefillArgs) -> None:
    """Fill in `RESULT_FIELDS` apart from memory of the launch and softcap_scale, and the extents."""
    output, lse = args.output, args.lse
    block.output = output.data_ptr()
    block.output_stride_t, block.output_stride_h, _ = output.stride()
    if lse is not None:
        block.lse = lse.data_ptr()
        block.lse_stride_t, block.lse_stride_h = lse.stride()
    block.sinks = params.pointer(args.sinks)
    block.logit_scale = args.softmax_scale * math.log2(math.e)
    block.softcap_logit = args.softcap * math.log2(math.e)
    block.batch, block.heads = args.cu_seqlens_q.shape[0] - 1, args.q.shape[1]


def _rows_map(rows: torch.Tensor, box_rows: int) -> TensorMap:
    """Describe [T, H, width] rows of 16-bit elements, `box_rows` of one head and 64 columns a box."""
    count, heads, width = rows.shape
    stride_t, stride_h, _ = rows.stride()
    return tensor_map(
        rows.data_ptr(), rows.dtype, (width, heads, count), (2 * stride_h, 2 * stride_t), (_BLOCK, 1, box_rows)
    )


def _key_maps(args: PrefillArgs, block_n: int, unused: TensorMap) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Describe k, v and rope; of an empty tensor nothing is loaded, and any descriptor will do."""
    if args.k.shape[0] == 0:
        return unused, unused, unused
    return _rows_map(args.k, block_n), _rows_map(args.v, block_n), _rope_map(args, block_n) or unused


def _rope_map(args: PrefillArgs, block_n: int) -> TensorMap | None:
    """Describe rope as [pages or sequences, rows, dr], where boxes of its rows are loaded at all."""
    if args.cache is not None:
        rope = args.cache.rope
        box = rope_box(rope.shape[1], block_n)
    else:
        assert args.rope is not None
        rope = args.rope if args.rope_kind == "batched" else args.rope[None]
        box = block_n
    if box == 0 or rope.numel() == 0:
        return None
    outer, rows, _ = rope.shape
    stride_outer, stride_row, _ = rope.stride()
    shape, strides = (QK_ROPE_HEAD_DIM, rows, outer), (2 * stride_row, 2 * stride_outer)
    return tensor_map(rope.data_ptr(), rope.dtype, shape, strides, (QK_ROPE_HEAD_DIM, box, 1))
