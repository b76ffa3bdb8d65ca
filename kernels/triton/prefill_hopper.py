"""Prefill for sm_90 in Gluon, Triton's lower-level language: warps of different roles, persistent over the items.

Computes what ``prefill.py`` computes, for 16-bit inputs of 192 x 128 without biases and soft-cap. The functions of
the mask (mask_visible, mask_tile_class) are put in front of this text (``backends/triton/compiler.py``).

    CTA (one an SM): 128 query rows of one head, keys in tiles of BLOCK_N = 128
    warps 0-3    consumer 0, rows 0-63       S = Q K^T by wgmma from shared memory, softmax and O in registers,
    warps 4-7    consumer 1, rows 64-127     O += P V with P from registers
    warps 8-11   producer                    K, V by TMA; Q, rope and the last V tile by cp.async

    shared memory        bytes                   filled by          full (arrivals)     empty (arrivals)
    s_q, s_q_rope        2 x 64 x 192 x 2        cp.async           128 + 1             one a consumer
    s_item               item's numbers          producer           with s_q            with s_q
    s_k, s_rope          2 stages x 128 x 192 x 2    TMA, cp.async  TMA + 128           one a consumer
    s_v                  2 stages x 128 x 128 x 2    TMA or cp.async    TMA or 1, + 128     one a consumer

Rope rows come through the page table row by row, so any page size and any first position will do. The producer works
out the next item, its first keys and its queries while the consumers finish the one before. Items are dealt to the
CTAs in rounds of alternating direction, which evens out a list that goes from long to short.

Each arrival is one thread's, behind a barrier of its warpgroup. Tiles past n_keys: scores are masked by select,
values are copied row by row with zeros past n_keys. Both sides of generic writes (cp.async) meet wgmma through a
proxy fence.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier

from .prefill import HIDDEN, LN2, LOG2E, SCAN, VISIBLE, _class, _sequence

# Both were renamed after Triton 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
row_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a consumer
PRODUCER_THREADS = gl.constexpr(128)
ITEM_FIELDS = gl.constexpr(8)


@gluon.jit
def _skip_hidden(n, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N: gl.constexpr):
    """Return the first tile from n on that is not wholly hidden."""
    kind = _class(n, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, mask_tile_class, 0, BLOCK_N)
    while (kind == HIDDEN) & (n < n_tiles):
        ahead = n + gl.arange(0, SCAN, layout=gl.BlockedLayout([1], [32], [4], [0]))
        kinds = _class(ahead, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, mask_tile_class, 0, BLOCK_N)
        n = gl.min(gl.where((kinds == HIDDEN) & (ahead < n_tiles), n + SCAN, ahead), 0)
        kind = _class(n, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, mask_tile_class, 0, BLOCK_N)
    return n


@gluon.jit
def _turn(turn):
    """Return the item of a CTA's turn: rounds alternate in direction."""
    place = gl.program_id(0)
    last = gl.num_programs(0) - 1
    return turn * (last + 1) + gl.where((turn & 1) != 0, last - place, place)


@gluon.jit
def _send_item(
    s_item, s_q, s_q_rope, q_full, q_empty, turn, q, q_rope, q_row, new, m_first, b, h, start, offset, n_keys,
    stride_q_t, stride_q_h, stride_q_rope_t, stride_q_rope_h, SPLIT_Q: gl.constexpr,
):  # fmt: skip
    """Hand the consumers an item: its numbers and its queries."""
    NOPE: gl.constexpr = s_q.shape[2]
    ROPE_DIM: gl.constexpr = s_q_rope.shape[2]
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
    field = gl.arange(0, ITEM_FIELDS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    numbers = gl.where(field == 0, b, gl.where(field == 1, h, gl.where(field == 2, q_row, new)))
    numbers = gl.where(field == 4, m_first, gl.where(field == 5, start, gl.where(field == 6, offset, numbers)))
    s_item.store(gl.where(field == 7, n_keys, numbers))
    offs_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_row))
    offs_nope = gl.arange(0, NOPE, layout=gl.SliceLayout(0, by_row))[None, :]
    offs_rope = gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, by_row))[None, :]
    first = (q_row + m_first).to(gl.int64)
    head = h.to(gl.int64)
    at_q = q + first * stride_q_t + head * stride_q_h
    for part in gl.static_range(CONSUMERS):
        row = part * ROWS + offs_m
        inside = (m_first + row < new)[:, None]
        row_load(s_q.index(part), at_q + row[:, None] * stride_q_t + offs_nope, mask=inside)
        if SPLIT_Q:
            at_rope = q_rope + first * stride_q_rope_t + head * stride_q_rope_h + row[:, None] * stride_q_rope_t
        else:
            at_rope = at_q + NOPE + row[:, None] * stride_q_t
        row_load(s_q_rope.index(part), at_rope + offs_rope, mask=inside)
    async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)
    debug_barrier()  # the numbers are written by all
    mbarrier.arrive(q_full.index(0))


