"""What ``prefill_hopper.py`` loads where one box of the copy engine is not enough; its maker, which works for fp8.

Rows of fp8 keys and of their rope lie in a tile in another order: first every second key, then those between them. A
thread's scores of one row are then those of four keys side by side, and the next four belong to the next lane, which is
how the second product takes weights of 8 bits: nothing moves between the products. For this each of these tensors has
two maps, of its even and of its odd rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language import debug_barrier

from .hopper_tiles import reinterpret

# Both were renamed after Triton 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
row_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# Where a column of bytes may begin for the copy engine.
CHUNK = gl.constexpr(16)
JOB_FIELDS = gl.constexpr(8)
# Factors of each key beside a tile in fp8: of its scores before the rope's part is added, of all, of its weights.
NOPE_FACTOR = gl.constexpr(0)
FACTOR = gl.constexpr(1)
VALUE_FACTOR = gl.constexpr(2)
FACTORS = gl.constexpr(3)
# Numbers of a tile in fp8: the factor that all keys have, or zero; the unit of the factors of weights.
COMMON = gl.constexpr(0)
UNIT = gl.constexpr(1)
NUMBERS = gl.constexpr(2)
# Scales of a rope that are less, zero among them, are taken for this: the other part is divided by them.
LEAST_SCALE = gl.constexpr(2.0**-80)


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
    PIECE: gl.constexpr = 8 * gl.num_warps()
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
def shift_values(s_v, s_raw, row):
    """Bring columns of bytes, which lie in chunks of CHUNK keys that begin at a multiple of them, to begin at `row`."""
    V: gl.constexpr = s_raw.shape[2]
    CHUNK: gl.constexpr = s_raw.shape[3]
    CHUNKS: gl.constexpr = s_raw.shape[0] - 1
    by_column: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    chunks = reinterpret(s_raw, gl.int32, [CHUNKS + 1, V, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    columns = reinterpret(s_v, gl.int32, [V, CHUNKS * 4], gl.NVMMASharedLayout(128, 32, 2))
    words = row % CHUNK // 4
    bits = row % 4 * 8
    a, b, c, d = _four_words(chunks.index(0).load(by_column))
    for chunk in gl.static_range(CHUNKS):
        e, f, g, h = _four_words(chunks.index(chunk + 1).load(by_column))
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
def transpose_values(s_v, s_raw):
    """Turn a tile of rows of bytes, which lies in pieces of PIECE columns, into columns."""
    PIECES: gl.constexpr = s_raw.shape[0]
    BLOCK_N: gl.constexpr = s_raw.shape[1]
    PIECE: gl.constexpr = s_raw.shape[3]
    four_keys: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [gl.num_warps(), 1], [1, 0])
    rows = reinterpret(s_raw, gl.int32, [PIECES, BLOCK_N, PIECE // 4], gl.NVMMASharedLayout(PIECE, 32, 2))
    columns = reinterpret(s_v, gl.int32, [PIECES, PIECE, BLOCK_N // 4], gl.NVMMASharedLayout(128, 32, 2))
    for piece in range(PIECES):
        words = rows.index(piece).load(four_keys)
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
def load_scales(
    scales, table, b, position, row, count,
    BLOCK_N: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, ROPE_FP8: gl.constexpr, V_SCALES: gl.constexpr,
):  # fmt: skip
    """Return the scales of keys, of their rope and of values of a tile that begins at `row` and `position`.

    Keys behind the last one take the scales of the first: they are hidden, and must not spoil what is common.
    """
    _, k_scales, v_scale, rope_scales, _, stride_k_scales, stride_v_scale, stride_page, stride_t = scales
    n = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    n = gl.where(n < count, n, 0)
    first = gl.load(k_scales + row.to(gl.int64) * stride_k_scales)
    k_scale = gl.load(k_scales + (row + n).to(gl.int64) * stride_k_scales)
    rope_scale = k_scale
    value_scale = k_scale
    if ROPE_FP8:
        if ROPE == "paged":
            page = gl.load(table + (position + n) // PAGE_SIZE)
            source = page.to(gl.int64) * stride_page + (position + n) % PAGE_SIZE * stride_t
        elif ROPE == "batched":
            source = b.to(gl.int64) * stride_page + (position + n).to(gl.int64) * stride_t
        else:
            source = (row + n).to(gl.int64) * stride_t
        rope_scale = gl.load(rope_scales + source)
    if V_SCALES == "rows":
        value_scale = gl.load(v_scale + (row + n).to(gl.int64) * stride_v_scale)
    return first, k_scale, rope_scale, value_scale


@gluon.jit
def write_factors(
    s_factors, s_numbers, slot, first, k_scale, rope_scale, value_scale, ROPE_FP8: gl.constexpr, V_SCALES: gl.constexpr
):  # fmt: skip
    """Write the factors of a tile's keys, and whether one is enough for all of them."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    zero = gl.full([1], 0.0, gl.float32, layout=one)
    differs = (k_scale != first) | (first <= 0.0)
    factor = k_scale
    if ROPE_FP8:
        differs = differs | (rope_scale != first)
        factor = gl.where(gl.abs(rope_scale) < LEAST_SCALE, LEAST_SCALE, rope_scale)
        s_factors.index(slot * FACTORS + NOPE_FACTOR).store(k_scale / factor)
    s_factors.index(slot * FACTORS + FACTOR).store(factor)
    alike = gl.max(differs.to(gl.int32), 0) == 0
    s_numbers.index(slot * NUMBERS + COMMON).store(zero + gl.where(alike, first, 0.0))
    if V_SCALES == "rows":
        largest = gl.max(gl.abs(value_scale), 0)
        unit = gl.where(largest == 0.0, 1.0, largest)
        s_factors.index(slot * FACTORS + VALUE_FACTOR).store(value_scale / unit)
        s_numbers.index(slot * NUMBERS + UNIT).store(zero + unit)


