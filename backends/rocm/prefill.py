"""Prefill on CDNA: ``cdna/prefill.hip``, flash attention on MFMA."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from ctypes import Structure, c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla import mask_code
from mla.backends.rocm import params, runtime
from mla.backends.rocm.compiler import KernelSpec
from mla.backends.rocm.params import C_TYPES, PAGE_SIZES, PagedRows, PageTable, SequenceArgs, fp8_name
from mla.errors import ArgumentError
from mla.masks import CausalMask, NullMask
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM, SUPPORTED_DIMS, PrefillArgs, Problem

if TYPE_CHECKING:
    import torch

ROPE_KINDS = ("paged", "batched", "ragged")
_WAVE = 64
_ROWS_PER_WAVE = 32
#: Keys of a tile.
BLOCK_N = 32
#: Workgroups along y at most; HIP takes fewer than 65,536.
_MAX_GRID_Y = 65535
#: Bytes between rows of k, v and rope: below it a tile's offsets fit 32 bits.
MAX_ROW_STRIDE = 1 << 25
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
    """

    waves: int
    waves_per_simd: int

    @property
    def block_m(self) -> int:
        return _ROWS_PER_WAVE * self.waves

    def lds_bytes(self, dims: tuple[int, int]) -> int:
        """LDS of a workgroup: two stages of keys and values."""
        return 2 * BLOCK_N * sum(dims) * 2


def tile_of(dims: tuple[int, int]) -> Tile:
    """Choose the tile: two waves a SIMD where their registers suffice."""
    return Tile(8, 2) if dims == (192, 128) else Tile(4, 1)


class HeadRows(Structure):
    """[rows, H, width], strides in bytes."""

    _fields_ = [("data", c_void_p), ("token_stride", c_longlong), ("head_stride", c_longlong)]


class ScoreScale(Structure):
    """``prefill_softmax.hpp``: factors from raw scores to base-2 logits."""

    _fields_ = [("logit", c_float), ("softcap_scale", c_float), ("softcap_logit", c_float)]


class PrefillParams(Structure):
    """Parameter block of ``cdna/prefill.hip``."""

    _fields_ = [
        ("q", HeadRows),
        ("k", HeadRows),
        ("v", HeadRows),
        ("output", HeadRows),
        ("rope", PagedRows),
        ("rope_scales", PagedRows),
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


def head_rows(tensor: torch.Tensor) -> HeadRows:
    """Describe [rows, H, width]."""
    size = tensor.element_size()
    return HeadRows(tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(1) * size)


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
        if column % granularity + QK_ROPE_HEAD_DIM > granularity:
            raise ArgumentError(
                f"k_rope: its columns, from {column} of the scaled row on, lie in two blocks of {granularity}; "
                "the rocm prefill takes one scale a key"
            )
        scales.data += column // granularity * scaled.element_size()
    return rope, scales, table


def _check_strides(args: PrefillArgs) -> None:
    rope = args.rope if args.cache is None else args.cache.rope
    assert rope is not None
    for name, tensor, axis in (("k", args.k, 0), ("v", args.v, 0), ("k_rope", rope, -2)):
        stride = tensor.stride(axis) * tensor.element_size()
        if stride >= MAX_ROW_STRIDE:
            raise ArgumentError(
                f"{name}: rows lie {stride} bytes apart; the rocm prefill takes less than {MAX_ROW_STRIDE}"
            )


def score_scale(softmax_scale: float, softcap: float) -> ScoreScale:
    """Fold log2(e) into the factors of the scores."""
    log2e = math.log2(math.e)
    if softcap:
        return ScoreScale(0.0, 2 * log2e * softmax_scale / softcap, log2e * softcap)
    return ScoreScale(log2e * softmax_scale, 0.0, 0.0)


class Prefill:
    """Prefill on an AMD GPU with MFMA: 16-bit q, k, v; rope of 16 bits or 8 with scales; any mask, page size, heads."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return why the tile does not fit, or None."""
        need, have = tile_of(problem.dims).lds_bytes(problem.dims), LDS_BYTES[arch]
        return None if need <= have else f"needs {need} bytes of LDS, {arch} has {have}"

    @staticmethod
    def workspace_bytes(problem: Problem, *, T: int, L: int, B: int, H: int) -> int:
        """Return 0: the kernel needs no workspace."""
        return 0

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead: DeepSeek-V3 steps in bf16, whole and in chunks, at the usual page sizes."""
        for dims in SUPPORTED_DIMS:
            for page_size in PAGE_SIZES:
                for mask in (CausalMask(), NullMask()):
                    for out_dtype, features in (("bf16", ()), ("bf16", ("lse",)), ("fp32", ("lse",))):
                        yield Problem(
                            "prefill", "bf16", out_dtype, dims, page_size, rope="paged", mask=mask.program,
                            features=frozenset(features),
                        )  # fmt: skip

    @staticmethod
    @functools.lru_cache(maxsize=512)
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernel."""
        assert problem.mask is not None and problem.rope is not None
        tile = tile_of(problem.dims)
        element, _, rope = problem.dtypes.partition("+")
        rope = fp8_name(arch) if rope else element
        features = sorted(problem.features & {"lse", "sinks", "softcap"})
        name = ".".join(
            (
                f"prefill.{problem.dtypes}_{problem.out_dtype}.d{problem.dims[0]}x{problem.dims[1]}",
                f"{problem.rope}{problem.page_size or ''}",
                "-".join(features) or "plain",
                problem.mask.key,
            )
        )
        defines: tuple[tuple[str, int | str], ...] = (
            ("MLA_ELEMENT", C_TYPES[element]),
            ("MLA_ROPE", C_TYPES[rope]),
            ("MLA_OUTPUT", C_TYPES[problem.out_dtype]),
            ("MLA_NOPE_DIM", problem.qk_nope_head_dim),
            ("MLA_V_DIM", problem.v_head_dim),
            ("MLA_ROPE_KIND", ROPE_KINDS.index(problem.rope)),
            ("MLA_PAGE_SIZE", max(problem.page_size, 1)),
            ("MLA_WAVES_PER_SIMD", tile.waves_per_simd),
            *((f"MLA_{feature.upper()}", int(feature in features)) for feature in ("lse", "sinks", "softcap")),
        )
        generated = (("mask.hpp", mask_code.c_source(problem.mask)),)
        spec = KernelSpec(
            name, "cdna/prefill.hip", "mla_prefill", PrefillParams, tile.waves * _WAVE, defines, generated
        )
        return (spec,)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PrefillArgs], None]:
        """Compile and load; the result launches."""
        arch = runtime.arch_of(device)
        (spec,) = Prefill.specs(problem, arch)
        kernel = runtime.load(spec, device)
        block_m = tile_of(problem.dims).block_m

        def run(args: PrefillArgs) -> None:
            _check_strides(args)
            q, lse = args.q, args.lse
            tokens, heads = q.shape[:2]
            batch_size = args.cu_seqlens_q.shape[0] - 1
            slots = tokens // block_m + batch_size  # as the kernel numbers them
            slots_y = min(slots, _MAX_GRID_Y)
            rope, rope_scales, table = _rope_rows(args, problem.granularity)
            block = PrefillParams(
                head_rows(q),
                head_rows(args.k),
                head_rows(args.v),
                head_rows(args.output),
                rope,
                rope_scales,
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
            kernel.launch(block, heads, slots_y, -(-slots // slots_y) if slots_y else 0)

        return run