@gluon.jit
def _copy_values(s_v, v, row, h, count, stride_v_t, stride_v_h):
    """Copy the first `count` rows of a tile of v and write zeros behind them: zero times NaN is NaN."""
    BLOCK_N: gl.constexpr = s_v.shape[0]
    V: gl.constexpr = s_v.shape[2]
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, by_row))
    offs_v = gl.arange(0, V, layout=gl.SliceLayout(0, by_row))
    source = v + row.to(gl.int64) * stride_v_t + h.to(gl.int64) * stride_v_h
    source += offs_n[:, None] * stride_v_t + offs_v[None, :]
    row_load(s_v.reshape([BLOCK_N, V]), source, mask=(offs_n < count)[:, None])


@gluon.jit
def _producer(
    s_item, s_q, s_q_rope, s_k, s_rope, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    q, q_rope, k_map, v_map, v, rope, page_table, page_indptr, cu_seqlens_q, cu_seqlens_k, lengths, cache_offsets,
    start_positions, kv_lengths, order, c0, c1, c2, c3, items, batch_size, num_heads, flags, rope_length,
    stride_q_t, stride_q_h, stride_q_rope_t, stride_q_rope_h, stride_v_t, stride_v_h, stride_rope_page, stride_rope_t,
    stride_table,
    PAGED: gl.constexpr, BATCHED: gl.constexpr, CSR: gl.constexpr, SPLIT_Q: gl.constexpr, PAGE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr, L2_BYTES: gl.constexpr,
):  # fmt: skip
    NOPE: gl.constexpr = s_k.shape[3]
    V: gl.constexpr = s_v.shape[3]
    ROPE_DIM: gl.constexpr = s_rope.shape[2]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    ROPE: gl.constexpr = "paged" if PAGED else ("batched" if BATCHED else "ragged")
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, by_row))
    offs_rope = gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, by_row))
    step = items * 0
    turn = items * 0
    item = _turn(turn)
    while item < items:
        # Which sequence, head and query tile.
        b = items * 0
        begin = items * 0
        if batch_size > 1:
            first_tile = order + batch_size
            slot = item // num_heads
            low = items * 0
            high = batch_size
            while high - low > 1:
                middle = (low + high) // 2
                right = gl.load(first_tile + middle) <= slot
                low = gl.where(right, middle, low)
                high = gl.where(right, high, middle)
            begin = gl.load(first_tile + low)
            b = gl.load(order + low)
        q_row, new, k_row, n_keys, start, offset = _sequence(
            b, cu_seqlens_q, cu_seqlens_k, lengths, cache_offsets, start_positions, kv_lengths, flags, rope_length,
            ROPE,
        )  # fmt: skip
        place = item - begin * num_heads
        tiles = (new + (BLOCK_M - 1)) // BLOCK_M
        group_size = gl.minimum(gl.maximum(L2_BYTES // ((NOPE + V) * 2) // gl.maximum(n_keys, 1), 1), num_heads)
        group = place // (tiles * group_size)
        place -= group * tiles * group_size
        width = gl.minimum(group_size, num_heads - group * group_size)
        m_first = (tiles - 1 - place // width) * BLOCK_M
        h = group * group_size + place % width
        q_lo = start + m_first
        q_hi = start + gl.minimum(m_first + BLOCK_M, new) - 1
        n_tiles = (n_keys + (BLOCK_N - 1)) // BLOCK_N
        if PAGED:
            table = page_table + (gl.load(page_indptr + b).to(gl.int64) if CSR else b.to(gl.int64) * stride_table)
            at_rope = rope
        elif BATCHED:
            at_rope = rope + b.to(gl.int64) * stride_rope_page
        else:
            at_rope = rope + (k_row - offset).to(gl.int64) * stride_rope_t

        sent = items * 0
        n = _skip_hidden(items * 0, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N)
        while n < n_tiles:
            j = n * BLOCK_N
            slot = step % STAGES_K
            mbarrier.wait(k_empty.index(slot), (step // STAGES_K & 1) ^ 1)
            mbarrier.expect(k_full.index(slot), BLOCK_N * NOPE * 2)
            tma_load(k_map, [k_row + j, h, 0], k_full.index(slot), s_k.index(slot))
            inside = j + offs_n < n_keys
            position = offset + j + offs_n
            if PAGED:
                page = gl.load(table + position // PAGE_SIZE, mask=inside, other=0)
                row = page.to(gl.int64) * stride_rope_page + (position % PAGE_SIZE) * stride_rope_t
            else:
                row = position.to(gl.int64) * stride_rope_t
            source = at_rope + row[:, None] + offs_rope[None, :]
            row_load(s_rope.index(slot), source, mask=inside[:, None])
            async_copy.mbarrier_arrive(k_full.index(slot), increment_count=False)
            if sent == 0:
                _send_item(
                    s_item, s_q, s_q_rope, q_full, q_empty, turn, q, q_rope, q_row, new, m_first, b, h, start, offset,
                    n_keys, stride_q_t, stride_q_h, stride_q_rope_t, stride_q_rope_h, SPLIT_Q,
                )  # fmt: skip
                sent += 1

            slot = step % STAGES_V
            mbarrier.wait(v_empty.index(slot), (step // STAGES_V & 1) ^ 1)
            if j + BLOCK_N <= n_keys:
                mbarrier.expect(v_full.index(slot), BLOCK_N * V * 2)
                tma_load(v_map, [k_row + j, h, 0], v_full.index(slot), s_v.index(slot))
            else:
                _copy_values(s_v.index(slot), v, k_row + j, h, n_keys - j, stride_v_t, stride_v_h)
                mbarrier.arrive(v_full.index(slot))
            async_copy.mbarrier_arrive(v_full.index(slot), increment_count=False)
            step += 1
            n = _skip_hidden(n + 1, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N)
        if sent == 0:
            _send_item(
                s_item, s_q, s_q_rope, q_full, q_empty, turn, q, q_rope, q_row, new, m_first, b, h, start, offset,
                n_keys, stride_q_t, stride_q_h, stride_q_rope_t, stride_q_rope_h, SPLIT_Q,
            )  # fmt: skip
        turn += 1
        item = _turn(turn)
    async_copy.wait_group(0)


@gluon.jit
def _field(numbers, field, index: gl.constexpr):
    return gl.sum(gl.where(field == index, numbers, 0), 0)


@gluon.jit
def _consumer(
    WARPGROUP: gl.constexpr,
    s_item, s_q, s_q_rope, s_k, s_rope, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    output, lse, sinks, c0, c1, c2, c3, items, scale,
    stride_output_t, stride_output_h, stride_lse_t, stride_lse_h,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    NOPE: gl.constexpr = s_q.shape[2]
    V: gl.constexpr = s_v.shape[3]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    # Every thread holds all the numbers, so that picking one costs no shuffle.
    everywhere: gl.constexpr = gl.BlockedLayout([ITEM_FIELDS], [32], [4], [0])
    field = gl.arange(0, ITEM_FIELDS, layout=everywhere)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores))
    cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores))
    out_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, values))
    out_d = gl.arange(0, V, layout=gl.SliceLayout(0, values))
    first = WARPGROUP * ROWS
    factor = scale * LOG2E
    step = items * 0
    turn = items * 0
    while _turn(turn) < items:
        mbarrier.wait(q_full.index(0), turn & 1)
        fence_async_shared()
        numbers = s_item.load(everywhere)
        b = _field(numbers, field, 0)
        h = _field(numbers, field, 1)
        q_row = _field(numbers, field, 2)
        new = _field(numbers, field, 3)
        m_first = _field(numbers, field, 4)
        start = _field(numbers, field, 5)
        offset = _field(numbers, field, 6)
        n_keys = _field(numbers, field, 7)
        n_tiles = (n_keys + (BLOCK_N - 1)) // BLOCK_N
        q_lo = start + m_first
        q_hi = start + gl.minimum(m_first + BLOCK_M, new) - 1
        lo = q_lo + first
        hi = gl.minimum(lo + ROWS - 1, q_hi)

        m_i = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores))
        l_i = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, scores))
        acc = gl.full([ROWS, V], 0.0, gl.float32, layout=values)
        n = _skip_hidden(items * 0, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N)
        while n < n_tiles:
            slot = step % STAGES_K
            mbarrier.wait(k_full.index(slot), step // STAGES_K & 1)
            fence_async_shared()
            zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=scores)
            keys = s_k.index(slot).reshape([BLOCK_N, NOPE]).permute((1, 0))
            s = warpgroup_mma(s_q.index(WARPGROUP), keys, zero, use_acc=False, is_async=True)
            s = warpgroup_mma(s_q_rope.index(WARPGROUP), s_rope.index(slot).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            debug_barrier()
            mbarrier.arrive(k_empty.index(slot))

            if _class(n, b, h, lo, hi, offset, n_keys, c0, c1, c2, c3, mask_tile_class, 0, BLOCK_N) != VISIBLE:
                col = n * BLOCK_N + cols
                seen = mask_visible(b, h, (lo + rows)[:, None], (offset + col)[None, :], c0, c1, c2, c3)
                s = gl.where(seen & (col < n_keys)[None, :], s, float("-inf"))
            m_new = gl.maximum(m_i, gl.max(s, 1) * factor)
            base = gl.where(m_new == float("-inf"), 0.0, m_new)
            p = gl.exp2(s * factor - base[:, None])
            correction = gl.exp2(m_i - base)
            l_i = l_i * correction + gl.sum(p, 1)
            m_i = m_new
            acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, values))[:, None]
            weights = gl.convert_layout(p.to(s_v.dtype), gl.DotOperandLayout(0, values, 2))

            slot = step % STAGES_V
            mbarrier.wait(v_full.index(slot), step // STAGES_V & 1)
            fence_async_shared()
            acc = warpgroup_mma(weights, s_v.index(slot).reshape([BLOCK_N, V]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            debug_barrier()
            mbarrier.arrive(v_empty.index(slot))
            step += 1
            n = _skip_hidden(n + 1, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N)
        debug_barrier()
        mbarrier.arrive(q_empty.index(0))

        if HAS_SINKS:
            sink = gl.load(sinks + h) * LOG2E
            m_new = gl.maximum(m_i, sink)
            base = gl.where(m_new == float("-inf"), 0.0, m_new)
            correction = gl.exp2(m_i - base)
            l_i = l_i * correction + gl.exp2(sink - base)
            acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, values))[:, None]
            m_i = m_new
        empty = l_i == 0.0
        inverse = gl.where(empty, 0.0, 1.0 / l_i)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, values))[:, None]
        t_first = (q_row + m_first).to(gl.int64)
        head = h.to(gl.int64)
        at_output = output + t_first * stride_output_t + head * stride_output_h
        inside = (m_first + first + out_m < new)[:, None]
        target = at_output + (first + out_m)[:, None] * stride_output_t + out_d[None, :]
        gl.store(target, acc.to(output.dtype.element_ty), mask=inside)
        if HAS_LSE:
            natural = gl.where(empty, float("-inf"), (m_i + gl.log2(l_i)) * LN2)
            at_lse = lse + t_first * stride_lse_t + head * stride_lse_h
            gl.store(at_lse + (first + rows) * stride_lse_t, natural, mask=m_first + first + rows < new)
        turn += 1


