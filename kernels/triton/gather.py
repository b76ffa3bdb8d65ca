"""Copy the latent rows of one chunk of a plan out of the pages, dequantised where the cache is.

Row r of the buffer belongs to the sequence s with buffer_row_offsets[s] <= r < buffer_row_offsets[s + 1] and has cache
position r - buffer_row_offsets[s] + cache_offsets[s]. Rows from buffer_row_offsets[B] to the length asked for are zero.
A program copies BLOCK_R rows: a binary search for each row, one page look-up, then whole rows of 16-byte accesses.
Budget: each latent element read once and written once; bound by memory.
"""

import triton
import triton.language as tl

from .formats import narrow, widen


@triton.jit
def search(row, offsets, count, steps, live):
    """Return for each row the s with offsets[s] <= row < offsets[s + 1]; 2**steps >= count."""
    low = row * 0
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        right = tl.load(offsets + middle, mask=live, other=0) <= row
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
def page_of(position, sequence, live, page_table, page_indptr, stride_table, PAGE_SIZE: tl.constexpr):
    """Return the 64-bit page id of a token of a sequence; entries of rows that are not live are not read."""
    if page_indptr is not None:
        first = tl.load(page_indptr + sequence, mask=live, other=0).to(tl.int64)
    else:
        first = sequence.to(tl.int64) * stride_table
    return tl.load(page_table + first + position // PAGE_SIZE, mask=live, other=0).to(tl.int64)


@triton.jit
def gather(
    output,
    latent,
    scales,
    page_table,
    page_indptr,
    buffer_row_offsets,
    cache_offsets,
    buffer_length,
    batch_size,
    steps,
    rows_max,
    length_on_device,
    stride_output,
    stride_page,
    stride_token,
    stride_table,
    stride_scales_page,
    stride_scales_token,
    PAGE_SIZE: tl.constexpr,
    KV_LORA_RANK: tl.constexpr,
    GRANULARITY: tl.constexpr,
    FNUZ: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    length = tl.minimum(tl.load(buffer_length, mask=length_on_device != 0, other=rows_max), rows_max)
    total = tl.load(buffer_row_offsets + batch_size)
    asked = row < length
    live = asked & (row < total)
    sequence = search(row, buffer_row_offsets, batch_size, steps, live)
    position = row - tl.load(buffer_row_offsets + sequence, mask=live, other=0)
    position += tl.load(cache_offsets + sequence, mask=live, other=0)
    page = page_of(position, sequence, live, page_table, page_indptr, stride_table, PAGE_SIZE)
    slot = position % PAGE_SIZE

    offs_d = tl.arange(0, KV_LORA_RANK)
    source = latent + (page * stride_page + slot.to(tl.int64) * stride_token)[:, None] + offs_d[None, :]
    value = tl.load(source, mask=live[:, None], other=0.0)
    if GRANULARITY > 0:
        BLOCKS: tl.constexpr = (KV_LORA_RANK + GRANULARITY - 1) // GRANULARITY
        base = page * stride_scales_page + slot.to(tl.int64) * stride_scales_token
        # Once for a block of columns: an element's own address would make a load of each.
        scale = tl.load(scales + base[:, None] + tl.arange(0, BLOCKS)[None, :], mask=live[:, None], other=0.0)
        blocks = (
            tl.reshape(widen(value, tl.float16, FNUZ), [BLOCK_R, BLOCKS, KV_LORA_RANK // BLOCKS]) * scale[:, :, None]
        )
        value = narrow(tl.reshape(blocks, [BLOCK_R, KV_LORA_RANK]), output.dtype.element_ty, INTERPRETED)
    target = output + row.to(tl.int64)[:, None] * stride_output + offs_d[None, :]
    tl.store(target, value, mask=asked[:, None])
