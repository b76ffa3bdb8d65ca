"""Merge two partial attention results by their log-sum-exps (natural log).

    m = max(a, b)    wa = exp(a - m)    wb = exp(b - m)    out = (wa x + wb y) / (wa + wb)    lse = m + log(wa + wb)

A side whose LSE is -inf or +inf is empty: its output is not read. Two empty sides give 0 and -inf. With in_place, where
the output is the prefix, a row whose suffix is empty stays as it is: of the keys of one chunk, many rows see none. A
program takes BLOCK_R (row, head) pairs. Outputs may alias inputs: an element is written by the thread that has read it,
an LSE behind a barrier. Budget: two reads and one write an element; bound by memory.
"""

import triton
import triton.language as tl

from .formats import narrow

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def merge(
    output,
    prefix,
    suffix,
    prefix_lse,
    suffix_lse,
    output_lse,
    pairs,
    num_heads,
    in_place,
    stride_output_t,
    stride_output_h,
    stride_prefix_t,
    stride_prefix_h,
    stride_suffix_t,
    stride_suffix_h,
    stride_prefix_lse_t,
    stride_prefix_lse_h,
    stride_suffix_lse_t,
    stride_suffix_lse_h,
    stride_output_lse_t,
    stride_output_lse_h,
    V_HEAD_DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = pair < pairs
    token = pair // num_heads
    head = pair % num_heads
    a = tl.load(prefix_lse + token * stride_prefix_lse_t + head * stride_prefix_lse_h, mask=inside, other=float("-inf"))
    b = tl.load(suffix_lse + token * stride_suffix_lse_t + head * stride_suffix_lse_h, mask=inside, other=float("-inf"))
    a = tl.where(a == float("inf"), float("-inf"), a)
    b = tl.where(b == float("inf"), float("-inf"), b)
    has_a = a != float("-inf")
    has_b = b != float("-inf")
    top = tl.maximum(a, b)
    top = tl.where(a == a, top, a)  # a NaN on either side stays NaN
    top = tl.where(b == b, top, b)
    base = tl.where(has_a | has_b, top, 0.0)
    weight_a = tl.exp2((a - base) * LOG2E)
    weight_b = tl.exp2((b - base) * LOG2E)
    total = weight_a + weight_b
    inverse = tl.where(has_a | has_b, 1.0 / total, 0.0)
    stays = has_a & (in_place != 0) & (b == float("-inf"))
    offs_d = tl.arange(0, V_HEAD_DIM)
    at_a = prefix + (token * stride_prefix_t + head * stride_prefix_h)[:, None] + offs_d[None, :]
    at_b = suffix + (token * stride_suffix_t + head * stride_suffix_h)[:, None] + offs_d[None, :]
    x = tl.load(at_a, mask=(inside & has_a & ~stays)[:, None], other=0.0).to(tl.float32)
    y = tl.load(at_b, mask=(inside & has_b)[:, None], other=0.0).to(tl.float32)
    out = x * (weight_a * inverse)[:, None] + y * (weight_b * inverse)[:, None]
    target = output + (token * stride_output_t + head * stride_output_h)[:, None] + offs_d[None, :]
    tl.store(target, narrow(out, output.dtype.element_ty, INTERPRETED), mask=(inside & ~stays)[:, None])
    if output_lse is not None:
        # An LSE is read by several threads and written by one, perhaps in the same place.
        tl.debug_barrier()
        lse = tl.where(has_a | has_b, base + tl.log2(total) * LN2, float("-inf"))
        tl.store(output_lse + token * stride_output_lse_t + head * stride_output_lse_h, lse, mask=inside)
