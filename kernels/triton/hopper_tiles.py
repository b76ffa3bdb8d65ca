"""Tiles in the hands of a consumer of ``prefill_hopper.py``: layouts that cost no move, zeros, e4m3, a warp's vote."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language import debug_barrier

# Renamed after Triton 3.6.
reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret


@gluon.jit
def by_key(s, layout: gl.constexpr):
    """Name the columns of fp8 scores by their keys: the second half of a tile's rows are the odd ones."""
    HALF: gl.constexpr = s.shape[1] // 2
    return gl.convert_layout(s.reshape([s.shape[0], 2, HALF]).permute((0, 2, 1)).reshape(s.shape), layout)


@gluon.jit
def by_line(s, layout: gl.constexpr):
    """Undo `by_key`."""
    HALF: gl.constexpr = s.shape[1] // 2
    return gl.convert_layout(s.reshape([s.shape[0], HALF, 2]).permute((0, 2, 1)).reshape(s.shape), layout)


@gluon.jit
def halves(s):
    """Return the first and the second half of the columns."""
    return gl.split(s.reshape([s.shape[0], 2, s.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def whole(first, second, layout: gl.constexpr):
    """Undo `halves`."""
    joined = gl.join(first, second).permute((0, 2, 1)).reshape([first.shape[0], 2 * first.shape[1]])
    return gl.convert_layout(joined, layout)


@gluon.jit
def in_order(x):
    """Return x, and keep what is made of it behind whatever went through this function earlier."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def as_e4m3(x):
    """Round to e4m3, four neighbours to a word; pairs would be taken apart and put together again."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f", [x], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def in_lane(x, combine: gl.constexpr):
    """Sum or maximise what a thread holds of each row of scores that `by_key` has named: [rows, lanes of a row]."""
    parts = x.reshape([x.shape[0], x.shape[1] // 16, 4, 4])
    return gl.sum(gl.sum(parts, 3), 1) if combine == "sum" else gl.max(gl.max(parts, 3), 1)


@gluon.jit
def of_columns(row, like):
    """Repeat numbers of rows for each column of `like`."""
    return gl.broadcast(row[:, None], like)[0]


@gluon.constexpr_function
def _in_register(text, warpgroup):
    return text.replace("ANSWER", f"mla_answer_{warpgroup}")


@gluon.jit
def declare_answer(x, WARPGROUP: gl.constexpr):
    """Declare the register of `any_reaches`, once in a consumer; `x` is any number."""
    DECLARE: gl.constexpr = _in_register(".reg .pred ANSWER; mov.b32 $0, $1;", WARPGROUP)
    return gl.inline_asm_elementwise(DECLARE, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def any_reaches(sums, x, WARPGROUP: gl.constexpr):
    """Tell a warp whether one of its sums, two a thread, is 448 or more, or no number: not 0 then.

    Gluon's numbers are a program's, and nothing in it makes one that may differ from warp to warp of a tensor. So the
    vote leaves its answer in a register, where the number is taken from; `x` is any number.
    """
    VOTE: gl.constexpr = _in_register(
        """{
        .reg .f32 larger;
        .reg .pred reaches;
        max.NaN.f32 larger, $2, $3;
        setp.geu.f32 reaches, larger, 0f43E00000;
        vote.sync.any.pred ANSWER, reaches, 0xffffffff;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        }""",
        WARPGROUP,
    )
    TELL: gl.constexpr = _in_register("selp.b32 $0, 1, 0, ANSWER; // $1", WARPGROUP)
    gl.inline_asm_elementwise(VOTE, "=r,=r,f,f", [sums], dtype=gl.int32, is_pure=False, pack=2)
    return gl.inline_asm_elementwise(TELL, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def zero_rows(s_v, count):
    """Write zeros behind the first `count` values of a tile: zero times NaN is NaN.

    All consumers write the same zeros and read none of them. A line of shared memory has 128 bytes of a row, in
    whatever order, so lines are zeroed up to a multiple of GROUP rows and then groups of them.
    """
    GROUP: gl.constexpr = 8
    LINE: gl.constexpr = 32
    ROWS: gl.constexpr = s_v.shape[0]
    PARTS: gl.constexpr = s_v.shape[1] * s_v.dtype.primitive_bitwidth // (32 * LINE)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines = reinterpret(s_v, gl.int32, [PARTS * ROWS, LINE], plain)
    groups = reinterpret(s_v, gl.int32, [PARTS * ROWS // GROUP, GROUP * LINE], plain)
    zero_line = gl.full([LINE], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    zero_group = gl.full([GROUP * LINE], 0, gl.int32, layout=gl.BlockedLayout([2], [32], [4], [0]))
    whole_groups = (count + (GROUP - 1)) // GROUP
    for part in gl.static_range(PARTS):
        for line in range(part * ROWS + count, part * ROWS + whole_groups * GROUP):
            lines.index(line).store(zero_line)
        for group in range(part * (ROWS // GROUP) + whole_groups, (part + 1) * (ROWS // GROUP)):
            groups.index(group).store(zero_group)
    fence_async_shared()
    debug_barrier()


@gluon.jit
def zero_columns(s_v, count):
    """The same for values that lie as columns of bytes."""
    PIECE: gl.constexpr = 16
    V: gl.constexpr = s_v.shape[0]
    WORDS: gl.constexpr = s_v.shape[1] // 4
    by_word: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    kept = count - 4 * gl.arange(0, WORDS, layout=gl.SliceLayout(0, by_word))  # bytes of a word
    mask = gl.where(kept >= 4, -1, (1 << (8 * gl.maximum(kept, 0))) - 1)[None, :]
    pieces = reinterpret(s_v, gl.int32, [V // PIECE, PIECE, WORDS], gl.NVMMASharedLayout(128, 32, 2))
    for piece in range(gl.where(count > 0, V // PIECE, 0)):  # always the former; unrolled it would take many registers
        pieces.index(piece).store(pieces.index(piece).load(by_word) & mask)
    fence_async_shared()
    debug_barrier()
