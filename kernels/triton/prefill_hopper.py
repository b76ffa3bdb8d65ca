"""Prefill for sm_90 in Gluon, Triton's lower-level language: warps of different roles, persistent over the items.

Computes what ``prefill.py`` computes, for 192 x 128 without biases and soft-cap: in 16 bits, or in fp8 with values that
lie as columns (V^T). The functions of the mask (mask_visible, mask_tile_class) are put in front of this text
(``backends/triton/compiler.py``).

    CTA (one an SM): BLOCK_M query rows of one head, keys in tiles of BLOCK_N = 128
    2 or 3 x 4 warps    consumers of 64 rows     S = Q K^T by wgmma from shared memory, softmax and O in registers,
                                                 O += P V with P from registers
    4 warps             producer                 Q, K, V and rope by TMA; by cp.async what TMA cannot: see below

    shared memory            in 16 bits                  full (arrivals)     empty (arrivals)
    s_q, s_q_rope, s_item    BLOCK_M x 192 x 2, numbers  1 + bytes           one a consumer, after its last Q K^T
    s_k, s_rope, s_tile,     stages x 128 x 192 x 2,     1 + 128 + bytes     one a consumer
    s_scales                 in fp8 3 x 128 x 4 more
    s_v                      stages x 128 x 128 x 2      1 + bytes           one a consumer

The producer alone knows the schedule, the mask's classes of tiles and the page table. It finds the next item and loads
its first tiles while the consumers finish the one before; the item's numbers go with its queries, and beside each tile
of keys stands a word: its number, which consumers want it and have to mask it, and whether it is the item's last. A
CTA's first item is its own number, every further one comes from a counter in global memory: the list goes from long to
short, so the CTAs end together. Values come behind the next tile's keys.

Rope rows come in boxes of gcd(page size, BLOCK_N) rows, at least 8, where the first key lies at the beginning of one;
else row by row. Columns of bytes that do not begin at a multiple of 16 come word by word. What lies behind the last key
is hidden by select in the scores, and in the values overwritten with zeros by the consumers. What generic stores and
cp.async have written meets wgmma behind a proxy fence. Each arrival is one thread's, behind a barrier of its warpgroup.

In fp8 the scales of keys, of their rope and of values stand beside a tile. Scores are scaled in float32 before their
maxima; weights are multiplied by 2^8 before they are rounded; each tile's O is added in float32, for tensor cores cut
sums of fp8 products off. Measured on an H200: docs/perf-log.md.
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

from .prefill import HIDDEN, LN2, LOG2E, SCAN, SLOT_FIELDS, V_SCALE_OF_ROWS, VISIBLE, _class, _sequence

# Both were renamed after Triton 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
row_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
ROWS = gl.constexpr(64)  # of a consumer
PIECE = gl.constexpr(32)  # rows that the producer copies at a time where the copy engine cannot
PRODUCER_THREADS = gl.constexpr(128)
ITEM_FIELDS = gl.constexpr(8)
# Scales beside a tile of fp8 keys: of keys, of their rope, of values.
K_SCALE = gl.constexpr(0)
ROPE_SCALE = gl.constexpr(1)
V_SCALE = gl.constexpr(2)
SCALES = gl.constexpr(3)
# Weights of fp8 values count in 2^-WEIGHT_BITS.
WEIGHT_BITS = gl.constexpr(8)
# Where a column of bytes may begin for the copy engine.
COLUMN_ALIGNMENT = gl.constexpr(16)
# The word beside a tile of keys: the first two are a bit for each consumer; from TILE_SHIFT on the tile's number.
MASKED = gl.constexpr(1)
WANTED = gl.constexpr(8)
LAST = gl.constexpr(64)
TILE_SHIFT = gl.constexpr(7)


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
def _copy_columns(s_v, v, h, row, count, stride_v_h, stride_v_d):
    """Copy a tile of values that lie as columns of bytes and begin at any row, in words; garbage behind `count`."""
    V: gl.constexpr = s_v.shape[1]
    WORDS: gl.constexpr = s_v.shape[2] // 4
    by_word: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    offs_d = gl.arange(0, PIECE, layout=gl.SliceLayout(1, by_word))
    offs_w = gl.arange(0, WORDS, layout=gl.SliceLayout(0, by_word))
    pieces = s_v._reinterpret(gl.int32, [V // PIECE, PIECE, WORDS], gl.NVMMASharedLayout(128, 32, 2))
    # A word of the tile lies in two of memory; those without a value of this sequence may lie behind the end.
    first = row // 4 + offs_w
    end = row + count
    shift = row % 4 * 8
    at = v + h.to(gl.int64) * (stride_v_h // 4) + offs_d.to(gl.int64)[:, None] * (stride_v_d // 4) + first[None, :]
    for piece in range(gl.where(count > 0, V // PIECE, 0)):  # always the former; unrolled it would take many registers
        low = gl.load(at, mask=(first * 4 < end)[None, :], other=0)
        high = gl.load(at + 1, mask=(first * 4 + 4 < end)[None, :], other=0)
        both = (high.to(gl.int64) << 32) | (low.to(gl.int64) & 0xFFFFFFFF)
        pieces.index(piece).store((both >> shift).to(gl.int32))
        at += PIECE * (stride_v_d // 4).to(gl.int64)
    fence_async_shared()
    debug_barrier()


@gluon.jit
def _copy_scales(
    s_scales, slot, scales, table, b, position, row, count, flags,
    ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, ROPE_FP8: gl.constexpr, HAS_V_SCALE: gl.constexpr,
):  # fmt: skip
    """Copy the scales of the first `count` keys of a tile, which begins at `row` of k and at `position`."""
    _, k_scales, v_scale, rope_scales, _, stride_k_scales, stride_v_scale, stride_page, stride_t = scales
    n = gl.arange(0, s_scales.shape[1], layout=gl.BlockedLayout([1], [32], [4], [0]))
    inside = n < count
    at = (row + n).to(gl.int64)
    row_load(s_scales.index(slot * SCALES + K_SCALE), k_scales + at * stride_k_scales, mask=inside)
    if ROPE_FP8:
        if ROPE == "paged":
            page = gl.load(table + (position + n) // PAGE_SIZE, mask=inside, other=0)
            source = page.to(gl.int64) * stride_page + (position + n) % PAGE_SIZE * stride_t
        elif ROPE == "batched":
            source = b.to(gl.int64) * stride_page + (position + n).to(gl.int64) * stride_t
        else:
            source = at * stride_t
        row_load(s_scales.index(slot * SCALES + ROPE_SCALE), rope_scales + source, mask=inside)
    if HAS_V_SCALE:
        inside &= (flags & V_SCALE_OF_ROWS) != 0
        row_load(s_scales.index(slot * SCALES + V_SCALE), v_scale + at * stride_v_scale, mask=inside)


@gluon.jit
def _copy_rope(s_rope, rope, table, position, count, stride_rope_page, stride_rope_t, PAGE_SIZE: gl.constexpr):
    """Copy the first `count` rope rows of a tile, its first key at `position`, one by one."""
    BLOCK_N: gl.constexpr = s_rope.shape[0]
    ROPE_DIM: gl.constexpr = s_rope.shape[1]
    BYTES: gl.constexpr = s_rope.dtype.primitive_bitwidth // 8
    by_row: gl.constexpr = gl.BlockedLayout([1, 16 // BYTES], [8 // BYTES, 4 * BYTES], [4, 1], [1, 0])
    offs_n = gl.arange(0, PIECE, layout=gl.SliceLayout(1, by_row))
    offs_rope = gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, by_row))
    pieces = s_rope._reinterpret(s_rope.dtype, [BLOCK_N // PIECE, PIECE, ROPE_DIM], s_rope.layout)
    for piece in range(BLOCK_N // PIECE):
        n = piece * PIECE + offs_n
        inside = n < count
        page = gl.load(table + (position + n) // PAGE_SIZE, mask=inside, other=0)
        row = page.to(gl.int64) * stride_rope_page + ((position + n) % PAGE_SIZE) * stride_rope_t
        row_load(pieces.index(piece), rope + row[:, None] + offs_rope[None, :], mask=inside[:, None])


@gluon.jit
def _producer(
    tiles, barriers, maps, columns, pages, index, slots, counter, captures, scales, items, batch_size, num_heads,
    flags, rope_length,
    FP8: gl.constexpr, ROPE_FP8: gl.constexpr, HAS_V_SCALE: gl.constexpr, PAGED: gl.constexpr, BATCHED: gl.constexpr,
    CSR: gl.constexpr, SPLIT_Q: gl.constexpr, PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr, BLOCK_N: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr, L2_BYTES: gl.constexpr,
):  # fmt: skip
    s_item, s_tile, s_scales, s_q, s_q_rope, s_k, s_rope, s_v = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q_map, q_rope_map, k_map, v_map, rope_map = maps
    cu_seqlens_q, cu_seqlens_k, lengths, cache_offsets, start_positions, kv_lengths = index
    c0, c1, c2, c3 = captures
    rope, page_table, page_indptr, stride_rope_page, stride_rope_t, stride_table = pages
    v, stride_v_h, stride_v_d = columns
    NOPE: gl.constexpr = s_k.shape[3]
    V: gl.constexpr = s_v.shape[2] if FP8 else s_v.shape[3]
    ROPE_DIM: gl.constexpr = s_rope.shape[2]
    CONSUMERS: gl.constexpr = s_q.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    K_BYTES: gl.constexpr = NOPE * (s_k.dtype.primitive_bitwidth // 8)
    Q_BYTES: gl.constexpr = K_BYTES + ROPE_DIM * (s_rope.dtype.primitive_bitwidth // 8)
    V_BYTES: gl.constexpr = V * (s_v.dtype.primitive_bitwidth // 8)
    ROPE: gl.constexpr = "paged" if PAGED else ("batched" if BATCHED else "ragged")
    BOXES: gl.constexpr = BLOCK_N // BOX
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    s_boxes = s_rope._reinterpret(s_rope.dtype, [STAGES_K * BOXES, 1, BOX, ROPE_DIM], rope_map.layout)
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
        in_boxes = (offset % BOX == 0) & (PAGE_SIZE % BOX == 0) if PAGED else offset == offset

        n = _skip_hidden(items * 0, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N)
        following = item + gl.num_programs(0)
        waiting = n * 0 + 1
        held = n * 0 - 1  # the tile whose values come behind the next keys
        while (n < n_tiles) | (waiting > 0) | (held >= 0):
            j = n * BLOCK_N
            after = n
            if n < n_tiles:
                after = _skip_hidden(n + 1, n_tiles, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, BLOCK_N)
                word = n << TILE_SHIFT
                for part in gl.static_range(CONSUMERS):
                    lo = q_lo + part * ROWS
                    hi = gl.minimum(lo + ROWS - 1, q_hi)
                    own = _class(n, b, h, lo, hi, offset, n_keys, c0, c1, c2, c3, mask_tile_class, 0, BLOCK_N)
                    word |= gl.where(own == VISIBLE, 0, MASKED << part)
                    word |= gl.where((own != HIDDEN) & (lo <= q_hi), WANTED << part, 0)
                word |= gl.where(after < n_tiles, 0, LAST)
                slot = step % STAGES_K
                mbarrier.wait(k_empty.index(slot), (step // STAGES_K & 1) ^ 1)
                s_tile.index(slot).store(gl.full([1], 0, gl.int32, layout=one) + word)
                debug_barrier()
                mbarrier.expect(k_full.index(slot), BLOCK_N * Q_BYTES, pred=in_boxes)
                mbarrier.expect(k_full.index(slot), BLOCK_N * K_BYTES, pred=not in_boxes)
                tma_load(k_map, [k_row + j, h, 0], k_full.index(slot), s_k.index(slot))
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
                        tma_load(rope_map, [page, row, 0], k_full.index(slot), s_boxes.index(slot * BOXES + i))
                elif PAGED:
                    _copy_rope(
                        s_rope.index(slot), rope, table, offset + j, n_keys - j, stride_rope_page, stride_rope_t,
                        PAGE_SIZE,
                    )  # fmt: skip
                if FP8:
                    _copy_scales(
                        s_scales, slot, scales, table, b, offset + j, k_row + j, n_keys - j, flags,
                        ROPE, PAGE_SIZE, ROPE_FP8, HAS_V_SCALE,
                    )  # fmt: skip
                async_copy.mbarrier_arrive(k_full.index(slot), increment_count=False)
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
            if held >= 0:
                slot = step_v % STAGES_V
                row = k_row + held * BLOCK_N
                mbarrier.wait(v_empty.index(slot), (step_v // STAGES_V & 1) ^ 1)
                if not FP8:
                    mbarrier.expect(v_full.index(slot), BLOCK_N * V_BYTES)
                    tma_load(v_map, [row, h, 0], v_full.index(slot), s_v.index(slot))
                else:
                    if row % COLUMN_ALIGNMENT == 0:
                        mbarrier.expect(v_full.index(slot), BLOCK_N * V_BYTES)
                        tma_load(v_map, [h, 0, row], v_full.index(slot), s_v.index(slot))
                    else:
                        _copy_columns(s_v.index(slot), v, h, row, n_keys - held * BLOCK_N, stride_v_h, stride_v_d)
                        mbarrier.arrive(v_full.index(slot))
                step_v += 1
            if waiting > 0:
                waiting -= 1
                if gl.num_programs(0) < items:
                    following = gl.num_programs(0) + gl.atomic_add(counter, 1)
            held = gl.where(n < n_tiles, n, -1)
            n = after
        turn += 1
        item = following
    mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
    s_item.store(gl.full([ITEM_FIELDS], 0, gl.int32, layout=one))
    debug_barrier()
    mbarrier.arrive(q_full.index(0))
    async_copy.wait_group(0)


@gluon.jit
def _field(numbers, field, index: gl.constexpr):
    return gl.sum(gl.where(field == index, numbers, 0), 0)


@gluon.jit
def _receive_item(s_item, q_full, turn):
    """Return the numbers of the next item as `_send_item` wrote them."""
    # Every thread holds all the numbers, so that picking one costs no shuffle.
    everywhere: gl.constexpr = gl.BlockedLayout([ITEM_FIELDS], [32], [4], [0])
    field = gl.arange(0, ITEM_FIELDS, layout=everywhere)
    mbarrier.wait(q_full.index(0), turn & 1)
    numbers = s_item.load(everywhere)
    return (
        _field(numbers, field, 0), _field(numbers, field, 1), _field(numbers, field, 2), _field(numbers, field, 3),
        _field(numbers, field, 4), _field(numbers, field, 5), _field(numbers, field, 6),
    )  # fmt: skip


@gluon.jit
def _zero_values(s_v, count, TRANSPOSED: gl.constexpr):
    """Write zeros behind the first `count` values of a tile: zero times NaN is NaN. All consumers write the same."""
    WIDTH: gl.constexpr = 16 * 8 // s_v.dtype.primitive_bitwidth
    by_row: gl.constexpr = gl.BlockedLayout([1, WIDTH], [WIDTH // 4, 128 // WIDTH], [4, 1], [1, 0])
    offs_n = gl.arange(0, PIECE, layout=gl.SliceLayout(1, by_row))[:, None]
    for piece in gl.static_range(s_v.shape[0] // PIECE):
        if TRANSPOSED:
            inside = gl.arange(0, s_v.shape[1], layout=gl.SliceLayout(0, by_row))[None, :] < count
        else:
            inside = piece * PIECE + offs_n < count
        part = s_v.slice(piece * PIECE, PIECE, 0)
        part.store(gl.where(inside, part.load(by_row), 0.0))
    fence_async_shared()
    debug_barrier()


@gluon.jit
def _consumer(
    WARPGROUP: gl.constexpr,
    tiles, barriers, outputs, sinks, scales, captures, flags, scale,
    FP8: gl.constexpr, ROPE_FP8: gl.constexpr, PRESCALED: gl.constexpr, HAS_V_SCALE: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    s_item, s_tile, s_scales, s_q, s_q_rope, s_k, s_rope, s_v = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    c0, c1, c2, c3 = captures
    output, lse, stride_output_t, stride_output_h, stride_lse_t, stride_lse_h = outputs
    q_scale, _, v_scale, _, stride_q_scale, _, stride_v_scale, _, _ = scales
    NOPE: gl.constexpr = s_q.shape[3]
    ROPE_DIM: gl.constexpr = s_q_rope.shape[3]
    V: gl.constexpr = s_v.shape[2] if FP8 else s_v.shape[3]
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    DEPTH: gl.constexpr = 32 if FP8 else 16  # of one instruction
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, DEPTH])
    rope_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32 if ROPE_FP8 else 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, DEPTH])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores))
    by_key: gl.constexpr = gl.SliceLayout(0, scores)
    cols = gl.arange(0, BLOCK_N, layout=by_key)
    # A lane's columns lie together: 16 bytes a store of 16-bit elements.
    wide: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [ROWS, V],
    )  # fmt: skip
    out_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    out_d = gl.arange(0, V, layout=gl.SliceLayout(0, wide))
    first = WARPGROUP * ROWS
    factor = scale * LOG2E
    if FP8:
        v_scale_of_rows = HAS_V_SCALE and (flags & V_SCALE_OF_ROWS) != 0
    q_tile = s_q.index(WARPGROUP).reshape([ROWS, NOPE])
    q_rope_tile = s_q_rope.index(WARPGROUP).reshape([ROWS, ROPE_DIM])
    turn = gl.program_id(0) * 0
    step = turn
    b, h, t_first, q_lo, count, offset, n_keys = _receive_item(s_item, q_full, turn)
    while count > 0:
        lo = q_lo + first
        debug_barrier()
        mbarrier.arrive(q_empty.index(0), pred=n_keys == 0)
        if FP8:
            # Maxima are taken before the scale: a negative one turns the scores.
            q_factor = gl.load(
                q_scale + (t_first + first + rows).to(gl.int64) * stride_q_scale, mask=first + rows < count, other=0.0
            )
            signed = (q_factor if ROPE_FP8 or PRESCALED else q_factor * 0.0 + 1.0) * factor
            turned = gl.min(signed, 0) < 0.0
            row_factor = gl.maximum(gl.abs(signed), 1e-30)
        m_i = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores))
        l_i = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, scores))
        acc = gl.full([ROWS, V], 0.0, gl.float32, layout=values)
        more = n_keys > 0
        while more:
            slot = step % STAGES_K
            mbarrier.wait(k_full.index(slot), step // STAGES_K & 1)
            fence_async_shared()
            word = gl.sum(s_tile.index(slot).load(one), 0)
            wanted = (word & (WANTED << WARPGROUP)) != 0
            slot_v = step % STAGES_V if STAGES_V > 1 else word >> 30
            if wanted:
                zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=scores)
                keys = s_k.index(slot).reshape([BLOCK_N, NOPE]).permute((1, 0))
                s = warpgroup_mma(q_tile, keys, zero, use_acc=False, is_async=True)
                ropes = s_rope.index(slot).permute((1, 0))
                if PRESCALED:
                    # One sum of products of two widths; the layouts differ by name alone.
                    s = gl.convert_layout(warpgroup_mma_wait(0, deps=[s]), rope_scores)
                    s = warpgroup_mma(q_rope_tile, ropes, s, is_async=True)
                    s = gl.convert_layout(warpgroup_mma_wait(0, deps=[s]), scores)
                elif FP8:
                    zero_r = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=rope_scores)
                    s_r = warpgroup_mma(q_rope_tile, ropes, zero_r, use_acc=False, is_async=True)
                    s, s_r = warpgroup_mma_wait(0, deps=[s, s_r])
                    s_r = gl.convert_layout(s_r, scores)
                else:
                    s = warpgroup_mma(q_rope_tile, ropes, s, is_async=True)
                    s = warpgroup_mma_wait(0, deps=[s])
                if FP8:
                    s = s * s_scales.index(slot * SCALES + K_SCALE).load(by_key)[None, :]
                    if ROPE_FP8:
                        s += s_r * s_scales.index(slot * SCALES + ROPE_SCALE).load(by_key)[None, :]
                    elif not PRESCALED:
                        s = s * q_factor[:, None] + s_r
                    if turned:
                        s = gl.where(signed < 0.0, -1.0, 1.0)[:, None] * s
                if not (FP8 and HAS_V_SCALE):
                    debug_barrier()
                    mbarrier.arrive(k_empty.index(slot))
                mbarrier.arrive(q_empty.index(0), pred=(word & LAST) != 0)

                if (word & (MASKED << WARPGROUP)) != 0:
                    col = (word >> TILE_SHIFT) * BLOCK_N + cols
                    seen = mask_visible(b, h, (lo + rows)[:, None], (offset + col)[None, :], c0, c1, c2, c3)
                    s = gl.where(seen & (col < n_keys)[None, :], s, float("-inf"))
                if FP8:
                    m_new = gl.maximum(m_i, gl.max(s, 1) * row_factor)
                    base = gl.where(m_new == float("-inf"), 0.0, m_new)
                    p = gl.exp2(s * row_factor[:, None] - (base - WEIGHT_BITS)[:, None])
                else:
                    m_new = gl.maximum(m_i, gl.max(s, 1) * factor)
                    base = gl.where(m_new == float("-inf"), 0.0, m_new)
                    p = gl.exp2(s * factor - base[:, None])
                correction = gl.exp2(m_i - base)
                l_i = l_i * correction + gl.sum(p, 1)
                m_i = m_new
                acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, values))[:, None]
                unit = 1.0
                if FP8 and HAS_V_SCALE:
                    if v_scale_of_rows:
                        # A value's scale goes to its weight, in units of the tile's largest.
                        v_scales = s_scales.index(slot * SCALES + V_SCALE).load(by_key)
                        largest = gl.max(gl.abs(v_scales), 0)
                        unit = gl.where(largest == 0.0, 1.0, largest)
                        p = p * (v_scales / unit)[None, :]
                    debug_barrier()
                    mbarrier.arrive(k_empty.index(slot))
                weights = gl.convert_layout(p.to(s_v.dtype), gl.DotOperandLayout(0, values, 4 if FP8 else 2))

                mbarrier.wait(v_full.index(slot_v), step // STAGES_V & 1)
                tile = s_v.index(slot_v).reshape([V, BLOCK_N] if FP8 else [BLOCK_N, V])
                if (word >> TILE_SHIFT) * BLOCK_N + BLOCK_N > n_keys:
                    _zero_values(tile, n_keys - (word >> TILE_SHIFT) * BLOCK_N, FP8)
                if FP8:
                    # A product of its own: tensor cores cut sums of fp8 products off, which long rows would pay for.
                    none = gl.full([ROWS, V], 0.0, gl.float32, layout=values)
                    product = warpgroup_mma(weights, tile.permute((1, 0)), none, use_acc=False, is_async=True)
                    acc += warpgroup_mma_wait(0, deps=[product]) * unit
                else:
                    acc = warpgroup_mma(weights, tile, acc, is_async=True)
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

        if HAS_SINKS:
            sink = gl.load(sinks + h) * LOG2E
            m_new = gl.maximum(m_i, sink)
            base = gl.where(m_new == float("-inf"), 0.0, m_new)
            correction = gl.exp2(m_i - base)
            l_i = l_i * correction + gl.exp2(sink - base + (WEIGHT_BITS if FP8 else 0))
            acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, values))[:, None]
            m_i = m_new
        empty = l_i == 0.0
        inverse = gl.where(empty, 0.0, 1.0 / l_i)
        if FP8 and HAS_V_SCALE:
            inverse *= gl.load(v_scale + h * stride_v_scale, mask=not v_scale_of_rows, other=1.0)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, values))[:, None]
        at_output = output + h.to(gl.int64) * stride_output_h
        target = at_output + (t_first + first + out_m).to(gl.int64)[:, None] * stride_output_t + out_d[None, :]
        out = gl.convert_layout(acc.to(output.dtype.element_ty), wide)
        gl.store(target, out, mask=(first + out_m < count)[:, None])
        if HAS_LSE:
            natural = gl.where(empty, float("-inf"), (m_i + gl.log2(l_i) - (WEIGHT_BITS if FP8 else 0)) * LN2)
            at_lse = lse + h.to(gl.int64) * stride_lse_h
            gl.store(at_lse + (t_first + first + rows).to(gl.int64) * stride_lse_t, natural, mask=first + rows < count)
        turn += 1
        b, h, t_first, q_lo, count, offset, n_keys = _receive_item(s_item, q_full, turn)


@gluon.jit
def prefill(
    output,
    lse,
    q_map,
    q_rope_map,
    k_map,
    v_map,
    rope_map,
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
    stride_v_h,
    stride_v_d,
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
    HAS_V_SCALE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    NOPE: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    V: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
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
    rope_rows: gl.constexpr = gl.NVMMASharedLayout(64 if ROPE_FP8 else 128, 8 if ROPE_FP8 else 16, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_q = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, 1, NOPE], q_map.layout)
    s_q_rope = gl.allocate_shared_memory(rope_dtype, [CONSUMERS, ROWS, 1, ROPE_DIM], q_rope_map.layout)
    s_k = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, 1, NOPE], k_map.layout)
    s_rope = gl.allocate_shared_memory(rope_dtype, [STAGES_K, BLOCK_N, ROPE_DIM], rope_rows)
    if FP8:
        s_v = gl.allocate_shared_memory(dtype, [STAGES_V, 1, V, BLOCK_N], v_map.layout)
        s_scales = gl.allocate_shared_memory(gl.float32, [STAGES_K * SCALES, BLOCK_N], plain)
    else:
        s_v = gl.allocate_shared_memory(dtype, [STAGES_V, BLOCK_N, 1, V], v_map.layout)
        s_scales = gl.allocate_shared_memory(gl.float32, [1, 1], plain)
    s_item = gl.allocate_shared_memory(gl.int32, [ITEM_FIELDS], plain)
    s_tile = gl.allocate_shared_memory(gl.int32, [STAGES_K, 1], plain)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], barrier)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=CONSUMERS)
    for i in gl.static_range(STAGES_K):
        mbarrier.init(k_full.index(i), count=PRODUCER_THREADS + 1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES_V):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)

    PAGED: gl.constexpr = ROPE == "paged"
    BATCHED: gl.constexpr = ROPE == "batched"
    tiles = (s_item, s_tile, s_scales, s_q, s_q_rope, s_k, s_rope, s_v)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    captures = (c0, c1, c2, c3)
    maps = (q_map, q_rope_map, k_map, v_map, rope_map)
    index = (cu_seqlens_q, cu_seqlens_k, lengths, cache_offsets, start_positions, kv_lengths)
    outputs = (output, lse, stride_output_t, stride_output_h, stride_lse_t, stride_lse_h)
    columns = (v, stride_v_h, stride_v_d)
    pages = (rope, page_table, page_indptr, stride_rope_page, stride_rope_t, stride_table)
    scales = (
        q_scale, k_scales, v_scale, rope_scales, stride_q_scale, stride_k_scales, stride_v_scale,
        stride_rope_scales_page, stride_rope_scales_t,
    )  # fmt: skip
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    TWO: gl.constexpr = 2
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consumer, (
                ZERO, tiles, barriers, outputs, sinks, scales, captures, flags, scale,
                FP8, ROPE_FP8, PRESCALED, HAS_V_SCALE, HAS_SINKS, HAS_LSE, BLOCK_N, STAGES_K, STAGES_V,
            )),
            (_consumer, (
                ONE, tiles, barriers, outputs, sinks, scales, captures, flags, scale,
                FP8, ROPE_FP8, PRESCALED, HAS_V_SCALE, HAS_SINKS, HAS_LSE, BLOCK_N, STAGES_K, STAGES_V,
            )),
            (_consumer, (
                TWO, tiles, barriers, outputs, sinks, scales, captures, flags, scale,
                FP8, ROPE_FP8, PRESCALED, HAS_V_SCALE, HAS_SINKS, HAS_LSE, BLOCK_N, STAGES_K, STAGES_V,
            )),
            (_producer, (
                tiles, barriers, maps, columns, pages, index, slots, counter, captures, scales, items, batch_size,
                num_heads, flags, rope_length, FP8, ROPE_FP8, HAS_V_SCALE, PAGED, BATCHED, CSR, SPLIT_Q, PAGE_SIZE, BOX,
                BLOCK_N, STAGES_K, STAGES_V, L2_BYTES,
            )),
        ], [4, 4, 4], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (
                ZERO, tiles, barriers, outputs, sinks, scales, captures, flags, scale,
                FP8, ROPE_FP8, PRESCALED, HAS_V_SCALE, HAS_SINKS, HAS_LSE, BLOCK_N, STAGES_K, STAGES_V,
            )),
            (_consumer, (
                ONE, tiles, barriers, outputs, sinks, scales, captures, flags, scale,
                FP8, ROPE_FP8, PRESCALED, HAS_V_SCALE, HAS_SINKS, HAS_LSE, BLOCK_N, STAGES_K, STAGES_V,
            )),
            (_producer, (
                tiles, barriers, maps, columns, pages, index, slots, counter, captures, scales, items, batch_size,
                num_heads, flags, rope_length, FP8, ROPE_FP8, HAS_V_SCALE, PAGED, BATCHED, CSR, SPLIT_Q, PAGE_SIZE, BOX,
                BLOCK_N, STAGES_K, STAGES_V, L2_BYTES,
            )),
        ], [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
