"""Prefill for sm_90 in Gluon, Triton's lower-level language: warps of different roles, persistent over the items.

Computes what ``prefill.py`` computes, for 192 x 128 without biases and soft-cap, in 16 bits and in fp8. The mask's
functions (mask_visible, mask_tile_class) are put behind this text (``backends/triton/compiler.py``).

    CTA (one an SM): BLOCK_M query rows of one head, keys in tiles of BLOCK_N = 128
    2 or 3 x 4 warps    consumers of 64 rows     S = Q K^T by wgmma from shared memory, softmax and O in registers,
                                                 O += P V with P from registers; in fp8 those of ``hopper_fp8.py``
    4 warps, in fp8 1   producer                 Q, K, V and rope by TMA; in 16 bits rope rows by cp.async, see below
    in fp8 1 warp       keys                     roped keys, factors of keys  (``hopper_makers.py``)
    in fp8 2 warps      values                   V; where it does not lie in memory as wgmma wants it, turns it

    shared memory            in 16 bits                  full (arrivals)     empty (arrivals)
    s_q, s_q_rope, s_item    BLOCK_M x 192 x 2, numbers  1 + bytes           one a consumer, after its last Q K^T
    s_k, s_rope, s_tile,     stages x 128 x 192 x 2,     1 + 128 + bytes,    one a consumer
    s_factors, s_numbers     in fp8 3 x 128 x 4 more     in fp8 3 + bytes
    s_v                      stages x 128 x 128 x 2      1 + bytes           one a consumer; in fp8 with its keys
    s_raw                    in fp8 V as it comes        1 + bytes           (the values' own)
    s_job                    stages x 8 numbers, fp8     1                   with the keys
    (in fp8 each of a consumer's 128 threads arrives)

The producer alone knows the schedule, the mask's classes of tiles and, in 16 bits, the page table. It finds the next
item and loads its first tiles while the consumers finish the one before; the item's numbers go with its queries, and
beside each tile of keys stands a word: its number, which consumers want it and have to mask it, and whether it is the
item's last. A CTA's first item is its own number, every further one comes from a counter in global memory: the list
goes from long to short, so the CTAs end together. In 16 bits values come behind the next tile's keys.

Rope rows come in boxes of gcd(page size, BLOCK_N) rows, at least 8 (fp8: 16), where the first key lies at the beginning
of one; else row by row. What lies behind the last key is hidden by select in the scores, and in the values overwritten
with zeros by the consumers. What generic stores and cp.async have written meets wgmma behind a proxy fence. In 16 bits
each arrival is one thread's, behind a barrier of its partition's warps. Measured on an H200: docs/perf-log.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier

from .hopper_fp8 import consume_fp8
from .hopper_items import ITEM_FIELDS, LAST, MASKED, ROWS, TILE_SHIFT, WANTED, hide, hide_end, receive_item, store_item
from .hopper_loads import CHUNK, copy_rope, load_rows, tma_load
from .hopper_makers import FACTORS, JOB_FIELDS, NUMBERS, make_keys, make_values, send_job
from .hopper_tiles import reinterpret, zero_rows
from .prefill import HIDDEN, LOG2E, SCAN, SLOT_FIELDS, VISIBLE, _class, _sequence

PRODUCER_WARPS = gl.constexpr(4)  # in 16 bits; in fp8 one, and three that make what it does not load


@gluon.jit
def _skip_hidden(n, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N: gl.constexpr):
    """Return the first tile from n on that is not wholly hidden, and its class."""
    kind = _class(n, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, mask_tile_class, 0, BLOCK_N)
    while (kind == HIDDEN) & (n < n_tiles):
        ahead = n + gl.arange(0, SCAN, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        kinds = _class(ahead, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, mask_tile_class, 0, BLOCK_N)
        n = gl.min(gl.where((kinds == HIDDEN) & (ahead < n_tiles), n + SCAN, ahead), 0)
        kind = _class(n, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, mask_tile_class, 0, BLOCK_N)
    return n, kind


@gluon.jit
def _producer(
    load,
    ROPE: gl.constexpr, CSR: gl.constexpr, SPLIT_Q: gl.constexpr, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr,
    L2_BYTES: gl.constexpr,
):  # fmt: skip
    (
        tiles, jobs, barriers, maps, pages, index, slots, counter, captures, items, batch_size, num_heads, flags,
        rope_length,
    ) = load  # fmt: skip
    s_item, s_tile, _, _, s_q, s_q_rope, s_k, s_rope, s_v = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q_map, q_rope_map, k_map, k_odd_map, v_map, rope_map = maps
    cu_seqlens_q, cu_seqlens_k, lengths, cache_offsets, start_positions, kv_lengths = index
    s_job, job_full = jobs
    c0, c1, c2, c3 = captures
    rope, page_table, page_indptr, stride_rope_page, stride_rope_t, stride_table = pages
    PAGED: gl.constexpr = ROPE == "paged"
    BATCHED: gl.constexpr = ROPE == "batched"
    FP8: gl.constexpr = s_k.dtype.is_fp8()
    STAGES_K: gl.constexpr = s_k.shape[0]
    STAGES_V: gl.constexpr = s_v.shape[0]
    BLOCK_N: gl.constexpr = s_k.shape[2]
    NOPE: gl.constexpr = s_k.shape[3]
    V: gl.constexpr = s_v.shape[2] if FP8 else s_v.shape[3]
    ROPE_DIM: gl.constexpr = s_rope.shape[2]
    CONSUMERS: gl.constexpr = s_q.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    K_BYTES: gl.constexpr = NOPE * (s_k.dtype.primitive_bitwidth // 8)
    Q_BYTES: gl.constexpr = K_BYTES + ROPE_DIM * (s_rope.dtype.primitive_bitwidth // 8)
    V_BYTES: gl.constexpr = V * (s_v.dtype.primitive_bitwidth // 8)
    BOXES: gl.constexpr = BLOCK_N // BOX
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    if FP8:
        s_halves = reinterpret(s_k, s_k.dtype, [STAGES_K * 2, 1, BLOCK_N // 2, NOPE], k_map.layout)
    else:
        s_boxes = reinterpret(s_rope, s_rope.dtype, [STAGES_K * BOXES, 1, BOX, ROPE_DIM], rope_map.layout)
    step = items * 0
    step_v = items * 0
    turn = items * 0
    item = gl.program_id(0)
    b = items * 0
    first_slot = items * 0
    q_row, new, k_row, n_keys, start, offset = _sequence(
        b, cu_seqlens_q, cu_seqlens_k, lengths, cache_offsets, start_positions, kv_lengths, flags, rope_length, ROPE,
    )  # fmt: skip
    while item < items:
        # Which sequence, head and query tile.
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
        place = item - first_slot * num_heads
        q_tiles = (new + (BLOCK_M - 1)) // BLOCK_M
        group_size = gl.minimum(gl.maximum(L2_BYTES // (K_BYTES + V_BYTES) // gl.maximum(n_keys, 1), 1), num_heads)
        group = place // (q_tiles * group_size)
        place -= group * q_tiles * group_size
        width = gl.minimum(group_size, num_heads - group * group_size)
        m_first = (q_tiles - 1 - place // width) * BLOCK_M
        h = group * group_size + place % width
        q_lo = start + m_first
        q_hi = start + gl.minimum(m_first + BLOCK_M, new) - 1
        n_tiles = (n_keys + (BLOCK_N - 1)) // BLOCK_N
        table = page_table
        if CSR:
            table += gl.load(page_indptr + b)
        elif PAGED:
            table += b.to(gl.int64) * stride_table

        n, kind = _skip_hidden(items * 0, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N)
        following = item + gl.num_programs(0)
        waiting = n * 0 + 1
        held = n * 0 - 1  # the tile whose values come, or are made, beside the next keys
        while (n < n_tiles) | (waiting > 0) | (held >= 0):
            j = n * BLOCK_N
            after = n
            next_kind = kind
            if n < n_tiles:
                after, next_kind = _skip_hidden(
                    n + 1, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N
                )  # fmt: skip
                word = n << TILE_SHIFT
                for part in gl.static_range(CONSUMERS):
                    lo = q_lo + part * ROWS
                    own = kind
                    if kind != VISIBLE:
                        hi = gl.minimum(lo + ROWS - 1, q_hi)
                        own = _class(n, b, h, lo, hi, offset, n_keys, c0, c1, c2, c3, mask_tile_class, 0, BLOCK_N)
                    word |= gl.where(own == VISIBLE, 0, MASKED << part)
                    word |= gl.where((own != HIDDEN) & (lo <= q_hi), WANTED << part, 0)
                word |= gl.where(after < n_tiles, 0, LAST)
                slot = step % STAGES_K
                full = k_full.index(slot)
                mbarrier.wait(k_empty.index(slot), (step // STAGES_K & 1) ^ 1)
                s_tile.index(slot).store(gl.full([1], 0, gl.int32, layout=one) + word)
                if FP8:
                    next_row = gl.where(after < n_tiles, k_row + after * BLOCK_N, -1)
                    send_job(s_job.index(slot), k_row + j, offset + j, n_keys - j, b, h, next_row)
                debug_barrier()
                if FP8:
                    mbarrier.arrive(job_full.index(slot))
                    mbarrier.expect(full, BLOCK_N * K_BYTES)
                    load_rows(k_map, k_odd_map, s_halves, slot * 2, 1, h, k_row + j, full)
                else:
                    in_boxes = (offset % BOX == 0) & (PAGE_SIZE % BOX == 0) if PAGED else offset == offset
                    mbarrier.expect(full, BLOCK_N * Q_BYTES, pred=in_boxes)
                    mbarrier.expect(full, BLOCK_N * K_BYTES, pred=not in_boxes)
                    tma_load(k_map, [h, k_row + j, 0], full, s_k.index(slot))
                    if in_boxes:
                        for i in gl.static_range(BOXES):
                            if PAGED:
                                # Past the last key its box again: entries behind may hold anything.
                                at = offset + gl.minimum(j + i * BOX, (n_keys - 1) // BOX * BOX)
                                page = gl.load(table + at // PAGE_SIZE)
                                row = at % PAGE_SIZE
                            else:
                                page = b if BATCHED else b * 0
                                row = (offset if BATCHED else k_row) + j
                            tma_load(rope_map, [page, row, 0], full, s_boxes.index(slot * BOXES + i))
                    elif PAGED:
                        copy_rope(
                            s_rope.index(slot), rope, table, offset + j, n_keys - j, stride_rope_page, stride_rope_t,
                            PAGE_SIZE, 1,
                        )  # fmt: skip
                    async_copy.mbarrier_arrive(full, increment_count=False)
                step += 1
            if waiting > 0:
                # The item's numbers and its queries. An item without visible keys says that it has none.
                mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
                field = gl.arange(0, ITEM_FIELDS, layout=one)
                numbers = gl.where(field == 0, b, gl.where(field == 1, h, gl.where(field == 2, q_row + m_first, q_lo)))
                numbers = gl.where(field == 4, new - m_first, gl.where(field == 5, offset, numbers))
                s_item.store(gl.where(field == 6, gl.where(n < n_tiles, n_keys, 0), numbers))
                debug_barrier()
                mbarrier.expect(q_full.index(0), BLOCK_M * Q_BYTES)
                for part in gl.static_range(CONSUMERS):
                    row = q_row + m_first + part * ROWS
                    tma_load(q_map, [row, h, 0], q_full.index(0), s_q.index(part))
                    tma_load(q_rope_map, [row, h, 0 if SPLIT_Q else NOPE], q_full.index(0), s_q_rope.index(part))
            if not FP8 and held >= 0:
                slot = step_v % STAGES_V
                mbarrier.wait(v_empty.index(slot), (step_v // STAGES_V & 1) ^ 1)
                mbarrier.expect(v_full.index(slot), BLOCK_N * V_BYTES)
                tma_load(v_map, [k_row + held * BLOCK_N, h, 0], v_full.index(slot), s_v.index(slot))
                step_v += 1
            if waiting > 0:
                waiting -= 1
                if gl.num_programs(0) < items:
                    following = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
            held = gl.where(n < n_tiles, n, -1)
            n = after
            kind = next_kind
        turn += 1
        item = following
    mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
    s_item.store(gl.full([ITEM_FIELDS], 0, gl.int32, layout=one))
    debug_barrier()
    mbarrier.arrive(q_full.index(0))
    if FP8:
        slot = step % STAGES_K
        mbarrier.wait(k_empty.index(slot), (step // STAGES_K & 1) ^ 1)
        send_job(s_job.index(slot), step, step, step * 0, step, step, step)
        debug_barrier()
        mbarrier.arrive(job_full.index(slot))
    else:
        async_copy.wait_group(0)


@gluon.jit
def _consumer(WARPGROUP: gl.constexpr, work, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr):
    tiles, barriers, outputs, sinks, _, captures, scale = work
    s_item, s_tile, _, _, s_q, s_q_rope, s_k, s_rope, s_v = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    c0, c1, c2, c3 = captures
    STAGES_K: gl.constexpr = s_k.shape[0]
    STAGES_V: gl.constexpr = s_v.shape[0]
    BLOCK_N: gl.constexpr = s_k.shape[2]
    NOPE: gl.constexpr = s_q.shape[3]
    V: gl.constexpr = s_v.shape[3]
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, scores)
    rows = gl.arange(0, ROWS, layout=of_rows)
    nothing = gl.full([ROWS], float("-inf"), gl.float32, layout=of_rows)
    first = WARPGROUP * ROWS
    factor = scale * LOG2E
    q_tile = s_q.index(WARPGROUP).reshape([ROWS, NOPE])
    q_rope_tile = s_q_rope.index(WARPGROUP).reshape([ROWS, s_q_rope.shape[3]])
    turn = gl.program_id(0) * 0
    step = turn
    b, h, t_first, q_lo, count, offset, n_keys = receive_item(s_item, q_full, turn)
    while count > 0:
        lo = q_lo + first
        debug_barrier()
        mbarrier.arrive(q_empty.index(0), pred=n_keys == 0)
        m_i = gl.full([ROWS], float("-inf"), gl.float32, layout=of_rows)
        l_i = gl.full([ROWS], 0.0, gl.float32, layout=of_rows)
        acc = gl.full([ROWS, V], 0.0, gl.float32, layout=values)
        more = n_keys > 0
        while more:
            slot = step % STAGES_K
            mbarrier.wait(k_full.index(slot), step // STAGES_K & 1)
            fence_async_shared()
            word = gl.sum(s_tile.index(slot).load(one), 0)
            slot_v = step % STAGES_V if STAGES_V > 1 else word >> 30
            if (word & (WANTED << WARPGROUP)) != 0:
                zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=scores)
                keys = s_k.index(slot).reshape([BLOCK_N, NOPE]).permute((1, 0))
                ropes = s_rope.index(slot).permute((1, 0))
                s = warpgroup_mma(q_tile, keys, zero, use_acc=False, is_async=True)
                s = warpgroup_mma(q_rope_tile, ropes, s, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                debug_barrier()
                mbarrier.arrive(k_empty.index(slot))
                mbarrier.arrive(q_empty.index(0), pred=(word & LAST) != 0)

                first_key = (word >> TILE_SHIFT) * BLOCK_N
                if (word & (MASKED << WARPGROUP)) != 0:
                    if first_key + BLOCK_N > n_keys:
                        s = hide_end(s, nothing, n_keys - first_key)
                    s = hide(s, nothing, mask_visible, b, h, lo + rows, offset + first_key, c0, c1, c2, c3)
                m_new = gl.maximum(m_i, gl.max(s, 1) * factor)
                base = gl.where(m_new == float("-inf"), 0.0, m_new)
                p = gl.exp2(s * factor - base[:, None])
                correction = gl.exp2(m_i - base)
                l_i = l_i * correction + gl.sum(p, 1)
                m_i = m_new
                rescale = gl.convert_layout(correction, gl.SliceLayout(1, values))
                weights = gl.convert_layout(p.to(s_v.dtype), gl.DotOperandLayout(0, values, 2))

                mbarrier.wait(v_full.index(slot_v), step // STAGES_V & 1)
                tile = s_v.index(slot_v).reshape([BLOCK_N, V])
                if first_key + BLOCK_N > n_keys:
                    zero_rows(tile, n_keys - first_key)
                acc = warpgroup_mma(weights, tile, acc * rescale[:, None], is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                debug_barrier()
                mbarrier.arrive(v_empty.index(slot_v))
            else:
                debug_barrier()
                mbarrier.arrive(k_empty.index(slot))
                mbarrier.arrive(q_empty.index(0), pred=(word & LAST) != 0)
                mbarrier.wait(v_full.index(slot_v), step // STAGES_V & 1)
                debug_barrier()
                mbarrier.arrive(v_empty.index(slot_v))
            more = (word & LAST) == 0
            step += 1
        store_item(outputs, sinks, m_i, l_i, acc, 1.0, h, t_first, first, count, 0, HAS_SINKS, HAS_LSE)
        turn += 1
        b, h, t_first, q_lo, count, offset, n_keys = receive_item(s_item, q_full, turn)


@gluon.jit
def _consumer_fp8(
    WARPGROUP: gl.constexpr, work,
    PRESCALED: gl.constexpr, V_SCALES: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    # The mask's function is a global of this text alone, and no argument of a partition.
    consume_fp8(WARPGROUP, work, mask_visible, PRESCALED, V_SCALES, HAS_SINKS, HAS_LSE)


@gluon.jit
def prefill(
    output,
    lse,
    q_map,
    q_rope_map,
    k_map,
    k_odd_map,
    v_map,
    v_chunk_map,
    rope_map,
    rope_odd_map,
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
    q_scale,
    k_scales,
    v_scale,
    rope_scales,
    slots,
    c0,
    c1,
    c2,
    c3,
    batch_size,
    num_heads,
    num_slots,
    flags,
    rope_length,
    stride_output_t,
    stride_output_h,
    stride_lse_t,
    stride_lse_h,
    stride_rope_page,
    stride_rope_t,
    stride_table,
    stride_q_scale,
    stride_k_scales,
    stride_v_scale,
    stride_rope_scales_page,
    stride_rope_scales_t,
    scale,
    ROPE: gl.constexpr,
    CSR: gl.constexpr,
    SPLIT_Q: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    PRESCALED: gl.constexpr,
    V_SCALES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    NOPE: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    V: gl.constexpr,
    V_COLUMNS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    OTHER_REGISTERS: gl.constexpr,
    L2_BYTES: gl.constexpr,
):
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    gl.static_assert(CONSUMERS == 2 or CONSUMERS == 3)
    if batch_size > 1:
        counter = slots + num_slots.to(gl.int64) * SLOT_FIELDS + 2 * batch_size + 1
        q_tiles = gl.load(counter - 1)
    else:
        counter = slots
        q_tiles = (gl.load(cu_seqlens_q + 1) - gl.load(cu_seqlens_q) + (BLOCK_M - 1)) // BLOCK_M
    items = q_tiles * num_heads

    dtype: gl.constexpr = k_map.dtype
    rope_dtype: gl.constexpr = rope.dtype.element_ty
    FP8: gl.constexpr = dtype.is_fp8()
    ROPE_FP8: gl.constexpr = rope_dtype.is_fp8()
    RAW_STAGES: gl.constexpr = 2 if ROPE_FP8 or CONSUMERS == 2 else 1  # more do not fit
    rope_rows: gl.constexpr = gl.NVMMASharedLayout(64 if ROPE_FP8 else 128, 8 if ROPE_FP8 else 16, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_q = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, 1, NOPE], q_map.layout)
    s_q_rope = gl.allocate_shared_memory(rope_dtype, [CONSUMERS, ROWS, 1, ROPE_DIM], q_rope_map.layout)
    s_k = gl.allocate_shared_memory(dtype, [STAGES_K, 1, BLOCK_N, NOPE], k_map.layout)
    s_rope = gl.allocate_shared_memory(rope_dtype, [STAGES_K, BLOCK_N, ROPE_DIM], rope_rows)
    if FP8:
        s_v = gl.allocate_shared_memory(dtype, [STAGES_V, 1, V, BLOCK_N], gl.NVMMASharedLayout(128, 8, 3))
        if V_COLUMNS:
            s_raw = gl.allocate_shared_memory(
                dtype, [RAW_STAGES * (BLOCK_N // CHUNK + 1), 1, V, CHUNK], v_chunk_map.layout
            )
        else:
            PIECE: gl.constexpr = v_map.block_shape[2]
            s_raw = gl.allocate_shared_memory(dtype, [RAW_STAGES * (V // PIECE), BLOCK_N, 1, PIECE], v_map.layout)
        s_factors = gl.allocate_shared_memory(gl.float32, [STAGES_K * FACTORS, BLOCK_N], plain)
        s_numbers = gl.allocate_shared_memory(gl.float32, [STAGES_K * NUMBERS, 1], plain)
    else:
        s_v = gl.allocate_shared_memory(dtype, [STAGES_V, BLOCK_N, 1, V], v_map.layout)
        s_factors = gl.allocate_shared_memory(gl.float32, [1, 1], plain)
        s_numbers = gl.allocate_shared_memory(gl.float32, [1, 1], plain)
    s_item = gl.allocate_shared_memory(gl.int32, [ITEM_FIELDS], plain)
    s_tile = gl.allocate_shared_memory(gl.int32, [STAGES_K, 1], plain)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], barrier)
    raw_full = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], barrier)
    job_full = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], barrier)
    s_job = gl.allocate_shared_memory(gl.int32, [STAGES_K, JOB_FIELDS], plain)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=CONSUMERS * 128 if FP8 else CONSUMERS)
    for i in gl.static_range(RAW_STAGES):
        mbarrier.init(raw_full.index(i), count=1)
    for i in gl.static_range(STAGES_K):
        mbarrier.init(k_full.index(i), count=3 if FP8 else 32 * PRODUCER_WARPS + 1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS * 128 if FP8 else CONSUMERS)
        mbarrier.init(job_full.index(i), count=1)
    for i in gl.static_range(STAGES_V):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)

    tiles = (s_item, s_tile, s_factors, s_numbers, s_q, s_q_rope, s_k, s_rope, s_v)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    captures = (c0, c1, c2, c3)
    maps = (q_map, q_rope_map, k_map, k_odd_map, v_map, rope_map)
    index = (cu_seqlens_q, cu_seqlens_k, lengths, cache_offsets, start_positions, kv_lengths)
    outputs = (output, lse, stride_output_t, stride_output_h, stride_lse_t, stride_lse_h)
    pages = (rope, page_table, page_indptr, stride_rope_page, stride_rope_t, stride_table)
    scales = (
        q_scale, k_scales, v_scale, rope_scales, stride_q_scale, stride_k_scales, stride_v_scale,
        stride_rope_scales_page, stride_rope_scales_t,
    )  # fmt: skip
    jobs = (s_job, job_full)
    work = (tiles, barriers, outputs, sinks, scales, captures, scale)
    load = (
        tiles, jobs, barriers, maps, pages, index, slots, counter, captures, items, batch_size, num_heads, flags,
        rope_length,
    )  # fmt: skip
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    TWO: gl.constexpr = 2
    if FP8:
        keys = (tiles, jobs, barriers, rope_map, rope_odd_map, pages, scales)
        make = (tiles, jobs, s_raw, raw_full, barriers, v_map, v_chunk_map if V_COLUMNS else v_map)
        if CONSUMERS == 2:
            gl.warp_specialize([
                (_consumer_fp8, (ZERO, work, PRESCALED, V_SCALES, HAS_SINKS, HAS_LSE)),
                (_consumer_fp8, (ONE, work, PRESCALED, V_SCALES, HAS_SINKS, HAS_LSE)),
                (_producer, (load, ROPE, CSR, SPLIT_Q, PAGE_SIZE, BOX, L2_BYTES)),
                (make_keys, (keys, ROPE, CSR, PRESCALED, V_SCALES, PAGE_SIZE, BOX)),
                (make_values, (make, V_COLUMNS)),
            ], [4, 1, 1, 2], [CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS])  # fmt: skip
        else:
            gl.warp_specialize([
                (_consumer_fp8, (ZERO, work, PRESCALED, V_SCALES, HAS_SINKS, HAS_LSE)),
                (_consumer_fp8, (ONE, work, PRESCALED, V_SCALES, HAS_SINKS, HAS_LSE)),
                (_consumer_fp8, (TWO, work, PRESCALED, V_SCALES, HAS_SINKS, HAS_LSE)),
                (_producer, (load, ROPE, CSR, SPLIT_Q, PAGE_SIZE, BOX, L2_BYTES)),
                (make_keys, (keys, ROPE, CSR, PRESCALED, V_SCALES, PAGE_SIZE, BOX)),
                (make_values, (make, V_COLUMNS)),
            ], [4, 4, 1, 1, 2], [
                CONSUMER_REGISTERS, CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS,
            ])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (ZERO, work, HAS_SINKS, HAS_LSE)),
            (_consumer, (ONE, work, HAS_SINKS, HAS_LSE)),
            (_producer, (load, ROPE, CSR, SPLIT_Q, PAGE_SIZE, BOX, L2_BYTES)),
        ], [4, PRODUCER_WARPS], [CONSUMER_REGISTERS, OTHER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (ZERO, work, HAS_SINKS, HAS_LSE)),
            (_consumer, (ONE, work, HAS_SINKS, HAS_LSE)),
            (_consumer, (TWO, work, HAS_SINKS, HAS_LSE)),
            (_producer, (load, ROPE, CSR, SPLIT_Q, PAGE_SIZE, BOX, L2_BYTES)),
        ], [4, 4, PRODUCER_WARPS], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, OTHER_REGISTERS])  # fmt: skip
