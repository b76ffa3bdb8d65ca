"""The consumer of ``prefill_hopper.py`` in fp8.

    S = Q K^T                nope and rope one after the other; where a tile's keys have scales of their own and the
                             parts' differ, what is done is brought to the rope's between the two
    P = 2^(S - m + 3)        with the reference m as it is: no maxima are taken where nothing is hidden. Only a warp
                             that finds a sum of 448 or more, so that a P might not be an e4m3, moves m of these rows
                             to their largest score and begins the tile anew; all do in an item's first tile and where
                             a tile is masked. What a row does depends on no other row
    O += P V                 a product of its own, added in float32: tensor cores cut sums of fp8 products off

Rows' scales and the one that all keys of a tile may have meet scores in the exponent. Nothing between the products
leaves its registers: keys lie in the order that ``hopper_loads.py`` tells. Stages are given back by every thread for
itself, which no barrier has to precede.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_items import LAST, MASKED, ROWS, TILE_SHIFT, WANTED, hide, hide_end, receive_item, store_item
from .hopper_makers import COMMON, FACTOR, FACTORS, NOPE_FACTOR, NUMBERS, UNIT, VALUE_FACTOR
from .hopper_tiles import (
    any_reaches,
    as_e4m3,
    by_key,
    by_line,
    declare_answer,
    in_lane,
    in_order,
    of_columns,
    zero_columns,
)
from .prefill import LOG2E

# A weight is 2^WEIGHT_BITS where a score equals its row's reference, and below LARGEST.
WEIGHT_BITS = gl.constexpr(3)
LARGEST = gl.constexpr(448.0)
# The reference of rows that have seen no key.
LOWEST = gl.constexpr(-(2.0**127))


@gluon.jit
def _scores(
    nope, tiles, q_rope_tile, q_factor, slot, common, values_full, phase,
    keyed: gl.constexpr, PRESCALED: gl.constexpr,
):  # fmt: skip
    """Return scores of which the product of the nope part is in flight; wait for the tile's values on the way."""
    _, _, s_factors, _, _, _, s_k, s_rope, _ = tiles
    BLOCK_N: gl.constexpr = s_k.shape[2]
    ROPE_FP8: gl.constexpr = s_rope.dtype.is_fp8()
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    rope_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32 if ROPE_FP8 else 16])
    of_keys: gl.constexpr = gl.SliceLayout(0, keyed)
    factors = s_factors.index(slot * FACTORS + FACTOR)
    ropes = s_rope.index(slot).permute((1, 0))
    if ROPE_FP8:
        if common > 0.0:
            s = warpgroup_mma(q_rope_tile, ropes, nope, is_async=True)
            mbarrier.wait(values_full, phase)
            s = by_key(warpgroup_mma_wait(0, deps=[s]), keyed)
        else:
            mbarrier.wait(values_full, phase)
            s = by_key(warpgroup_mma_wait(0, deps=[nope]), keyed)
            s = s * s_factors.index(slot * FACTORS + NOPE_FACTOR).load(of_keys)[None, :]
            # The stage anew: ptxas took descriptors that only the other branch had made.
            ropes = s_rope.index(in_order(slot)).permute((1, 0))
            s = warpgroup_mma(q_rope_tile, ropes, by_line(s, scores), is_async=True)
            s = by_key(warpgroup_mma_wait(0, deps=[s]), keyed)
            s = s * factors.load(of_keys)[None, :]
    elif PRESCALED:
        # One sum of products of two widths; their layouts differ by name alone, and this waits for nothing.
        s = gl.convert_layout(warpgroup_mma_wait(1, deps=[nope]), rope_scores)
        s = warpgroup_mma(q_rope_tile, ropes, s, is_async=True)
        mbarrier.wait(values_full, phase)
        s = by_key(warpgroup_mma_wait(0, deps=[s]), keyed)
        if common == 0.0:
            s = s * factors.load(of_keys)[None, :]
    else:
        mbarrier.wait(values_full, phase)
        s = by_key(warpgroup_mma_wait(0, deps=[nope]), keyed)
        s = s * factors.load(of_keys)[None, :] * q_factor[:, None]
        s = warpgroup_mma(q_rope_tile, ropes, by_line(s, rope_scores), is_async=True)
        s = by_key(warpgroup_mma_wait(0, deps=[s]), keyed)
    return s