@gluon.jit
def field_of(numbers, field, index: gl.constexpr):
    return gl.sum(gl.where(field == index, numbers, 0), 0)


@gluon.jit
def send_job(s_job, row, position, count, b, h, copied):
    """Write what the maker has to know of a tile of keys: no keys, and it is the end."""
    field = gl.arange(0, JOB_FIELDS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    numbers = gl.where(field == 0, row, gl.where(field == 1, position, gl.where(field == 2, count, b)))
    s_job.store(gl.where(field == 4, h, gl.where(field == 5, copied, numbers)))


@gluon.jit
def maker(
    make,
    ROPE: gl.constexpr, CSR: gl.constexpr, V_COLUMNS: gl.constexpr, V_SCALES: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Make of a tile in fp8 what no box of the copy engine brings: factors, rope rows, values in their order."""
    tiles, jobs, s_raw, raw_full, barriers, v_map, pages, scales = make
    _, _, s_factors, s_numbers, _, _, s_k, s_rope, s_v = tiles
    _, _, k_full, _, v_full, _ = barriers
    s_job, job_full = jobs
    rope, page_table, page_indptr, stride_rope_page, stride_rope_t, stride_table = pages
    ROPE_FP8: gl.constexpr = s_rope.dtype.is_fp8()
    STAGES: gl.constexpr = s_k.shape[0]
    BLOCK_N: gl.constexpr = s_k.shape[2]
    V: gl.constexpr = s_v.shape[2]
    PIECES: gl.constexpr = s_raw.shape[0]
    everywhere: gl.constexpr = gl.BlockedLayout([JOB_FIELDS], [32], [gl.num_warps()], [0])
    field = gl.arange(0, JOB_FIELDS, layout=everywhere)
    raw = raw_full.index(0)
    step = gl.program_id(0) * 0
    step_raw = step
    count = step + 1
    while count > 0:
        slot = step % STAGES
        mbarrier.wait(job_full.index(slot), step // STAGES & 1)
        numbers = s_job.index(slot).load(everywhere)
        row = field_of(numbers, field, 0)
        position = field_of(numbers, field, 1)
        count = field_of(numbers, field, 2)
        b = field_of(numbers, field, 3)
        h = field_of(numbers, field, 4)
        copied = field_of(numbers, field, 5)
        if count > 0:
            # Values that do not come as the second product wants them: rows, or columns that begin at any key.
            made = not V_COLUMNS or row % CHUNK != 0
            if made:
                mbarrier.expect(raw, (BLOCK_N + CHUNK if V_COLUMNS else BLOCK_N) * V)
                for i in gl.static_range(PIECES):
                    if V_COLUMNS:
                        tma_load(v_map, [h, 0, row // CHUNK * CHUNK + i * CHUNK], raw, s_raw.index(i))
                    else:
                        tma_load(v_map, [row, h, i * (V // PIECES)], raw, s_raw.index(i))
            table = page_table
            if CSR:
                table += gl.load(page_indptr + b)
            elif ROPE == "paged":
                table += b.to(gl.int64) * stride_table
            first, k_scale, rope_scale, value_scale = load_scales(
                scales, table, b, position, row, count, BLOCK_N, ROPE, PAGE_SIZE, ROPE_FP8, V_SCALES,
            )  # fmt: skip
            write_factors(s_factors, s_numbers, slot, first, k_scale, rope_scale, value_scale, ROPE_FP8, V_SCALES)
            if ROPE == "paged" and copied > 0:
                copy_rope(
                    s_rope.index(slot), rope, table, position, count, stride_rope_page, stride_rope_t, PAGE_SIZE, 2
                )  # fmt: skip
                async_copy.commit_group()
                async_copy.wait_group(0)
                fence_async_shared()
            debug_barrier()
            mbarrier.arrive(k_full.index(slot))
            if made:
                mbarrier.wait(raw, step_raw & 1)
                if V_COLUMNS:
                    shift_values(s_v.index(slot), s_raw, row)
                else:
                    transpose_values(s_v.index(slot), s_raw)
                mbarrier.arrive(v_full.index(slot))
                step_raw += 1
            step += 1
