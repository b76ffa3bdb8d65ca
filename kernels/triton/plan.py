"""Cut the page-padded sequences of a batch into chunks of N rows: one launch, one row of the tables a program row.

    A[s] = round_up(cached[s] + new[s], P)      S[s] = A[0] + ... + A[s-1]      E = S[B]
    buffer_row_offsets[c, s] = clamp(S[s] - c N, 0, N)      cache_offsets[c, s] = clamp(c N - S[s], 0, A[s])

Grid: (groups, segments). A program scans its segment of the batch in blocks, and writes of it the rows of every
`groups`-th chunk; what lies before the segment it only sums. The host bounds segments and groups, so that work stays
proportional to the size of the tables. Sums and c N are 64-bit. Budget: 8 bytes read and 8 written for each (chunk,
sequence); a large batch is bound by what the last segment's program reads of the others, 8 bytes a sequence at 64 bytes
a cycle, a small one by latency.
"""

import triton
import triton.language as tl


@triton.jit
def _padded(sequence, inside, input_row_offsets, lengths, lengths_include_new, PAGE_SIZE: tl.constexpr):
    total = tl.load(lengths + sequence, mask=inside, other=0).to(tl.int64)
    counted = inside & (lengths_include_new == 0)
    total += tl.load(input_row_offsets + sequence + 1, mask=counted, other=0).to(tl.int64)
    total -= tl.load(input_row_offsets + sequence, mask=counted, other=0).to(tl.int64)
    return (total + (PAGE_SIZE - 1)) // PAGE_SIZE * PAGE_SIZE


@triton.jit
def plan(
    buffer_row_offsets,
    cache_offsets,
    buffer_lengths,
    required_chunks,
    input_row_offsets,
    lengths,
    batch_size,
    chunks,
    buffer_token_size,
    stride_rows,
    stride_offsets,
    stride_lengths,
    lengths_include_new,
    wants_required_chunks,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0)
    groups = tl.num_programs(0)
    segment = tl.program_id(1)
    segments = tl.num_programs(1)
    size = buffer_token_size.to(tl.int64)
    row_stride = stride_rows.to(tl.int64)
    cache_stride = stride_offsets.to(tl.int64)
    offs = tl.arange(0, BLOCK)

    blocks = tl.cdiv(tl.cdiv(batch_size, BLOCK), segments)
    first = tl.minimum(segment * blocks * BLOCK, batch_size)
    last = tl.minimum(first + blocks * BLOCK, batch_size)
    # Wide, so that the loads of a step are in flight together.
    wide = tl.arange(0, 8 * BLOCK)
    before = tl.zeros([8 * BLOCK], tl.int64)
    for start in range(0, first, 8 * BLOCK):
        before += _padded(
            start + wide, start + wide < first, input_row_offsets, lengths, lengths_include_new, PAGE_SIZE
        )
    total = tl.sum(before, 0)
    for start in range(first, last, BLOCK):
        sequence = start + offs
        inside = sequence < last
        rows = _padded(sequence, inside, input_row_offsets, lengths, lengths_include_new, PAGE_SIZE)
        begin = total + tl.cumsum(rows, 0) - rows
        for chunk in range(group, chunks, groups):
            behind = begin - chunk * size
            in_buffer = tl.minimum(tl.maximum(behind, 0), size)
            in_cache = tl.minimum(tl.maximum(-behind, 0), rows)
            at_row = buffer_row_offsets + chunk * row_stride
            at_cache = cache_offsets + chunk * cache_stride
            tl.store(at_row + sequence, in_buffer.to(tl.int32), mask=inside)
            tl.store(at_cache + sequence, in_cache.to(tl.int32), mask=inside)
        total += tl.sum(rows, 0)

    if segment == segments - 1:
        for chunk in range(group, chunks, groups):
            rest = total - chunk * size
            used = tl.where(rest > 0, tl.minimum(rest, size), tl.where(batch_size > 0, -1, 0))
            tl.store(buffer_lengths + chunk * stride_lengths, used.to(tl.int32))
            if batch_size > 0:
                at_end = buffer_row_offsets + chunk * row_stride + batch_size
                tl.store(at_end, tl.minimum(tl.maximum(rest, 0), size).to(tl.int32))
        if (wants_required_chunks != 0) & (group == 0):
            tl.store(required_chunks, ((total + size - 1) // size).to(tl.int32))