@gluon.jit
def _move_references(s, factor, sums, m_i, lane_sums, acc):
    """Move references of rows with a lane's sum that is not below LARGEST to their largest score, if that is larger."""
    by_lane: gl.constexpr = gl.SliceLayout(1, lane_sums.type.layout)
    largest = gl.max(in_lane(in_order(s) * factor[:, None], "max"), 1)
    moves = gl.max(gl.where(sums < LARGEST, 0, 1), 1) != 0
    before = gl.convert_layout(m_i, by_lane)
    after = gl.where(moves, gl.maximum(before, largest), before)
    correction = gl.exp2(before - after)
    acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.convert_layout(after, m_i.type.layout), lane_sums * correction[:, None], acc


@gluon.jit
def consume_fp8(
    WARPGROUP: gl.constexpr, work, visible,
    PRESCALED: gl.constexpr, V_SCALES: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    tiles, barriers, outputs, sinks, scales, captures, scale = work
    s_item, s_tile, s_factors, s_numbers, s_q, s_q_rope, s_k, s_rope, s_v = tiles
    q_full, q_empty, k_full, k_empty, v_full, _ = barriers
    c0, c1, c2, c3 = captures
    q_scale, _, v_scale, _, stride_q_scale, _, stride_v_scale, _, _ = scales
    STAGES: gl.constexpr = s_k.shape[0]
    BLOCK_N: gl.constexpr = s_k.shape[2]
    NOPE: gl.constexpr = s_q.shape[3]
    V: gl.constexpr = s_v.shape[2]
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 32])
    # Of scores by key: how the second product wants weights.
    keyed: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [ROWS, BLOCK_N],
    )  # fmt: skip
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, keyed))
    of_keys: gl.constexpr = gl.SliceLayout(0, keyed)
    first = WARPGROUP * ROWS
    q_tile = s_q.index(WARPGROUP).reshape([ROWS, NOPE])
    q_rope_tile = s_q_rope.index(WARPGROUP).reshape([ROWS, s_q_rope.shape[3]])
    turn = gl.program_id(0) * 0
    slot = turn
    phase = turn
    declare_answer(turn, WARPGROUP)
    b, h, t_first, q_lo, count, offset, n_keys = receive_item(s_item, q_full, turn)
    while count > 0:
        if n_keys == 0:
            async_copy.mbarrier_arrive(q_empty.index(0), increment_count=False)
        q_factor = gl.load(
            q_scale + (t_first + first + rows).to(gl.int64) * stride_q_scale, mask=first + rows < count, other=0.0
        )
        row_factor = q_factor * (scale * LOG2E)
        if not (s_rope.dtype.is_fp8() or PRESCALED):
            row_factor = q_factor * 0.0 + scale * LOG2E
        row_factor = gl.where(gl.abs(row_factor) < 1e-30, 1e-30, row_factor)
        nothing = gl.where(row_factor < 0.0, float("inf"), float("-inf"))
        m_i = gl.full([ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(1, keyed))
        # Each lane sums its own keys up.
        lane_sums = in_lane(gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=keyed), "sum")
        acc = gl.full([ROWS, V], 0.0, gl.float32, layout=values)
        begins = n_keys * 0 + 1
        more = n_keys > 0
        while more:
            mbarrier.wait(k_full.index(slot), phase)
            # Issued before it is known what is wanted of the tile.
            keys = s_k.index(slot).reshape([BLOCK_N, NOPE]).permute((1, 0))
            zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=scores)
            nope = warpgroup_mma(q_tile, keys, zero, use_acc=False, is_async=True)
            common = gl.sum(s_numbers.index(slot * NUMBERS + COMMON).load(one), 0)
            word = gl.sum(s_tile.index(slot).load(one), 0)
            if (word & (WANTED << WARPGROUP)) != 0:
                values_full = v_full.index(slot)
                s = _scores(
                    nope, tiles, q_rope_tile, q_factor, slot, common, values_full, phase, keyed, PRESCALED
                )  # fmt: skip
                if (word & LAST) != 0:
                    async_copy.mbarrier_arrive(q_empty.index(0), increment_count=False)
                first_key = (word >> TILE_SHIFT) * BLOCK_N
                masked = word & (MASKED << WARPGROUP)
                if masked != 0:
                    q = q_lo + first + rows
                    if first_key + BLOCK_N > n_keys:
                        s = hide_end(s, nothing, n_keys - first_key)
                    s = hide(s, nothing, visible, b, h, q, offset + first_key, c0, c1, c2, c3)
                factor = row_factor
                if s_rope.dtype.is_fp8() or PRESCALED:
                    factor = row_factor * gl.where(common > 0.0, common, 1.0)
                moving = begins | masked
                begins = 0
                sums = in_lane(gl.full([ROWS, BLOCK_N], float("inf"), gl.float32, layout=keyed), "sum")
                weights = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=keyed).to(s_v.dtype)
                passes = turn * 0
                while passes < 2:
                    if moving != 0:
                        m_i, lane_sums, acc = _move_references(s, factor, sums, m_i, lane_sums, acc)
                    p = gl.exp2(gl.fma(s, of_columns(factor, s), of_columns(WEIGHT_BITS - m_i, s)))
                    sums = in_lane(p, "sum")
                    if V_SCALES == "rows":
                        # A value's scale goes to its weight, in units of the tile's largest.
                        p = p * s_factors.index(slot * FACTORS + VALUE_FACTOR).load(of_keys)[None, :]
                    weights = as_e4m3(p)
                    moving = any_reaches(sums, turn, WARPGROUP)
                    passes += gl.where(moving != 0, 1, 2)
                lane_sums += sums
                if V_SCALES == "rows":
                    unit = gl.sum(s_numbers.index(slot * NUMBERS + UNIT).load(one), 0)
                tile = s_v.index(slot).reshape([V, BLOCK_N])
                if first_key + BLOCK_N > n_keys:
                    zero_columns(tile, n_keys - first_key)
                weights = gl.convert_layout(weights, gl.DotOperandLayout(0, values, 4))
                none = gl.full([ROWS, V], 0.0, gl.float32, layout=values)
                product = warpgroup_mma(weights, tile.permute((1, 0)), none, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, deps=[product])
                async_copy.mbarrier_arrive(k_empty.index(slot), increment_count=False)
                if V_SCALES == "rows":
                    product = product * unit
                acc += product
            else:
                warpgroup_mma_wait(0, deps=[nope])
                mbarrier.wait(v_full.index(slot), phase)
                async_copy.mbarrier_arrive(k_empty.index(slot), increment_count=False)
                if (word & LAST) != 0:
                    async_copy.mbarrier_arrive(q_empty.index(0), increment_count=False)
            more = (word & LAST) == 0
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        l_i = gl.convert_layout(gl.sum(lane_sums, 1), gl.SliceLayout(1, keyed))
        v_factor = 1.0
        if V_SCALES == "heads":
            v_factor = gl.load(v_scale + h * stride_v_scale)
        store_item(
            outputs, sinks, m_i, l_i, acc, v_factor, h, t_first, first, count, WEIGHT_BITS, HAS_SINKS, HAS_LSE
        )  # fmt: skip
        turn += 1
        b, h, t_first, q_lo, count, offset, n_keys = receive_item(s_item, q_full, turn)