@gluon.jit
def prefill(
    output,
    lse,
    q,
    q_rope,
    k_map,
    v_map,
    v,
    rope,
    page_table,
    page_indptr,
    cu_seqlens_q,
    cu_seqlens_k,
    lengths,
    cache_offsets,
    start_positions,
    kv_lengths,
    sinks,
    order,
    c0,
    c1,
    c2,
    c3,
    batch_size,
    num_heads,
    flags,
    rope_length,
    stride_output_t,
    stride_output_h,
    stride_lse_t,
    stride_lse_h,
    stride_q_t,
    stride_q_h,
    stride_q_rope_t,
    stride_q_rope_h,
    stride_v_t,
    stride_v_h,
    stride_rope_page,
    stride_rope_t,
    stride_table,
    scale,
    ROPE: gl.constexpr,
    CSR: gl.constexpr,
    SPLIT_Q: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    NOPE: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    V: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    L2_BYTES: gl.constexpr,
):
    if batch_size > 1:
        tiles = gl.load(order + 2 * batch_size)
    else:
        tiles = (gl.load(cu_seqlens_q + 1) - gl.load(cu_seqlens_q) + (CONSUMERS * ROWS - 1)) // (CONSUMERS * ROWS)
    items = tiles * num_heads

    dtype: gl.constexpr = v.dtype.element_ty
    rows_of_128_bytes: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    s_item = gl.allocate_shared_memory(gl.int32, [ITEM_FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s_q = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, NOPE], rows_of_128_bytes)
    s_q_rope = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, ROPE_DIM], rows_of_128_bytes)
    s_k = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, 1, NOPE], k_map.layout)
    s_rope = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, ROPE_DIM], rows_of_128_bytes)
    s_v = gl.allocate_shared_memory(dtype, [STAGES_V, BLOCK_N, 1, V], v_map.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], barrier)
    mbarrier.init(q_full.index(0), count=PRODUCER_THREADS + 1)
    mbarrier.init(q_empty.index(0), count=CONSUMERS)
    for i in gl.static_range(STAGES_K):
        mbarrier.init(k_full.index(i), count=PRODUCER_THREADS + 1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES_V):
        mbarrier.init(v_full.index(i), count=PRODUCER_THREADS + 1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)

    PAGED: gl.constexpr = ROPE == "paged"
    BATCHED: gl.constexpr = ROPE == "batched"
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gl.warp_specialize([
        (_consumer, (
            ZERO,
            s_item, s_q, s_q_rope, s_k, s_rope, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            output, lse, sinks, c0, c1, c2, c3, items, scale,
            stride_output_t, stride_output_h, stride_lse_t, stride_lse_h,
            HAS_SINKS, HAS_LSE, BLOCK_N, STAGES_K, STAGES_V,
        )),
        (_consumer, (
            ONE,
            s_item, s_q, s_q_rope, s_k, s_rope, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            output, lse, sinks, c0, c1, c2, c3, items, scale,
            stride_output_t, stride_output_h, stride_lse_t, stride_lse_h,
            HAS_SINKS, HAS_LSE, BLOCK_N, STAGES_K, STAGES_V,
        )),
        (_producer, (
            s_item, s_q, s_q_rope, s_k, s_rope, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            q, q_rope, k_map, v_map, v, rope, page_table, page_indptr, cu_seqlens_q, cu_seqlens_k, lengths,
            cache_offsets, start_positions, kv_lengths, order, c0, c1, c2, c3, items, batch_size, num_heads, flags,
            rope_length, stride_q_t, stride_q_h, stride_q_rope_t, stride_q_rope_h, stride_v_t, stride_v_h,
            stride_rope_page, stride_rope_t, stride_table,
            PAGED, BATCHED, CSR, SPLIT_Q, PAGE_SIZE, BLOCK_N, STAGES_K, STAGES_V, L2_BYTES,
        )),
    ], [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
