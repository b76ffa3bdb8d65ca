"""What both consumers of ``prefill_hopper.py`` do with an item and with a tile: numbers, masks, the end."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_loads import field_of
from .hopper_tiles import halves, in_order, whole
from .prefill import LN2, LOG2E

ROWS = gl.constexpr(64)  # of a consumer
ITEM_FIELDS = gl.constexpr(8)
# Columns of scores that are masked at a time.
MASKED_COLUMNS = gl.constexpr(16)
# The word beside a tile of keys: the first two are a bit for each consumer; from TILE_SHIFT on the tile's number.
MASKED = gl.constexpr(1)
WANTED = gl.constexpr(8)
LAST = gl.constexpr(64)
TILE_SHIFT = gl.constexpr(7)


@gluon.jit
def receive_item(s_item, q_full, turn):
    """Return the numbers of the next item as the producer wrote them."""
    # Every thread holds all the numbers, so that picking one costs no shuffle.
    everywhere: gl.constexpr = gl.BlockedLayout([ITEM_FIELDS], [32], [4], [0])
    field = gl.arange(0, ITEM_FIELDS, layout=everywhere)
    mbarrier.wait(q_full.index(0), turn & 1)
    numbers = s_item.load(everywhere)
    return (
        field_of(numbers, field, 0), field_of(numbers, field, 1), field_of(numbers, field, 2),
        field_of(numbers, field, 3), field_of(numbers, field, 4), field_of(numbers, field, 5),
        field_of(numbers, field, 6),
    )  # fmt: skip


@gluon.jit
def hide_end(s, nothing, count):
    """Put `nothing`, a number a row, in the place of scores behind the first `count` keys of a tile."""
    layout: gl.constexpr = s.type.layout
    col = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    return gl.where(col < count, s, nothing[:, None])


@gluon.jit
def hide(s, nothing, visible, b, h, q, k, c0, c1, c2, c3):
    """The same for scores that the mask hides, whose function is `visible`, of keys from position `k` on.

    A few columns at a time: answers of the mask that wait do not fit into predicates.
    """
    layout: gl.constexpr = s.type.layout
    if s.shape[1] > MASKED_COLUMNS:
        left, right = halves(s)
        left = hide(left, nothing, visible, b, h, q, k, c0, c1, c2, c3)
        right = hide(right, nothing, visible, b, h, q, k + s.shape[1] // 2, c0, c1, c2, c3)
        hidden = whole(left, right, layout)
    else:
        row = gl.convert_layout(q, gl.SliceLayout(1, layout))[:, None]
        other = gl.convert_layout(nothing, gl.SliceLayout(1, layout))[:, None]
        col = in_order(k + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout)))[None, :]
        hidden = in_order(gl.where(visible(b, h, row, col, c0, c1, c2, c3), s, other))
    return hidden


@gluon.jit
def store_item(
    outputs, sinks, m_i, l_i, acc, factor, h, t_first, first, count,
    WEIGHT_BITS: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Divide the rows of a consumer, from number `first` of the item on, by their sums, and store them.

    Sums are those of 2^(x - m_i + WEIGHT_BITS); `factor` is the values'.
    """
    output, lse, stride_output_t, stride_output_h, stride_lse_t, stride_lse_h = outputs
    values: gl.constexpr = acc.type.layout
    V: gl.constexpr = acc.shape[1]
    # A lane's columns lie together: 16 bytes a store of 16-bit elements.
    wide: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [ROWS, V],
    )  # fmt: skip
    out_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    out_d = gl.arange(0, V, layout=gl.SliceLayout(0, wide))
    if HAS_SINKS:
        sink = gl.load(sinks + h) * LOG2E
        m_new = gl.maximum(m_i, sink)
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
        correction = gl.exp2(m_i - base)
        l_i = l_i * correction + gl.exp2(sink - base + WEIGHT_BITS)
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, values))[:, None]
        m_i = m_new
    empty = l_i == 0.0
    inverse = gl.where(empty, 0.0, 1.0 / l_i) * factor
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, values))[:, None]
    at_output = output + h.to(gl.int64) * stride_output_h
    target = at_output + (t_first + first + out_m).to(gl.int64)[:, None] * stride_output_t + out_d[None, :]
    out = gl.convert_layout(acc.to(output.dtype.element_ty), wide)
    gl.store(target, out, mask=(first + out_m < count)[:, None])
    if HAS_LSE:
        rows = gl.arange(0, ROWS, layout=m_i.type.layout)
        natural = gl.where(empty, float("-inf"), (m_i + gl.log2(l_i) - WEIGHT_BITS) * LN2)
        at_lse = lse + h.to(gl.int64) * stride_lse_h
        gl.store(at_lse + (t_first + first + rows).to(gl.int64) * stride_lse_t, natural, mask=first + rows < count)
