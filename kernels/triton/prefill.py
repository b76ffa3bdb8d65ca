"""Attention of new queries over a ragged batch of keys, with the rotary part of the keys read from the paged cache.

    s = c (q_nope k^T + q_rope rope^T)    p = exp2(s - max s)    out = p v / sum p    lse = ln 2 (max s + log2 sum p)

A program owns BLOCK_M query rows of one head and walks the keys in tiles of BLOCK_N:

    q_nope [BLOCK_M, 128 (+ 64)]  k    [BLOCK_N, 128 (+ 64)]  }  accumulate into one score tile, so that no key of
    q_rope [BLOCK_M, 64]          rope [BLOCK_N, 64]          }  q_depth columns is ever made
    acc    [BLOCK_M, V]           v    [BLOCK_N, V]

Key tiles are taken in runs of one class (hidden, partial, visible; MASK_CLASS): hidden runs are stepped over, visible
runs load and score without a mask. Partial tiles hide by select after the product, so that garbage in k is harmless;
rows of v past n_keys are loaded as zeros. Tile sizes depend on dtype, dims and architecture alone: a row's bits do not
depend on the rest of the batch.

Order of work: programs are dealt in the order of their ids. Sequences come longest first (`schedule`), inside one
sequence groups of heads whose keys and values fit in the L2 cache, inside a group query tiles from the last (most
keys under a causal mask) with heads innermost.

fp8 comes with scales, which meet float32 sums: those of a row of rope and of a row of k the two parts of a score, that
of a row of q the exponent's factor, that of a head of v the output. Values that lie as columns (V^T) are multiplied in
fp8 by p times 2^8 (e4m3fn; 2^7 in e4m3fnuz), so that small p survive; each tile's product is added in float32, since
tensor cores cut sums of fp8 off. Values that lie as rows, which tensor cores do not take in fp8, become float16 on the
way. With a scale of each row of v, p is multiplied by that over the largest so far, which acc then counts in. Where the
matrix unit has no fp8, bytes are decoded to float16, exactly.

Numerics: scores and sums in float32, base 2, with the scale (not negative) folded into the exponent's
multiply-add. Budget of a full tile: 2 BLOCK_M BLOCK_N (q_depth + V) FLOPs against BLOCK_N (q_depth + V) elements from
L2 and BLOCK_M BLOCK_N exponentials; bound by the tensor cores and the power limit (docs/perf-log.md has measurements).
"""

import triton
import triton.language as tl

from .formats import narrow, widen
from .gather import search

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
VISIBLE = tl.constexpr(2)
# Bits of `flags`: which optional index tensors a call brings (another tensor's address stands for one that is absent).
HAS_CACHE_OFFSETS = tl.constexpr(1)
HAS_START_POSITIONS = tl.constexpr(2)
HAS_KV_LENGTHS = tl.constexpr(4)
LENGTHS_INCLUDE_NEW = tl.constexpr(8)
V_SCALE_OF_ROWS = tl.constexpr(16)
# Scales of a key: columns of the tile that they are loaded in.
ROPE_SCALE = tl.constexpr(0)
K_SCALE = tl.constexpr(1)
KINDS = tl.constexpr(4)
# Numbers of a slot: sequence, slot of its first tile, and what `_sequence` returns.
SLOT_FIELDS = tl.constexpr(8)
# Tiles classified at a time in the search for the end of a run.
SCAN = tl.constexpr(128)


@triton.jit
def _sequence(
    b,
    cu_seqlens_q,
    cu_seqlens_k,
    lengths,
    cache_offsets,
    start_positions,
    kv_lengths,
    flags,
    rope_length,
    ROPE: tl.constexpr,
):
    """Return the first row and count of the queries, the first row and count of the keys, and both first positions."""
    q_row = tl.load(cu_seqlens_q + b)
    new = tl.load(cu_seqlens_q + b + 1) - q_row
    k_row = tl.load(cu_seqlens_k + b)
    rows = tl.load(cu_seqlens_k + b + 1) - k_row
    offset = tl.load(cache_offsets + b, mask=(flags & HAS_CACHE_OFFSETS) != 0, other=0)
    if ROPE == "paged":
        known = tl.load(lengths + b) + tl.where((flags & LENGTHS_INCLUDE_NEW) != 0, 0, new)
    elif ROPE == "batched":
        known = new * 0 + rope_length
    else:
        known = rows
    overridden = (flags & HAS_KV_LENGTHS) != 0
    length = tl.where(overridden, tl.load(kv_lengths + b, mask=overridden, other=0), known)
    start = (length if ROPE == "ragged" else known) - new
    given = (flags & HAS_START_POSITIONS) != 0
    start = tl.where(given, tl.load(start_positions + b, mask=given, other=0), start)
    n_keys = tl.minimum(rows, tl.maximum(length - offset, 0))
    return q_row, new, k_row, n_keys, start, offset


