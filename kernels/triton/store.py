"""Write this step's latent and rope rows into the pages, quantised where the cache is.

Token t of sequence s goes to cache position cached[s] + t - input_row_offsets[s]. A quantised row has one scale
for each GRANULARITY elements, the largest magnitude over the largest fp8 number; with 576 one scale covers latent and
rope.
A program writes BLOCK_R rows. Budget: each element read once and written once; bound by memory.
"""

import triton
import triton.language as tl

from .formats import divide, fp8_scale, quantized
from .gather import page_of, search


@triton.jit
def store(
    latent,
    rope,
    scales,
    source_latent,
    source_rope,
    page_table,
    page_indptr,
    lengths,
    input_row_offsets,
    batch_size,
    steps,
    lengths_include_new,
    stride_source_latent,
    stride_source_rope,
    stride_latent_page,
    stride_latent_token,
    stride_rope_page,
    stride_rope_token,
    stride_table,
    stride_scales_page,
    stride_scales_token,
    PAGE_SIZE: tl.constexpr,
    KV_LORA_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    GRANULARITY: tl.constexpr,
    ROPE_QUANTIZED: tl.constexpr,
    FNUZ: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    first = tl.load(input_row_offsets)
    end = tl.load(input_row_offsets + batch_size)
    row = first + tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < end
    sequence = search(row, input_row_offsets, batch_size, steps, live)
    begin = tl.load(input_row_offsets + sequence, mask=live, other=0)
    position = row - begin + tl.load(lengths + sequence, mask=live, other=0)
    counted = live & (lengths_include_new != 0)
    position -= tl.where(counted, tl.load(input_row_offsets + sequence + 1, mask=counted, other=0) - begin, 0)
    page = page_of(position, sequence, live, page_table, page_indptr, stride_table, PAGE_SIZE)
    slot = (position % PAGE_SIZE).to(tl.int64)

    offs_d = tl.arange(0, KV_LORA_RANK)
    offs_r = tl.arange(0, ROPE_DIM)
    wide = row.to(tl.int64)[:, None]
    x = tl.load(source_latent + wide * stride_source_latent + offs_d[None, :], mask=live[:, None], other=0.0)
    r = tl.load(source_rope + wide * stride_source_rope + offs_r[None, :], mask=live[:, None], other=0.0)
    at_latent = latent + (page * stride_latent_page + slot * stride_latent_token)[:, None] + offs_d[None, :]
    at_rope = rope + (page * stride_rope_page + slot * stride_rope_token)[:, None] + offs_r[None, :]
    if GRANULARITY == 0:
        tl.store(at_latent, x.to(latent.dtype.element_ty), mask=live[:, None])
        tl.store(at_rope, r.to(rope.dtype.element_ty), mask=live[:, None])
    else:
        at_scale = scales + (page * stride_scales_page + slot * stride_scales_token)[:, None]
        x = x.to(tl.float32)
        if GRANULARITY > KV_LORA_RANK:
            largest = tl.max(tl.abs(x), 1)
            if ROPE_QUANTIZED:
                largest = tl.maximum(largest, tl.max(tl.abs(r.to(tl.float32)), 1))
            scale = fp8_scale(largest, FNUZ)[:, None]
            tl.store(at_scale, scale, mask=live[:, None])
            tl.store(
                at_latent, quantized(divide(x, scale, INTERPRETED), latent.dtype.element_ty, FNUZ), mask=live[:, None]
            )
            rope_scale = scale
        else:
            BLOCKS: tl.constexpr = KV_LORA_RANK // GRANULARITY
            blocks = tl.reshape(x, [BLOCK_R, BLOCKS, GRANULARITY])
            scale = fp8_scale(tl.max(tl.abs(blocks), 2), FNUZ)
            tl.store(at_scale + tl.arange(0, BLOCKS)[None, :], scale, mask=live[:, None])
            quotients = tl.reshape(divide(blocks, scale[:, :, None], INTERPRETED), [BLOCK_R, KV_LORA_RANK])
            codes = quantized(quotients, latent.dtype.element_ty, FNUZ)
            tl.store(at_latent, codes, mask=live[:, None])
            rope_scale = fp8_scale(tl.max(tl.abs(r.to(tl.float32)), 1), FNUZ)[:, None]
            if ROPE_QUANTIZED:
                tl.store(at_scale + BLOCKS, rope_scale, mask=live[:, None])
        if ROPE_QUANTIZED:
            quotients = divide(r.to(tl.float32), rope_scale, INTERPRETED)
            tl.store(at_rope, quantized(quotients, rope.dtype.element_ty, FNUZ), mask=live[:, None])
        else:
            tl.store(at_rope, r.to(rope.dtype.element_ty), mask=live[:, None])
