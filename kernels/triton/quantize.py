"""Rows to fp8 with a scale for each block of columns, with one for each token, or with given scales.

    scale = max(amax / largest, 2^-126)    stored = round(x / scale), saturating

With GRANULARITY a program takes BLOCK_R blocks of columns; else the token of its number, BLOCK_D elements at a time,
twice where its scale is to be found. Budget: each element read once from memory and written once; bound by memory.
"""

import triton
import triton.language as tl

from .formats import divide, fp8_scale, quantized


@triton.jit
def _token_part(x, token, first, heads, width, stride_t, stride_h, BLOCK_D: tl.constexpr):
    """Return BLOCK_D elements of a token from `first` on, their heads and columns, and which of them there are."""
    offs = first + tl.arange(0, BLOCK_D)
    head = offs // width
    column = offs % width
    inside = offs < heads * width
    at = token * stride_t + head.to(tl.int64) * stride_h + column
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32), head, column, inside


@triton.jit
def quantize(
    x,
    output,
    scale,
    tokens,
    heads,
    width,
    stride_x_t,
    stride_x_h,
    stride_output_t,
    stride_output_h,
    stride_scale_t,
    stride_scale_h,
    GRANULARITY: tl.constexpr,
    STATIC_SCALE: tl.constexpr,
    FNUZ: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    if GRANULARITY > 0:
        blocks = tl.cdiv(width, GRANULARITY)
        unit = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        row = unit // blocks
        block = unit % blocks
        token = row // heads
        head = row % heads
        live = token < tokens
        within = tl.arange(0, BLOCK_D)
        column = block[:, None] * GRANULARITY + within[None, :]
        inside = live[:, None] & (within < GRANULARITY)[None, :] & (column < width)
        at_x = x + (token * stride_x_t + head * stride_x_h)[:, None] + column
        values = tl.load(at_x, mask=inside, other=0.0).to(tl.float32)
        found = fp8_scale(tl.max(tl.abs(values), 1), FNUZ)
        tl.store(scale + token * stride_scale_t + head * stride_scale_h + block, found, mask=live)
        codes = quantized(divide(values, found[:, None], INTERPRETED), output.dtype.element_ty, FNUZ)
        tl.store(output + (token * stride_output_t + head * stride_output_h)[:, None] + column, codes, mask=inside)
    else:
        token = tl.program_id(0).to(tl.int64)
        end = heads * width
        if not STATIC_SCALE:
            largest = tl.zeros([BLOCK_D], tl.float32)
            for first in range(0, end, BLOCK_D):
                values, _, _, _ = _token_part(x, token, first, heads, width, stride_x_t, stride_x_h, BLOCK_D)
                largest = tl.maximum(largest, tl.abs(values))
            amax = tl.full([BLOCK_D], 0.0, tl.float32) + tl.max(largest, 0)
            divisor = fp8_scale(amax, FNUZ)
            tl.store(scale + token * stride_scale_t, tl.max(divisor, 0))
        for first in range(0, end, BLOCK_D):
            values, head, column, inside = _token_part(x, token, first, heads, width, stride_x_t, stride_x_h, BLOCK_D)
            if STATIC_SCALE:
                divisor = tl.load(scale + token * stride_scale_t + head * stride_scale_h, mask=inside, other=1.0)
            codes = quantized(divide(values, divisor, INTERPRETED or STATIC_SCALE), output.dtype.element_ty, FNUZ)
            tl.store(
                output + token * stride_output_t + head.to(tl.int64) * stride_output_h + column, codes, mask=inside
            )
