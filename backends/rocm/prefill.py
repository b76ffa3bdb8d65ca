"""Prefill on CDNA: ``cdna/prefill.hip``, flash attention on MFMA."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from ctypes import Structure, c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mla import mask_code
from mla.backends import params
from mla.backends.params import (
    C_TYPES,
    HeadRows,
    PagedRows,
    PageTable,
    SequenceArgs,
    head_rows,
    usual_fp8_prefills,
    usual_prefills,
    usual_prefills_beside_fp8,
)
from mla.backends.rocm import runtime
from mla.backends.rocm.compiler import KernelSpec, fp8_name
from mla.errors import ArgumentError
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM, SUPPORTED_DIMS, PrefillArgs, Problem

if TYPE_CHECKING:
    import torch

ROPE_KINDS = ("paged", "batched", "ragged")
_WAVE = 64
_ROWS_PER_WAVE = 32
#: Workgroups along y at most; HIP takes fewer than 65,536.
_MAX_GRID_Y = 65535
#: Bytes between rows of k, v, rope and scales, or columns of a transposed v: below it a tile's offsets fit 32 bits.
MAX_STRIDE = 1 << 24
#: Bytes between pages of the rope and its scales.
MAX_PAGE_STRIDE = 1 << 32
#: LDS of a workgroup.
LDS_BYTES = {"gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}


@dataclass(frozen=True)
class Tile:
    """Shape of the kernel.

    Attributes
    ----------
    waves : int
        Waves of a workgroup, 32 queries each.
    waves_per_simd : int
        Waves that the registers are shared out for.
    block_n : int
        Keys of a tile.
    key_bytes, value_bytes : int
        Of one key in LDS.
    """

    waves: int
    waves_per_simd: int
    block_n: int
    key_bytes: int
    value_bytes: int

    @property
    def block_m(self) -> int:
        return _ROWS_PER_WAVE * self.waves

    @property
    def lds_bytes(self) -> int:
        """LDS of a workgroup: two stages of keys and values."""
        return 2 * self.block_n * (self.key_bytes + self.value_bytes)


def tile_of(problem: Problem, arch: str) -> Tile:
    """Choose the tile: two waves a SIMD where their registers suffice, 64 keys of 8 bits where LDS holds them."""
    waves, waves_per_simd = (8, 2) if problem.dims == (192, 128) else (4, 1)
    element, rope = (1, 1 if problem.dtypes == "fp8" else 2) if problem.dtypes.startswith("fp8") else (2, 2)
    row = problem.qk_nope_head_dim * element + QK_ROPE_HEAD_DIM * rope, problem.v_head_dim * element
    small = Tile(waves, waves_per_simd, 32, *row)
    large = replace(small, block_n=64)
    return large if element == 1 and large.lds_bytes <= LDS_BYTES[arch] else small


class RowScales(Structure):
    """One f32 a row, stride in bytes."""

    _fields_ = [("data", c_void_p), ("stride", c_longlong)]


class ScoreScale(Structure):
    """``prefill_softmax.hpp``: factors from raw scores to base-2 logits."""

    _fields_ = [("logit", c_float), ("softcap_scale", c_float), ("softcap_logit", c_float)]


class PrefillParams(Structure):
    """Parameter block of ``cdna/prefill.hip``."""

    _fields_ = [
        ("q", HeadRows),
        ("q_rope", HeadRows),
        ("k", HeadRows),
        ("v", HeadRows),
        ("output", HeadRows),
        ("rope", PagedRows),
        ("rope_scales", PagedRows),
        ("q_scale", RowScales),
        ("k_scales", RowScales),
        ("v_scale", RowScales),
        ("page_table", PageTable),
        ("sequences", SequenceArgs),
        ("mask", mask_code.MaskArgs),
        ("lse", c_void_p),
        ("lse_token_stride", c_longlong),
        ("lse_head_stride", c_longlong),
        ("sinks", c_void_p),
        ("scale", ScoreScale),
        ("batch_size", c_int),
        ("slots_y", c_int),
    ]


def _value_rows(v: torch.Tensor, transposed: bool) -> HeadRows:
    """Describe [L, H, dv]; of transposed values the first stride is that of a column."""
    return HeadRows(v.data_ptr(), v.stride(2), v.stride(1)) if transposed else head_rows(v)


def _row_scales(scales: torch.Tensor | None) -> RowScales:
    """Describe [n, 1] or [n] scales; one element stands for all."""
    if scales is None:
        return RowScales()
    return RowScales(scales.data_ptr(), scales.stride(0) * scales.element_size() if scales.numel() > 1 else 0)


def _rows_of(tensor: torch.Tensor | None, kind: str) -> PagedRows:
    """Describe rope or its scales: [B, n, width] or [L, width]."""
    if tensor is None:
        return PagedRows()
    size = tensor.element_size()
    batch_stride = tensor.stride(0) * size if kind == "batched" else 0
    return PagedRows(tensor.data_ptr(), batch_stride, tensor.stride(-2) * size)


def _rope_rows(args: PrefillArgs, granularity: int) -> tuple[PagedRows, PagedRows, PageTable]:
    """Rope, the scale of each of its rows (of an 8-bit one), and the page table."""
    cache = args.cache
    if cache is None:
        rope, scales = (_rows_of(tensor, args.rope_kind) for tensor in (args.rope, args.rope_scales))
        table, scaled, column = PageTable(), args.rope_scales, args.rope_scale_base
    else:
        rope, table = params.paged_rows(cache.rope), params.page_table(cache)
        scaled, column = cache.scales, KV_LORA_RANK
        scales = PagedRows() if scaled is None else params.paged_rows(scaled)
    if granularity and scaled is not None:
        scales.data = (scales.data or 0) + column // granularity * scaled.element_size()  # None: no rows
    return rope, scales, table


def _check_strides(args: PrefillArgs, transposed: bool) -> None:
    cache = args.cache
    rope, rope_scales = (args.rope, args.rope_scales) if cache is None else (cache.rope, cache.scales)
    limits = [
        ("k", args.k, 0, "rows", MAX_STRIDE),
        ("v", args.v, 2 if transposed else 0, "columns" if transposed else "rows", MAX_STRIDE),
        ("k_scales", args.k_scales, 0, "rows", MAX_STRIDE),
        ("v_scale", args.v_scale, 0, "rows", MAX_STRIDE),
    ]
    for name, tensor in (("k_rope", rope), ("the scales of k_rope", rope_scales)):
        limits.append((name, tensor, -2, "rows", MAX_STRIDE))
        if cache is not None:
            limits.append((name, tensor, 0, "pages", MAX_PAGE_STRIDE))
    for name, tensor, axis, parts, limit in limits:
        stride = 0 if tensor is None or tensor.shape[axis] < 2 else tensor.stride(axis) * tensor.element_size()
        if stride >= limit:
            raise ArgumentError(f"{name}: {parts} lie {stride} bytes apart; the rocm prefill takes less than {limit}")


def score_scale(softmax_scale: float, softcap: float) -> ScoreScale:
    """Fold log2(e) into the factors of the scores."""
    log2e = math.log2(math.e)
    if softcap:
        return ScoreScale(0.0, 2 * log2e * softmax_scale / softcap, log2e * softcap)
    return ScoreScale(log2e * softmax_scale, 0.0, 0.0)


@functools.lru_cache(maxsize=512)
def prefill_spec(problem: Problem, arch: str, scaled_values: bool) -> KernelSpec:
    """Describe the kernel; ``scaled_values``: each row of v has a scale of its own."""
    assert problem.mask is not None and problem.rope is not None
    tile = tile_of(problem, arch)
    element, _, rope = problem.dtypes.partition("+")
    narrow = fp8_name(arch)
    rope = {"fp8_rope": narrow, "bf16_rope": "bf16", "": narrow if element == "fp8" else element}[rope]
    features = sorted(problem.features & {"lse", "sinks", "softcap"})
    compiled_in = {
        "v_transposed": "v_transposed" in problem.features,
        "rope_prescaled": "rope_prescaled" in problem.features,
        "v_scaled_rows": scaled_values,
    }
    name = ".".join(
        (
            f"prefill.{problem.dtypes}_{problem.out_dtype}.d{problem.dims[0]}x{problem.dims[1]}",
            f"{problem.rope}{problem.page_size or ''}",
            "-".join([*features, *(key for key, value in compiled_in.items() if value)]) or "plain",
            problem.mask.key,
        )
    )
    defines: tuple[tuple[str, int | str], ...] = (
        ("MLA_ELEMENT", C_TYPES[narrow if element == "fp8" else element]),
        ("MLA_ROPE", C_TYPES[rope]),
        ("MLA_OUTPUT", C_TYPES[problem.out_dtype]),
        ("MLA_NOPE_DIM", problem.qk_nope_head_dim),
        ("MLA_V_DIM", problem.v_head_dim),
        ("MLA_BLOCK_N", tile.block_n),
        ("MLA_ROPE_KIND", ROPE_KINDS.index(problem.rope)),
        ("MLA_PAGE_SIZE", max(problem.page_size, 1)),
        ("MLA_WAVES_PER_SIMD", tile.waves_per_simd),
        *((f"MLA_{feature.upper()}", int(feature in features)) for feature in ("lse", "sinks", "softcap")),
        *((f"MLA_{key.upper()}", int(value)) for key, value in compiled_in.items()),
    )
    return KernelSpec(
        name,
        "cdna/prefill.hip",
        "mla_prefill",
        PrefillParams,
        tile.waves * _WAVE,
        defines,
        (("mask.hpp", mask_code.c_source(problem.mask)),),
    )


class Prefill:
    """Prefill on an AMD GPU with MFMA: operands of 16 bits or, with scales, of 8; any mask, page size, heads."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return why the tile does not fit, or None."""
        if arch == "gfx90a" and problem.dtypes.startswith("fp8"):
            return "gfx90a multiplies no fp8 matrices; gfx942 and gfx950 do"
        if problem.page_size >= MAX_STRIDE:
            return f"pages have {problem.page_size} tokens, less than {MAX_STRIDE} are taken"
        need, have = tile_of(problem, arch).lds_bytes, LDS_BYTES[arch]
        return None if need <= have else f"needs {need} bytes of LDS, {arch} has {have}"

    @staticmethod
    def workspace_bytes(problem: Problem, *, T: int, L: int, B: int, H: int) -> int:
        """Return 0: the kernel needs no workspace."""
        return 0

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead: DeepSeek-V3 and GLM-5 steps in bf16, over fp8 caches, and attended in fp8."""
        for dims in SUPPORTED_DIMS:
            yield from usual_prefills(dims)
        yield from usual_prefills_beside_fp8()
        if arch != "gfx90a":
            yield from usual_fp8_prefills()

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernels: where v has scales, for one a head and for one a row."""
        return tuple(prefill_spec(problem, arch, rows) for rows in (False, True)[: 1 + ("v_scale" in problem.features)])

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PrefillArgs], None]:
        """Compile and load; the result launches.

        The kernel for a v_scale a row is compiled when the first one comes.
        """
        arch = runtime.arch_of(device)
        block_m, transposed = tile_of(problem, arch).block_m, "v_transposed" in problem.features

        @functools.cache
        def kernel(scaled_values: bool) -> runtime.Kernel:
            return runtime.load(prefill_spec(problem, arch, scaled_values), device)

        kernel(False)

        def run(args: PrefillArgs) -> None:
            _check_strides(args, transposed)
            q, lse, v_scale = args.q, args.lse, args.v_scale
            tokens, heads = q.shape[:2]
            batch_size = args.cu_seqlens_q.shape[0] - 1
            slots = tokens // block_m + batch_size  # as the kernel numbers them
            slots_y = min(slots, _MAX_GRID_Y)
            rope, rope_scales, table = _rope_rows(args, problem.granularity)
            block = PrefillParams(
                head_rows(q),
                HeadRows() if args.q_rope is None else head_rows(args.q_rope),
                head_rows(args.k),
                _value_rows(args.v, transposed),
                head_rows(args.output),
                rope,
                rope_scales,
                _row_scales(args.q_scale),
                _row_scales(args.k_scales),
                _row_scales(v_scale),
                table,
                params.sequence_args(args),
                mask_code.c_args(args.mask, q.device),
                params.pointer(lse),
                0 if lse is None else lse.stride(0),
                0 if lse is None else lse.stride(1),
                params.pointer(args.sinks),
                score_scale(args.softmax_scale, args.softcap),
                batch_size,
                slots_y,
            )
            scaled_values = v_scale is not None and v_scale.ndim == 2
            kernel(scaled_values).launch(block, heads, slots_y, -(-slots // slots_y) if slots_y else 0)

        return run
