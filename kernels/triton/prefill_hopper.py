"""Prefill for sm_90 in Gluon, Triton's lower-level language: warps of different roles.

Computes what ``prefill.py`` computes, for 16-bit inputs of 192 x 128 without biases and soft-cap. The functions of
the mask (mask_visible, mask_tile_class) are put in front of this text (``backends/triton/compiler.py``).

    CTA (one an SM): 128 query rows of one head, keys in tiles of BLOCK_N = 128
    warps 0-3    consumer 0, rows 0-63       S = Q K^T by wgmma from shared memory, softmax and O in registers,
    warps 4-7    consumer 1, rows 64-127     O += P V with P from registers
    warps 8-11   producer                    K, V by TMA; rope and the last V tile by cp.async

    shared memory        bytes                       filled by              full (arrivals)   empty (arrivals)
    s_q, s_q_rope        2 x 64 x 192 x 2            its consumer
    s_k, s_rope          2 stages x 128 x 192 x 2    TMA, cp.async          1 + 128           one a consumer
    s_v                  2 stages x 128 x 128 x 2    TMA; cp.async          1 + 128           one a consumer

Rope rows come through the page table row by row, so any page size and any first position will do. Each arrival on an
empty barrier is one thread's, behind a barrier of its warpgroup. Tiles past n_keys: scores are masked by select, values
are copied row by row with zeros past n_keys. What cp.async has written meets wgmma behind a proxy fence.

Programs are dealt by the hardware in the order of their ids, longest first; all that a program has to know of its
place is read in one step from the schedule (``prefill.schedule``). Measured on an H200: docs/perf-log.md.
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

from .prefill import HIDDEN, LN2, LOG2E, SCAN, SLOT_FIELDS, VISIBLE, _class, _sequence

# Both were renamed after Triton 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
row_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a consumer
PRODUCER_THREADS = gl.constexpr(128)


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
    s_k, s_rope, s_v, k_full, k_empty, v_full, v_empty, k_map, v_map, v, at_rope, table,
    b, h, q_lo, q_hi, offset, n_keys, n_tiles, k_row, stride_v_t, stride_v_h, stride_rope_page, stride_rope_t,
    c0, c1, c2, c3,
    PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    NOPE: gl.constexpr = s_k.shape[3]
    V: gl.constexpr = s_v.shape[3]
    ROPE_DIM: gl.constexpr = s_rope.shape[2]
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, by_row))
    offs_rope = gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, by_row))
    step = n_tiles * 0
    n = _skip_hidden(n_tiles * 0, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N)
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
        row_load(s_rope.index(slot), at_rope + row[:, None] + offs_rope[None, :], mask=inside[:, None])
        async_copy.mbarrier_arrive(k_full.index(slot), increment_count=False)

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
    async_copy.wait_group(0)


@gluon.jit
def _consumer(
    WARPGROUP: gl.constexpr,
    s_q, s_q_rope, s_k, s_rope, s_v, k_full, k_empty, v_full, v_empty, output, lse, q, q_rope, sinks,
    b, h, q_lo, q_hi, offset, n_keys, n_tiles, t_first, m_first, new, factor,
    stride_output_t, stride_output_h, stride_lse_t, stride_lse_h, stride_q_t, stride_q_h, stride_q_rope_t,
    stride_q_rope_h, c0, c1, c2, c3,
    SPLIT_Q: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    NOPE: gl.constexpr = s_q.shape[2]
    ROPE_DIM: gl.constexpr = s_q_rope.shape[2]
    V: gl.constexpr = s_v.shape[3]
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    first = WARPGROUP * ROWS

    # This warpgroup's queries.
    offs_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_row))
    offs_nope = gl.arange(0, NOPE, layout=gl.SliceLayout(0, by_row))
    offs_rope = gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, by_row))
    inside_m = (m_first + first + offs_m < new)[:, None]
    head = h.to(gl.int64)
    row = (first + offs_m)[:, None]
    at_q = q + t_first * stride_q_t + head * stride_q_h
    if SPLIT_Q:
        at_rope = q_rope + t_first * stride_q_rope_t + head * stride_q_rope_h + row * stride_q_rope_t
    else:
        at_rope = at_q + NOPE + row * stride_q_t
    s_q.index(WARPGROUP).store(gl.load(at_q + row * stride_q_t + offs_nope[None, :], mask=inside_m, other=0.0))
    s_q_rope.index(WARPGROUP).store(gl.load(at_rope + offs_rope[None, :], mask=inside_m, other=0.0))
    fence_async_shared()
    debug_barrier()

    m_i = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores))
    l_i = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, scores))
    acc = gl.full([ROWS, V], 0.0, gl.float32, layout=values)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores))
    cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores))
    lo = q_lo + first
    hi = gl.minimum(lo + ROWS - 1, q_hi)
    step = n_tiles * 0
    n = _skip_hidden(n_tiles * 0, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N)
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
    out_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, values))
    out_d = gl.arange(0, V, layout=gl.SliceLayout(0, values))
    at_output = output + t_first * stride_output_t + head * stride_output_h
    target = at_output + (first + out_m)[:, None] * stride_output_t + out_d[None, :]
    gl.store(target, acc.to(output.dtype.element_ty), mask=(m_first + first + out_m < new)[:, None])
    if HAS_LSE:
        natural = gl.where(empty, float("-inf"), (m_i + gl.log2(l_i)) * LN2)
        at_lse = lse + t_first * stride_lse_t + head * stride_lse_h
        gl.store(at_lse + (first + rows) * stride_lse_t, natural, mask=m_first + first + rows < new)


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
    slots,
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
    # Which sequence, head and query tile.
    item = gl.program_id(0)
    if batch_size > 1:
        at_slot = slots + (item // num_heads).to(gl.int64) * SLOT_FIELDS
        b = gl.load(at_slot)
        first_slot = gl.load(at_slot + 1)
        q_row = gl.load(at_slot + 2)
        new = gl.load(at_slot + 3)
        k_row = gl.load(at_slot + 4)
        n_keys = gl.load(at_slot + 5)
        start = gl.load(at_slot + 6)
        offset = gl.load(at_slot + 7)
    else:
        b = item * 0
        first_slot = item * 0
        q_row, new, k_row, n_keys, start, offset = _sequence(
            b, cu_seqlens_q, cu_seqlens_k, lengths, cache_offsets, start_positions, kv_lengths, flags,
            rope_length, ROPE,
        )  # fmt: skip
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    tiles = (new + (BLOCK_M - 1)) // BLOCK_M
    item -= first_slot * num_heads
    if item < tiles * num_heads:
        group_size = gl.minimum(gl.maximum(L2_BYTES // ((NOPE + V) * 2) // gl.maximum(n_keys, 1), 1), num_heads)
        group = item // (tiles * group_size)
        item -= group * tiles * group_size
        width = gl.minimum(group_size, num_heads - group * group_size)
        m_first = (tiles - 1 - item // width) * BLOCK_M
        h = group * group_size + item % width
        q_lo = start + m_first
        q_hi = start + gl.minimum(m_first + BLOCK_M, new) - 1
        n_tiles = (n_keys + (BLOCK_N - 1)) // BLOCK_N
        t_first = (q_row + m_first).to(gl.int64)
        factor = scale * LOG2E
        PAGED: gl.constexpr = ROPE == "paged"
        if PAGED:
            table = page_table + (gl.load(page_indptr + b).to(gl.int64) if CSR else b.to(gl.int64) * stride_table)
            at_rope = rope
        else:
            table = page_table
            if ROPE == "batched":
                at_rope = rope + b.to(gl.int64) * stride_rope_page
            else:
                at_rope = rope + (k_row - offset).to(gl.int64) * stride_rope_t

        dtype: gl.constexpr = v.dtype.element_ty
        rows_of_128_bytes: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        barrier: gl.constexpr = mbarrier.MBarrierLayout()
        s_q = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, NOPE], rows_of_128_bytes)
        s_q_rope = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, ROPE_DIM], rows_of_128_bytes)
        s_k = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, 1, NOPE], k_map.layout)
        s_rope = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, ROPE_DIM], rows_of_128_bytes)
        s_v = gl.allocate_shared_memory(dtype, [STAGES_V, BLOCK_N, 1, V], v_map.layout)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], barrier)
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], barrier)
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], barrier)
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], barrier)
        for i in gl.static_range(STAGES_K):
            mbarrier.init(k_full.index(i), count=PRODUCER_THREADS + 1)
            mbarrier.init(k_empty.index(i), count=CONSUMERS)
        for i in gl.static_range(STAGES_V):
            mbarrier.init(v_full.index(i), count=PRODUCER_THREADS + 1)
            mbarrier.init(v_empty.index(i), count=CONSUMERS)

        ZERO: gl.constexpr = 0
        ONE: gl.constexpr = 1
        gl.warp_specialize([
            (_consumer, (
                ZERO, s_q, s_q_rope, s_k, s_rope, s_v, k_full, k_empty, v_full, v_empty, output, lse, q, q_rope, sinks,
                b, h, q_lo, q_hi, offset, n_keys, n_tiles, t_first, m_first, new, factor,
                stride_output_t, stride_output_h, stride_lse_t, stride_lse_h, stride_q_t, stride_q_h,
                stride_q_rope_t, stride_q_rope_h, c0, c1, c2, c3,
                SPLIT_Q, HAS_SINKS, HAS_LSE, BLOCK_N, STAGES_K, STAGES_V,
            )),
            (_consumer, (
                ONE, s_q, s_q_rope, s_k, s_rope, s_v, k_full, k_empty, v_full, v_empty, output, lse, q, q_rope, sinks,
                b, h, q_lo, q_hi, offset, n_keys, n_tiles, t_first, m_first, new, factor,
                stride_output_t, stride_output_h, stride_lse_t, stride_lse_h, stride_q_t, stride_q_h,
                stride_q_rope_t, stride_q_rope_h, c0, c1, c2, c3,
                SPLIT_Q, HAS_SINKS, HAS_LSE, BLOCK_N, STAGES_K, STAGES_V,
            )),
            (_producer, (
                s_k, s_rope, s_v, k_full, k_empty, v_full, v_empty, k_map, v_map, v, at_rope, table,
                b, h, q_lo, q_hi, offset, n_keys, n_tiles, k_row, stride_v_t, stride_v_h,
                stride_rope_page, stride_rope_t, c0, c1, c2, c3, PAGED, PAGE_SIZE, BLOCK_N, STAGES_K, STAGES_V,
            )),
        ], [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
