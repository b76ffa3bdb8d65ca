"""What ``prefill_hopper.py`` loads where one box of the copy engine is not enough.

Rows of fp8 keys and of their rope lie in a tile in another order: first every second key, then those between them. A
thread's scores of one row are then those of four keys side by side, and the next four belong to the next lane, which is
how the second product takes weights of 8 bits: nothing moves between the products. For this each of these tensors has
two maps, of its even and of its odd rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language import debug_barrier

from .hopper_tiles import reinterpret

# Both were renamed after Triton 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
row_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# Where a column of bytes may begin for the copy engine.
CHUNK = gl.constexpr(16)


@gluon.jit
def load_rows(even_map, odd_map, tiles, at, between, outer, row, barrier):
    """Load every second row from `row` on into one of `tiles`, those between them into the one `between` behind."""
    half = row // 2
    if row % 2 == 0:
        tma_load(even_map, [outer, half, 0], barrier, tiles.index(at))
        tma_load(odd_map, [outer, half, 0], barrier, tiles.index(at + between))
    else:
        tma_load(odd_map, [outer, half, 0], barrier, tiles.index(at))
        tma_load(even_map, [outer, half + 1, 0], barrier, tiles.index(at + between))


@gluon.jit
def copy_rope(
    s_rope, rope, table, position, count, stride_rope_page, stride_rope_t, PAGE_SIZE: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
    """Copy the first `count` rope rows of a tile, its first key at `position`, one by one."""
    PIECE: gl.constexpr = max(8 * gl.num_warps(), 16)
    BLOCK_N: gl.constexpr = s_rope.shape[0]
    ROPE_DIM: gl.constexpr = s_rope.shape[1]
    BYTES: gl.constexpr = s_rope.dtype.primitive_bitwidth // 8
    by_row: gl.constexpr = gl.BlockedLayout([1, 16 // BYTES], [8 // BYTES, 4 * BYTES], [gl.num_warps(), 1], [1, 0])
    offs_n = gl.arange(0, PIECE, layout=gl.SliceLayout(1, by_row))
    offs_rope = gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, by_row))
    pieces = reinterpret(s_rope, s_rope.dtype, [BLOCK_N // PIECE, PIECE, ROPE_DIM], s_rope.layout)
    for piece in range(BLOCK_N // PIECE):
        line = piece * PIECE + offs_n
        n = line % (BLOCK_N // HALVES) * HALVES + line // (BLOCK_N // HALVES)
        inside = n < count
        page = gl.load(table + (position + n) // PAGE_SIZE, mask=inside, other=0)
        row = page.to(gl.int64) * stride_rope_page + ((position + n) % PAGE_SIZE) * stride_rope_t
        row_load(pieces.index(piece), rope + row[:, None] + offs_rope[None, :], mask=inside[:, None])


@gluon.jit
def _shift_words(a, b, c, d, e, f, g, h, words, bits):
    """Return four of these eight words, from number `words` (0 to 3) on and `bits` of it."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred two, one;
        .reg .b32 odd, even, w<6>;
        and.b32 even, $12, 2;
        setp.ne.u32 two, even, 0;
        and.b32 odd, $12, 1;
        setp.ne.u32 one, odd, 0;
        selp.b32 w0, $6, $4, two;
        selp.b32 w1, $7, $5, two;
        selp.b32 w2, $8, $6, two;
        selp.b32 w3, $9, $7, two;
        selp.b32 w4, $10, $8, two;
        selp.b32 w5, $11, $9, two;
        selp.b32 w0, w1, w0, one;
        selp.b32 w1, w2, w1, one;
        selp.b32 w2, w3, w2, one;
        selp.b32 w3, w4, w3, one;
        selp.b32 w4, w5, w4, one;
        shf.r.wrap.b32 $0, w0, w1, $13;
        shf.r.wrap.b32 $1, w1, w2, $13;
        shf.r.wrap.b32 $2, w2, w3, $13;
        shf.r.wrap.b32 $3, w3, w4, $13;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r", [a, b, c, d, e, f, g, h, words, bits],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _four_words(x):
    even, odd = gl.split(x.reshape([x.shape[0], 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def shift_values(s_v, s_raw, at, PIECES: gl.constexpr, row):
    """Bring columns of bytes, which lie in chunks of CHUNK keys that begin at a multiple of them, to begin at `row`."""
    V: gl.constexpr = s_raw.shape[2]
    CHUNK: gl.constexpr = s_raw.shape[3]
    CHUNKS: gl.constexpr = PIECES - 1
    by_column: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    chunks = reinterpret(s_raw, gl.int32, [s_raw.shape[0], V, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    columns = reinterpret(s_v, gl.int32, [V, CHUNKS * 4], gl.NVMMASharedLayout(128, 32, 2))
    words = row % CHUNK // 4
    bits = row % 4 * 8
    a, b, c, d = _four_words(chunks.index(at).load(by_column))
    for chunk in gl.static_range(CHUNKS):
        e, f, g, h = _four_words(chunks.index(at + chunk + 1).load(by_column))
        first, second, third, fourth = _shift_words(a, b, c, d, e, f, g, h, words, bits)
        shifted = gl.join(gl.join(first, third), gl.join(second, fourth)).reshape([V, 4])
        columns.slice(chunk * 4, 4, 1).store(gl.convert_layout(shifted, by_column))
        a, b, c, d = e, f, g, h
    fence_async_shared()
    debug_barrier()


@gluon.jit
def _transpose_bytes(a, b, c, d):
    """Return the words of the first, second, third and fourth bytes of a, b, c and d."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 low_ab, high_ab, low_cd, high_cd;
        prmt.b32 low_ab, $4, $5, 0x5140;
        prmt.b32 high_ab, $4, $5, 0x7362;
        prmt.b32 low_cd, $6, $7, 0x5140;
        prmt.b32 high_cd, $6, $7, 0x7362;
        prmt.b32 $0, low_ab, low_cd, 0x5410;
        prmt.b32 $1, low_ab, low_cd, 0x7632;
        prmt.b32 $2, high_ab, high_cd, 0x5410;
        prmt.b32 $3, high_ab, high_cd, 0x7632;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r", [a, b, c, d], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def transpose_values(s_v, s_raw, at, PIECES: gl.constexpr):
    """Turn a tile of rows of bytes, which lies in pieces of PIECE columns, into columns."""
    BLOCK_N: gl.constexpr = s_raw.shape[1]
    PIECE: gl.constexpr = s_raw.shape[3]
    four_keys: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [gl.num_warps(), 1], [1, 0])
    rows = reinterpret(s_raw, gl.int32, [s_raw.shape[0], BLOCK_N, PIECE // 4], gl.NVMMASharedLayout(PIECE, 32, 2))
    columns = reinterpret(s_v, gl.int32, [PIECES, PIECE, BLOCK_N // 4], gl.NVMMASharedLayout(128, 32, 2))
    for piece in range(PIECES):
        words = rows.index(at + piece).load(four_keys)
        words = words.reshape([BLOCK_N // 4, 2, 2, PIECE // 4]).permute((0, 3, 1, 2))
        even, odd = gl.split(words)
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        first, second, third, fourth = _transpose_bytes(first, second, third, fourth)
        words = gl.join(gl.join(first, third), gl.join(second, fourth))
        columns.index(piece).store(words.permute((1, 2, 3, 0)).reshape([PIECE, BLOCK_N // 4]))
    fence_async_shared()
    debug_barrier()


@gluon.jit
def field_of(numbers, field, index: gl.constexpr):
    return gl.sum(gl.where(field == index, numbers, 0), 0)
