"""What works for fp8 in ``prefill_hopper.py`` beside its producer: a warp for roped keys and factors, two for values.

The producer sends each of them what it has to know of a tile, a job. A single warp issues an instruction every few
cycles, so what is to be done for a tile is spread over them, loads that do not depend on one another come side by side,
and values that have to be brought into another order are loaded a tile ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language import debug_barrier

from .hopper_loads import CHUNK, copy_rope, field_of, load_rows, shift_values, tma_load, transpose_values
from .hopper_tiles import reinterpret

JOB_FIELDS = gl.constexpr(8)
# Factors of each key beside a tile: of its scores before the rope's part is added, of all, of its weights.
NOPE_FACTOR = gl.constexpr(0)
FACTOR = gl.constexpr(1)
VALUE_FACTOR = gl.constexpr(2)
FACTORS = gl.constexpr(3)
# Numbers of a tile: the factor that all keys have, or zero; the unit of the factors of weights.
COMMON = gl.constexpr(0)
UNIT = gl.constexpr(1)
NUMBERS = gl.constexpr(2)
# Scales of a rope that are less, zero among them, are taken for this: the other part is divided by them.
LEAST_SCALE = gl.constexpr(2.0**-80)


@gluon.jit
def send_job(s_job, row, position, count, b, h, next_row):
    """Write a tile's first row and position, its number of keys (none: the end), sequence, head, and the next row.

    That is the first row of the item's next tile, or -1.
    """
    field = gl.arange(0, JOB_FIELDS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    numbers = gl.where(field == 0, row, gl.where(field == 1, position, gl.where(field == 2, count, b)))
    s_job.store(gl.where(field == 4, h, gl.where(field == 5, next_row, numbers)))


@gluon.jit
def _next_job(jobs, step):
    """Wait for a job and return its numbers."""
    s_job, job_full = jobs
    STAGES: gl.constexpr = s_job.shape[0]
    everywhere: gl.constexpr = gl.BlockedLayout([JOB_FIELDS], [32], [gl.num_warps()], [0])
    field = gl.arange(0, JOB_FIELDS, layout=everywhere)
    mbarrier.wait(job_full.index(step % STAGES), step // STAGES & 1)
    numbers = s_job.index(step % STAGES).load(everywhere)
    return (
        field_of(numbers, field, 0), field_of(numbers, field, 1), field_of(numbers, field, 2),
        field_of(numbers, field, 3), field_of(numbers, field, 4), field_of(numbers, field, 5),
    )  # fmt: skip


@gluon.jit
def _load_boxes(
    rope_map, rope_odd_map, s_rope, slot, full, table, b, row, position, key, count, scales,
    ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Load a tile of roped keys in boxes. Return the scale of each `key`, where these have some."""
    BOXES: gl.constexpr = s_rope.shape[1] // BOX
    HAS_SCALES: gl.constexpr = s_rope.dtype.is_fp8()
    box: gl.constexpr = [s_rope.shape[0] * BOXES * 2, 1, BOX // 2, s_rope.shape[2]]
    s_boxes = reinterpret(s_rope, s_rope.dtype, box, rope_map.layout)
    _, _, _, rope_scales, _, _, _, stride_page, stride_t = scales
    rope_scale = gl.full(key.shape, 0.0, gl.float32, layout=key.type.layout)
    at_box = slot * BOXES * 2
    if ROPE == "paged":
        pages = ()
        for i in gl.static_range(BOXES):
            # Past the last key its box again: entries behind may hold anything.
            at = position + gl.minimum(i * BOX, (count - 1) // BOX * BOX)
            pages = pages + (gl.load(table + at // PAGE_SIZE),)  # noqa: RUF005  (Gluon knows no other)
        for i in gl.static_range(BOXES):
            line = (position + gl.minimum(i * BOX, (count - 1) // BOX * BOX)) % PAGE_SIZE
            tma_load(rope_map, [pages[i], line // 2, 0], full, s_boxes.index(at_box + i))
            tma_load(rope_odd_map, [pages[i], line // 2, 0], full, s_boxes.index(at_box + BOXES + i))
            if HAS_SCALES:
                at_scales = rope_scales + pages[i].to(gl.int64) * stride_page + (line - i * BOX) * stride_t
                inside = (key >= i * BOX) & (key < i * BOX + BOX)
                rope_scale = gl.where(inside, gl.load(at_scales + key * stride_t, mask=inside, other=0.0), rope_scale)
    else:
        page = b if ROPE == "batched" else b * 0
        line = position if ROPE == "batched" else row
        for i in gl.static_range(BOXES):
            load_rows(rope_map, rope_odd_map, s_boxes, at_box + i, BOXES, page, line + i * BOX, full)
        if HAS_SCALES:
            at_scales = rope_scales + page.to(gl.int64) * stride_page + line.to(gl.int64) * stride_t
            rope_scale = gl.load(at_scales + key * stride_t, mask=key < count, other=0.0)
    return rope_scale


@gluon.jit
def _copy_rows(
    s_rope, rope, table, position, key, count, stride_rope_page, stride_rope_t, scales, PAGE_SIZE: gl.constexpr
):  # fmt: skip
    """Load a tile of roped keys row by row from their pages. Return the scale of each `key`, where these have some."""
    _, _, _, rope_scales, _, _, _, stride_page, stride_t = scales
    rope_scale = gl.full(key.shape, 0.0, gl.float32, layout=key.type.layout)
    copy_rope(s_rope, rope, table, position, count, stride_rope_page, stride_rope_t, PAGE_SIZE, 2)
    if s_rope.dtype.is_fp8():
        page = gl.load(table + (position + key) // PAGE_SIZE, mask=key < count, other=0).to(gl.int64)
        rope_scale = gl.load(rope_scales + page * stride_page + (position + key) % PAGE_SIZE * stride_t)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    return rope_scale


@gluon.jit
def _write_factors(
    s_factors, s_numbers, slot, first, k_scale, rope_scale, value_scale, ROPE_FP8: gl.constexpr,
    ONE_FACTOR: gl.constexpr, V_SCALES: gl.constexpr,
):  # fmt: skip
    """Write the factors of a tile's keys. With ONE_FACTOR, whether `first` is one for all of them; if so, no others."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    zero = gl.full([1], 0.0, gl.float32, layout=one)
    alike = slot < 0
    if ONE_FACTOR:
        differs = (k_scale != first) | (first <= 0.0)
        if ROPE_FP8:
            differs = differs | (rope_scale != first)
        alike = gl.max(differs.to(gl.int32), 0) == 0
        s_numbers.index(slot * NUMBERS + COMMON).store(zero + gl.where(alike, first, 0.0))
    if not alike:
        factor = k_scale
        if ROPE_FP8:
            factor = gl.where(gl.abs(rope_scale) < LEAST_SCALE, LEAST_SCALE, rope_scale)
            s_factors.index(slot * FACTORS + NOPE_FACTOR).store(k_scale / factor)
        s_factors.index(slot * FACTORS + FACTOR).store(factor)
    if V_SCALES == "rows":
        largest = gl.max(gl.abs(value_scale), 0)
        unit = gl.where(largest == 0.0, 1.0, largest)
        s_factors.index(slot * FACTORS + VALUE_FACTOR).store(value_scale / unit)
        s_numbers.index(slot * NUMBERS + UNIT).store(zero + unit)


@gluon.jit
def make_keys(
    make, ROPE: gl.constexpr, CSR: gl.constexpr, PRESCALED: gl.constexpr, V_SCALES: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Load the roped part of each tile of keys; make the factors of its keys from their scales."""
    tiles, jobs, barriers, rope_map, rope_odd_map, pages, scales = make
    _, _, s_factors, s_numbers, _, _, s_k, s_rope, _ = tiles
    _, _, k_full, _, _, _ = barriers
    rope, page_table, page_indptr, stride_rope_page, stride_rope_t, stride_table = pages
    _, k_scales, v_scale, _, _, stride_k_scales, stride_v_scale, _, _ = scales
    ROPE_FP8: gl.constexpr = s_rope.dtype.is_fp8()
    PAGED: gl.constexpr = ROPE == "paged"
    IN_BOXES: gl.constexpr = not PAGED or PAGE_SIZE % BOX == 0
    STAGES: gl.constexpr = s_k.shape[0]
    BLOCK_N: gl.constexpr = s_k.shape[2]
    BYTES: gl.constexpr = BLOCK_N * s_rope.shape[2] * (s_rope.dtype.primitive_bitwidth // 8)
    key = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    step = gl.program_id(0) * 0
    row, position, count, b, _, _ = _next_job(jobs, step)
    while count > 0:
        slot = step % STAGES
        full = k_full.index(slot)
        # Keys behind the last one take the scale of the first: they are hidden, and must not spoil what is common.
        n = gl.where(key < count, key, 0)
        at_scales = k_scales + row.to(gl.int64) * stride_k_scales
        first = gl.load(at_scales)
        k_scale = gl.load(at_scales + n * stride_k_scales)
        value_scale = k_scale
        if V_SCALES == "rows":
            value_scale = gl.load(v_scale + row.to(gl.int64) * stride_v_scale + n * stride_v_scale)
        table = page_table
        if CSR:
            table += gl.load(page_indptr + b)
        elif PAGED:
            table += b.to(gl.int64) * stride_table
        if IN_BOXES:
            in_boxes = position % BOX == 0 if PAGED else count > 0
            mbarrier.expect(full, BYTES, pred=in_boxes)
            mbarrier.arrive(full, pred=not in_boxes)
            if in_boxes:
                rope_scale = _load_boxes(
                    rope_map, rope_odd_map, s_rope, slot, full, table, b, row, position, key, count, scales,
                    ROPE, PAGE_SIZE, BOX,
                )  # fmt: skip
            else:
                rope_scale = k_scale
                if PAGED:
                    rope_scale = _copy_rows(
                        s_rope.index(slot), rope, table, position, key, count, stride_rope_page, stride_rope_t, scales,
                        PAGE_SIZE,
                    )  # fmt: skip
        else:
            mbarrier.arrive(full)
            rope_scale = _copy_rows(
                s_rope.index(slot), rope, table, position, key, count, stride_rope_page, stride_rope_t, scales,
                PAGE_SIZE,
            )  # fmt: skip
        rope_scale = gl.where(key < count, rope_scale, first)
        _write_factors(
            s_factors, s_numbers, slot, first, k_scale, rope_scale, value_scale, ROPE_FP8, ROPE_FP8 or PRESCALED,
            V_SCALES,
        )  # fmt: skip
        debug_barrier()
        mbarrier.arrive(full)
        step += 1
        row, position, count, b, _, _ = _next_job(jobs, step)


@gluon.jit
def _load_raw(v_map, s_raw, raw_full, turn, h, row, V_COLUMNS: gl.constexpr):
    """Load a tile of values as they lie."""
    STAGES: gl.constexpr = raw_full.shape[0]
    PIECES: gl.constexpr = s_raw.shape[0] // STAGES
    full = raw_full.index(turn % STAGES)
    mbarrier.expect(full, PIECES * s_raw.shape[1] * s_raw.shape[2] * s_raw.shape[3])
    for i in gl.static_range(PIECES):
        piece = s_raw.index(turn % STAGES * PIECES + i)
        if V_COLUMNS:
            tma_load(v_map, [h, 0, row // CHUNK * CHUNK + i * CHUNK], full, piece)
        else:
            tma_load(v_map, [row, h, i * s_raw.shape[3]], full, piece)


@gluon.jit
def make_values(make, V_COLUMNS: gl.constexpr):
    """Load each tile of values; turn rows, and columns that begin at any key, into what wgmma takes."""
    tiles, jobs, s_raw, raw_full, barriers, v_map, raw_map = make
    _, _, _, _, _, _, s_k, _, s_v = tiles
    _, _, _, _, v_full, _ = barriers
    STAGES: gl.constexpr = s_k.shape[0]
    BLOCK_N: gl.constexpr = s_k.shape[2]
    V: gl.constexpr = s_v.shape[2]
    RAW_STAGES: gl.constexpr = raw_full.shape[0]
    PIECES: gl.constexpr = s_raw.shape[0] // RAW_STAGES
    step = gl.program_id(0) * 0
    turn = step
    on_its_way = step
    row, _, count, _, h, next_row = _next_job(jobs, step)
    while count > 0:
        full = v_full.index(step % STAGES)
        s_values = s_v.index(step % STAGES)
        if V_COLUMNS and row % CHUNK == 0:
            mbarrier.expect(full, BLOCK_N * V)
            tma_load(v_map, [h, 0, row], full, s_values)
        else:
            if on_its_way == 0:
                _load_raw(raw_map, s_raw, raw_full, turn, h, row, V_COLUMNS)
            if RAW_STAGES > 1:
                on_its_way = gl.where(next_row >= 0, 1, 0)
                if next_row >= 0:
                    _load_raw(raw_map, s_raw, raw_full, turn + 1, h, next_row, V_COLUMNS)
            mbarrier.wait(raw_full.index(turn % RAW_STAGES), turn // RAW_STAGES & 1)
            first_piece = turn % RAW_STAGES * PIECES
            if V_COLUMNS:
                shift_values(s_values, s_raw, first_piece, PIECES, row)
            else:
                transpose_values(s_values, s_raw, first_piece, PIECES)
            mbarrier.arrive(full)
            turn += 1
        step += 1
        row, _, count, _, h, next_row = _next_job(jobs, step)