@triton.jit
def schedule(
    slots,
    cu_seqlens_q,
    cu_seqlens_k,
    lengths,
    cache_offsets,
    start_positions,
    kv_lengths,
    flags,
    rope_length,
    batch_size,
    num_slots,
    steps,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write what a program has to know of each query tile of a batch: SLOT_FIELDS numbers, read in one step.

    Sequences come by their keys, most first; a batch beyond BLOCK is ordered block by block, which keeps the long ones
    of each block together. Slots behind the last tile have no queries. One program; behind the slots it keeps the order
    [B], the tiles before each sequence of the order [B + 1], and a zero for a persistent kernel to count in.
    """
    order = slots + num_slots.to(tl.int64) * SLOT_FIELDS
    first_tile = order + batch_size
    offs = tl.arange(0, BLOCK)
    total = 0
    for begin in range(0, batch_size, BLOCK):
        b = begin + offs
        inside = b < batch_size
        safe = tl.where(inside, b, batch_size - 1)
        _, _, _, n_keys, _, _ = _sequence(
            safe, cu_seqlens_q, cu_seqlens_k, lengths, cache_offsets, start_positions, kv_lengths, flags,
            rope_length, ROPE,
        )  # fmt: skip
        n_keys = tl.where(inside, n_keys, -1)
        ranked = tl.sort(((2147483646 - n_keys.to(tl.int64)) << 32) | offs.to(tl.int64))
        b = begin + (ranked & 0xFFFFFFFF).to(tl.int32)
        inside = b < batch_size
        new = tl.load(cu_seqlens_q + b + 1, mask=inside, other=0) - tl.load(cu_seqlens_q + b, mask=inside, other=0)
        tiles = (new + (BLOCK_M - 1)) // BLOCK_M
        tl.store(order + begin + offs, b, mask=inside)
        tl.store(first_tile + begin + offs, total + tl.cumsum(tiles, 0) - tiles, mask=inside)
        total += tl.sum(tiles, 0)
    tl.store(first_tile + batch_size, total)
    tl.store(first_tile + batch_size + 1, 0)

    tl.debug_barrier()
    for begin in range(0, num_slots, BLOCK):
        slot = begin + offs
        used = slot < total
        rank = search(slot, first_tile, batch_size, steps, used)
        b = tl.load(order + rank, mask=used, other=0)
        first = tl.load(first_tile + rank, mask=used, other=0)
        q_row, new, k_row, n_keys, start, offset = _sequence(
            b, cu_seqlens_q, cu_seqlens_k, lengths, cache_offsets, start_positions, kv_lengths, flags,
            rope_length, ROPE,
        )  # fmt: skip
        at = slots + slot.to(tl.int64) * SLOT_FIELDS
        inside = slot < num_slots
        tl.store(at, b, mask=inside)
        tl.store(at + 1, first, mask=inside)
        tl.store(at + 2, q_row, mask=inside)
        tl.store(at + 3, tl.where(used, new, 0), mask=inside)
        tl.store(at + 4, k_row, mask=inside)
        tl.store(at + 5, n_keys, mask=inside)
        tl.store(at + 6, start, mask=inside)
        tl.store(at + 7, offset, mask=inside)


@triton.jit
def _dot(a, b, acc, INTERPRETED: tl.constexpr):
    # Triton's interpreter multiplies bfloat16 wrongly; float32 operands are right there.
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _add_values(acc, p, r_v, INTERPRETED: tl.constexpr):
    p = narrow(p, r_v.dtype, INTERPRETED)
    if r_v.dtype.is_fp8():
        # A product of its own: tensor cores cut sums of fp8 products off, which long rows would pay for.
        return acc + tl.dot(p, r_v, max_num_imprecise_acc=p.shape[1])
    return _dot(p, r_v, acc, INTERPRETED)


@triton.jit
def _turned(x, sign, INTERPRETED: tl.constexpr):
    return narrow(x.to(tl.float32) * sign, x.dtype, INTERPRETED)


@triton.jit
def _rows(base, offs_n, stride, offs_d, inside, MASKED: tl.constexpr):
    """Load [BLOCK_N, width] rows; those not inside are zero."""
    at = base + offs_n[:, None] * stride + offs_d[None, :]
    if MASKED:
        return tl.load(at, mask=inside[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def _values(at_v, v_map, h, k_row, j, offs_n, offs_v, stride_v_t, stride_v_d, inside, MASKED: tl.constexpr):
    """Load [BLOCK_N, V] values, which may lie as columns; those not inside are zero."""
    if v_map is not None:
        columns = v_map.load([h, 0, k_row + j]).reshape(offs_v.shape[0], offs_n.shape[0])
        if MASKED:
            codes = tl.where(inside[None, :], columns.to(tl.uint8, bitcast=True), 0)
            columns = codes.to(columns.dtype, bitcast=True)
        r_v = tl.trans(columns)
    elif stride_v_d is not None:
        at = at_v + j + offs_v[:, None] * stride_v_d + offs_n[None, :]
        r_v = tl.trans(tl.load(at, mask=inside[None, :], other=0.0))
    else:
        r_v = _rows(at_v + j.to(tl.int64) * stride_v_t, offs_n, stride_v_t, offs_v, inside, MASKED)
    return r_v


@triton.jit
def _class(
    n,
    b,
    h,
    q_lo,
    q_hi,
    offset,
    n_keys,
    c0,
    c1,
    c2,
    c3,
    MASK_CLASS: tl.constexpr,
    BIASES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first = n * BLOCK_N
    end = tl.minimum(first + BLOCK_N, n_keys)
    kind = MASK_CLASS(b, h, q_lo, q_hi, offset + first, offset + end - 1, c0, c1, c2, c3)
    visible = (kind == VISIBLE) & (first + BLOCK_N <= n_keys) & (BIASES == 0)
    return tl.where(kind == HIDDEN, HIDDEN, tl.where(visible, VISIBLE, PARTIAL))


@triton.jit
def prefill(
    output,
    lse,
    q,
    q_rope,
    k,
    v,
    v_map,
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
    bias0,
    bias1,
    q_scale,
    k_scales,
    v_scale,
    rope_scales,
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
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_rope_page,
    stride_rope_t,
    stride_table,
    stride_v_d,
    stride_q_scale,
    stride_k_scales,
    stride_v_scale,
    stride_rope_scales_page,
    stride_rope_scales_t,
    stride_bias0_b,
    stride_bias0_h,
    stride_bias0_q,
    rows_bias0,
    cols_bias0,
    stride_bias1_b,
    stride_bias1_h,
    stride_bias1_q,
    rows_bias1,
    cols_bias1,
    scale,
    softcap,
    MASK_VISIBLE: tl.constexpr,
    MASK_CLASS: tl.constexpr,
    MASK_BIAS: tl.constexpr,
    BIASES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRESCALED: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_TAIL: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    L2_BYTES: tl.constexpr,
    FNUZ: tl.constexpr,
    PV_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    OPERAND: tl.constexpr = tl.float16 if k.dtype.element_ty == tl.uint8 else k.dtype.element_ty
    P_EXPONENT: tl.constexpr = (7 if FNUZ else 8) if PV_FP8 else 0
    # Which sequence, head and query tile.
    item = tl.program_id(0)
    if batch_size > 1:
        at_slot = slots + (item // num_heads).to(tl.int64) * SLOT_FIELDS
        b = tl.load(at_slot)
        first_slot = tl.load(at_slot + 1)
        q_row = tl.load(at_slot + 2)
        new = tl.load(at_slot + 3)
        k_row = tl.load(at_slot + 4)
        n_keys = tl.load(at_slot + 5)
        start = tl.load(at_slot + 6)
        offset = tl.load(at_slot + 7)
    else:
        b = item * 0
        first_slot = item * 0
        q_row, new, k_row, n_keys, start, offset = _sequence(
            b, cu_seqlens_q, cu_seqlens_k, lengths, cache_offsets, start_positions, kv_lengths, flags,
            rope_length, ROPE,
        )  # fmt: skip
    tiles = tl.cdiv(new, BLOCK_M)
    item -= first_slot * num_heads
    if item >= tiles * num_heads:
        return
    bytes_per_key: tl.constexpr = (NOPE + NOPE_TAIL + V) * (k.dtype.element_ty.primitive_bitwidth // 8)
    group_size = tl.minimum(tl.maximum(L2_BYTES // bytes_per_key // tl.maximum(n_keys, 1), 1), num_heads)
    group = item // (tiles * group_size)
    item -= group * tiles * group_size
    width = tl.minimum(group_size, num_heads - group * group_size)
    tile = tiles - 1 - item // width
    h = group * group_size + item % width

    # Query tile.
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_nope = tl.arange(0, NOPE)
    offs_rope = tl.arange(0, ROPE_DIM)
    offs_v = tl.arange(0, V)
    m_first = tile * BLOCK_M
    m_inside = m_first + offs_m < new
    t_first = (q_row + m_first).to(tl.int64)
    head = h.to(tl.int64)
    at_q = q + t_first * stride_q_t + head * stride_q_h
    if q_rope is not None:
        at_q_rope = q_rope + t_first * stride_q_rope_t + head * stride_q_rope_h
    else:
        at_q_rope = at_q + (NOPE + NOPE_TAIL)
    r_q = widen(_rows(at_q, offs_m, stride_q_t, offs_nope, m_inside, True), OPERAND, FNUZ)
    r_q_rope = _rows(
        at_q_rope, offs_m, stride_q_rope_t if q_rope is not None else stride_q_t, offs_rope, m_inside, True
    )
    r_q_rope = widen(r_q_rope, OPERAND, FNUZ)
    if NOPE_TAIL > 0:
        offs_tail = tl.arange(0, NOPE_TAIL)
        r_q_tail = widen(_rows(at_q + NOPE, offs_m, stride_q_t, offs_tail, m_inside, True), OPERAND, FNUZ)
    factor = scale if SOFTCAP else scale * LOG2E
    r_factor = factor  # of a row, in the shape of scores
    if q_scale is not None:
        r_q_scale = tl.load(q_scale + (t_first + offs_m) * stride_q_scale, mask=m_inside, other=0.0)
        factor = factor * (r_q_scale if PRESCALED or q_rope is None else tl.full([BLOCK_M], 1.0, tl.float32))
        # Maxima are taken before the scale: a negative one turns the queries.
        sign = tl.where(factor < 0, -1.0, 1.0)[:, None]
        factor = tl.abs(factor)
        r_factor = factor[:, None]
        r_q = _turned(r_q, sign, INTERPRETED)
        r_q_rope = _turned(r_q_rope, sign, INTERPRETED)
        if NOPE_TAIL > 0:
            r_q_tail = _turned(r_q_tail, sign, INTERPRETED)

    # Bases of this sequence and head.
    at_k = k + k_row.to(tl.int64) * stride_k_t + head * stride_k_h
    at_v = v + k_row.to(tl.int64) * (1 if stride_v_d is not None else stride_v_t) + head * stride_v_h
    if ROPE == "paged":
        if page_indptr is not None:
            table = page_table + tl.load(page_indptr + b)
        else:
            table = page_table + b.to(tl.int64) * stride_table
    else:
        # The first key's row of a rope that lies as k does, or of one with rows for every position.
        rope_row = offset.to(tl.int64) if ROPE == "batched" else k_row.to(tl.int64)
        at_rope = rope + rope_row * stride_rope_t
        if rope_scales is not None:
            at_rope_scales = rope_scales + rope_row * stride_rope_scales_t
        if ROPE == "batched":
            at_rope += b.to(tl.int64) * stride_rope_page
            if rope_scales is not None:
                at_rope_scales += b.to(tl.int64) * stride_rope_scales_page
    if k_scales is not None:
        at_k_scales = k_scales + k_row.to(tl.int64) * stride_k_scales
    if v_scale is not None:
        v_scale_of_rows = (flags & V_SCALE_OF_ROWS) != 0
        at_v_scale = v_scale + tl.where(v_scale_of_rows, k_row, h).to(tl.int64) * stride_v_scale
        v_unit = tl.load(at_v_scale, mask=not v_scale_of_rows, other=0.0)  # acc counts in it

    kinds = tl.arange(0, KINDS)[None, :]
    # The copy engine reads from multiples of 16 bytes; columns of values that begin elsewhere are loaded.
    by_map = (k_row % 16 == 0) if v_map is not None else False

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V], tl.float32)
    q_lo = start + m_first
    q_hi = start + tl.minimum(m_first + BLOCK_M, new) - 1
    n_tiles = tl.cdiv(n_keys, BLOCK_N)
    n = 0
    while n < n_tiles:
        kind = _class(n, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, MASK_CLASS, BIASES, BLOCK_N)
        end = n_tiles
        at = n + 1
        while at < end:
            ahead = at + tl.arange(0, SCAN)
            others = _class(ahead, b, h, q_lo, q_hi, offset, n_keys, c0, c1, c2, c3, MASK_CLASS, BIASES, BLOCK_N)
            end = tl.minimum(end, tl.min(tl.where(others != kind, ahead, n_tiles), 0))
            at += SCAN
        for BY_MAP in tl.static_range(0, 2 if v_map is not None else 1):
            for MASKED in tl.static_range(0, 2):
                here = (kind == (PARTIAL if MASKED else VISIBLE)) & (by_map == (BY_MAP == 1))
                last = tl.where(here, end, n)
                for i in range(n, last):
                    j = i * BLOCK_N
                    key = j + offs_n
                    inside = key < n_keys
                    j64 = j.to(tl.int64)
                    r_k = _rows(at_k + j64 * stride_k_t, offs_n, stride_k_t, offs_nope, inside, MASKED)
                    r_k = widen(r_k, OPERAND, FNUZ)
                    if ROPE == "paged":
                        position = offset + key
                        if MASKED:
                            page = tl.load(table + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
                        else:
                            page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
                        slot = position % PAGE_SIZE
                        r_rope = _rows(
                            rope, page * stride_rope_page + slot * stride_rope_t, 1, offs_rope, inside, MASKED
                        )
                        if rope_scales is not None:
                            where_rope_scale = (
                                rope_scales + page * stride_rope_scales_page + slot * stride_rope_scales_t
                            )
                    else:
                        r_rope = _rows(at_rope + j64 * stride_rope_t, offs_n, stride_rope_t, offs_rope, inside, MASKED)
                        if rope_scales is not None:
                            where_rope_scale = at_rope_scales + key * stride_rope_scales_t
                    r_rope = widen(r_rope, r_q_rope.dtype, FNUZ)
                    r_v = _values(
                        at_v,
                        v_map if BY_MAP == 1 else None,
                        h,
                        k_row,
                        j,
                        offs_n,
                        offs_v,
                        stride_v_t,
                        stride_v_d,
                        inside,
                        MASKED,
                    )
                    if not PV_FP8:
                        r_v = widen(r_v, tl.float16, FNUZ)

                    if rope_scales is not None or k_scales is not None:
                        # One load for all scales of a tile's keys: smaller ones Triton repeats in every thread that
                        # needs an element.
                        if k_scales is not None:
                            where_scale = (at_k_scales + key * stride_k_scales)[:, None]
                            if rope_scales is not None:
                                where_scale = tl.where(kinds == ROPE_SCALE, where_rope_scale[:, None], where_scale)
                        else:
                            where_scale = where_rope_scale[:, None]
                        wanted = inside[:, None] & (kinds <= K_SCALE)
                        key_scales = tl.load(tl.broadcast_to(where_scale, [BLOCK_N, KINDS]), mask=wanted, other=0.0)
                        pairs, _ = tl.split(tl.trans(tl.reshape(key_scales, [BLOCK_N, 2, 2]), 0, 2, 1))
                        r_rope_scale, r_k_scale = tl.split(pairs)

                    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                    s = _dot(r_q_rope, tl.trans(r_rope), zeros, INTERPRETED)
                    if rope_scales is not None:
                        s *= r_rope_scale[None, :]
                    apart: tl.constexpr = (
                        k_scales is not None and not PRESCALED
                    )  # the rope has no part in the scales of k
                    nope = _dot(r_q, tl.trans(r_k), zeros if apart else s, INTERPRETED)
                    if NOPE_TAIL > 0:
                        r_k_tail = _rows(at_k + NOPE + j64 * stride_k_t, offs_n, stride_k_t, offs_tail, inside, MASKED)
                        nope = _dot(r_q_tail, tl.trans(widen(r_k_tail, OPERAND, FNUZ)), nope, INTERPRETED)
                    if k_scales is not None:
                        nope *= r_k_scale[None, :]
                    if apart:
                        if q_rope is not None:
                            nope *= r_q_scale[:, None]
                        s += nope
                    else:
                        s = nope
                    if SOFTCAP:
                        s = softcap * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp2(s * (r_factor / softcap) * (2.0 * LOG2E))))
                    if MASKED:
                        if not SOFTCAP:
                            s *= r_factor
                        row = m_first + offs_m[:, None]
                        col = offset + key[None, :]
                        visible = MASK_VISIBLE(b, h, start + row, col, c0, c1, c2, c3) & inside[None, :]
                        s = tl.where(visible, s, float("-inf"))
                        if BIASES > 0:
                            s += LOG2E * MASK_BIAS(
                                b, h, row, col,
                                bias0, stride_bias0_b, stride_bias0_h, stride_bias0_q, rows_bias0, cols_bias0,
                                bias1, stride_bias1_b, stride_bias1_h, stride_bias1_q, rows_bias1, cols_bias1,
                            )  # fmt: skip
                        m_new = tl.maximum(m_i, tl.max(s, 1) - P_EXPONENT)
                        base = tl.where(m_new == float("-inf"), 0.0, m_new)
                        p = tl.exp2(s - base[:, None])
                    elif SOFTCAP:
                        m_new = tl.maximum(m_i, tl.max(s, 1) - P_EXPONENT)
                        base = m_new
                        p = tl.exp2(s - base[:, None])
                    else:
                        m_new = tl.maximum(m_i, tl.max(s, 1) * factor - P_EXPONENT)
                        base = m_new
                        p = tl.exp2(s * r_factor - base[:, None])
                    correction = tl.exp2(m_i - base)
                    l_i = l_i * correction + tl.sum(p, 1)
                    if v_scale is not None:  # noqa: SIM102 (the second is a value of the device)
                        if v_scale_of_rows:
                            r_v_scale = tl.load(at_v_scale + key * stride_v_scale, mask=inside, other=0.0)
                            unit = tl.maximum(v_unit, tl.max(tl.abs(r_v_scale), 0))
                            p *= (r_v_scale / tl.where(unit > 0, unit, 1.0))[None, :]
                            correction *= tl.where(unit > 0, v_unit / unit, 1.0)
                            v_unit = unit
                    acc = _add_values(acc * correction[:, None], p, r_v, INTERPRETED)
                    m_i = m_new
        n = end

    # Sinks, normalisation, LSE.
    if sinks is not None:
        sink = tl.load(sinks + h) * LOG2E
        m_new = tl.maximum(m_i, sink)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        correction = tl.exp2(m_i - base)
        l_i = l_i * correction + tl.exp2(sink - base)
        acc *= correction[:, None]
        m_i = m_new
    empty = l_i == 0.0
    weight = 1.0 / l_i
    if v_scale is not None:
        weight *= v_unit
    acc *= tl.where(empty, 0.0, weight)[:, None]
    at_output = output + t_first * stride_output_t + head * stride_output_h
    target = at_output + offs_m[:, None] * stride_output_t + offs_v[None, :]
    tl.store(target, narrow(acc, output.dtype.element_ty, INTERPRETED), mask=m_inside[:, None])
    if lse is not None:
        at_lse = lse + t_first * stride_lse_t + head * stride_lse_h
        natural = tl.where(empty, float("-inf"), (m_i + tl.log2(l_i)) * LN2)
        tl.store(at_lse + offs_m * stride_lse_t, natural, mask=m_inside)


@triton.jit
def clear(slots):
    """Write the zero that a persistent kernel counts from."""
    tl.store(slots, 0)
