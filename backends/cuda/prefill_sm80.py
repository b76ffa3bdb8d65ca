"""Prefill on every NVIDIA GPU from Ampere on: ``sm80/prefill.cu``, mma.sync and cp.async, rows of any stride."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from ctypes import Structure, c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mla import mask_code
from mla.backends import params
from mla.backends.cuda import runtime
from mla.backends.cuda.compiler import KernelSpec
from mla.backends.params import (
    C_TYPES,
    PagedRows,
    PageTable,
    SequenceArgs,
    usual_fp8_prefills,
    usual_prefills,
    usual_prefills_beside_fp8,
)
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM, Again, PrefillArgs, Problem

if TYPE_CHECKING:
    import torch


#: Bytes of shared memory that one block can have (CUDA C++ Programming Guide, "Compute Capabilities").
SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_87": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90*": 227 << 10,
    "sm_100*": 227 << 10,
    "sm_103*": 227 << 10,
    "sm_12*": 99 << 10,
}
#: What the hardware keeps of an SM's shared memory for each resident block.
_RESERVED_BYTES = 1 << 10
_ITEM_BYTES = 48
_STAGES_K = 2


@dataclass(frozen=True)
class Tile:
    """Shape of the kernel.

    Attributes
    ----------
    warps : int
        Warps of a block.
    warp_rows : int
        Queries of a warp: 32 read keys and values from shared memory half as often as 16, but need twice the registers.
    block_n : int
        Keys of a tile.
    resident : int
        Blocks that an SM is to hold at once.
    """

    warps: int
    warp_rows: int
    block_n: int
    resident: int

    @property
    def block_m(self) -> int:
        return self.warps * self.warp_rows

    def halved(self) -> Tile:
        """Return the tile of half as many queries; it gives the same bits, because keys are taken in the same steps."""
        if self.warp_rows > 16:
            return replace(self, warp_rows=self.warp_rows // 2)
        return replace(self, warps=self.warps // 2)

    def shared_bytes(self, problem: Problem, *, value_scales: bool = True) -> int:
        """Dynamic shared memory of a block; the device asserts the same sum.

        A rope lies there in 16 bits, fp8 rows as they are, scales behind their rows; ``value_scales`` of each row of an
        fp8 v.
        """
        fp8 = problem.dtypes.startswith("fp8")
        size, scale = (1, 4) if fp8 else (2, 0)
        row = problem.qk_nope_head_dim * size + 2 * QK_ROPE_HEAD_DIM
        key = row + (4 if "fp8" in problem.dtypes else 0) + (scale if value_scales else 0)
        keys = _STAGES_K * self.block_n * key + self.block_n * problem.v_head_dim * size
        return self.block_m * (row + scale) + keys + _ITEM_BYTES

    def accumulators(self, dims: tuple[int, int]) -> int:
        """Registers of a thread that hold scores and output."""
        return self.warp_rows * (self.block_n + dims[1]) // 32

    def fits(self, problem: Problem, limit: int) -> bool:
        """Tell whether an SM whose blocks can have ``limit`` bytes each holds the resident blocks."""
        return self.resident * (self.shared_bytes(problem) + _RESERVED_BYTES) <= limit + _RESERVED_BYTES


#: By dims, the best first: two blocks that overlap each other's softmax and products where they fit.
TILES = {
    (192, 128): (
        Tile(4, 32, 64, 2),
        Tile(8, 32, 64, 1),
        Tile(4, 32, 32, 2),
        Tile(8, 16, 64, 1),
        Tile(8, 16, 32, 1),
    ),
    (256, 256): (Tile(8, 16, 64, 1), Tile(4, 16, 32, 1)),
}
#: The addresses of a bias, values transposed byte by byte and fp8 that is widened by arithmetic need registers that the
#: largest tile does not leave.
_MOST_ACCUMULATORS_WITH_COMPANY = 160
_WITHOUT_FP8_CONVERSION = ("sm_80", "sm_86", "sm_87")
#: Architectures whose mma.sync multiplies e4m3; on others ptxas would widen the operands of each warp anew.
FP8_MMA_ARCHS = ("sm_89", "sm_12*")


def shared_limit(arch: str) -> int:
    """Return the shared memory of a block in bytes; 0 for an architecture that is not in `SHARED_BYTES`."""
    return next((limit for pattern, limit in SHARED_BYTES.items() if fnmatchcase(arch, pattern)), 0)


def tile_of(problem: Problem, arch: str) -> Tile | None:
    """Choose the first tile that fits the registers and the shared memory of an architecture."""
    by_arithmetic = problem.dtypes.startswith("fp8") and arch in _WITHOUT_FP8_CONVERSION
    by_bytes = "v_transposed" in problem.features and problem.alignment < 16
    company = by_arithmetic or by_bytes or "bias" in problem.features
    for tile in TILES[problem.dims]:
        spacious = not company or tile.accumulators(problem.dims) <= _MOST_ACCUMULATORS_WITH_COMPANY
        if spacious and tile.fits(problem, shared_limit(arch)):
            return tile
    return None


def multiplies_fp8(problem: Problem, arch: str) -> bool:
    """Tell whether fp8 operands are multiplied as they are; with wider values a tile's sums do not fit beside O."""
    own = any(fnmatchcase(arch, pattern) for pattern in FP8_MMA_ARCHS)
    return own and problem.dtypes.startswith("fp8") and problem.v_head_dim <= 128


class OperandScales(Structure):
    """``sm80/prefill_layout.cuh``: scales of fp8 operands."""

    _fields_ = [
        ("q", c_void_p),
        ("q_stride", c_longlong),
        ("k", c_void_p),
        ("k_stride", c_longlong),
        ("v", c_void_p),
        ("v_stride", c_longlong),
        ("rope", PagedRows),
    ]


class _Scalars(Structure):
    """All of `PrefillParams` but the mask's arguments, which few calls have."""

    _fields_ = [
        ("q", c_void_p),
        ("q_stride_t", c_longlong),
        ("q_stride_h", c_longlong),
        ("q_rope", c_void_p),
        ("q_rope_stride_t", c_longlong),
        ("q_rope_stride_h", c_longlong),
        ("k", c_void_p),
        ("k_stride_t", c_longlong),
        ("k_stride_h", c_longlong),
        ("v", c_void_p),
        ("v_stride_t", c_longlong),
        ("v_stride_h", c_longlong),
        ("output", c_void_p),
        ("output_stride_t", c_longlong),
        ("output_stride_h", c_longlong),
        ("lse", c_void_p),
        ("lse_stride_t", c_longlong),
        ("lse_stride_h", c_longlong),
        ("sinks", c_void_p),
        ("sequences", SequenceArgs),
        ("page_table", PageTable),
        ("rope", PagedRows),
        ("scales", OperandScales),
        ("logit_scale", c_float),
        ("softcap_scale", c_float),
        ("softcap_logit", c_float),
        ("batch", c_int),
        ("heads", c_int),
    ]


class PrefillParams(Structure):
    """Parameter block of ``sm80/prefill.cu``."""

    _fields_ = [*_Scalars._fields_, ("mask", mask_code.MaskArgs)]


_pack = params.packer(_Scalars)


@functools.lru_cache(maxsize=512)
def prefill_spec(
    problem: Problem, tile: Tile, *, positive_scale: bool, value_scales: bool = False, fp8_mma: bool = False
) -> KernelSpec:
    """Describe the kernel.

    Softcap, bias or a scale that is not positive have scores scaled before the maxima; ``value_scales`` says that each
    row of an fp8 v has one, ``fp8_mma`` that fp8 operands are multiplied as they are.
    """
    assert problem.mask is not None and problem.rope is not None
    data, _, rope = problem.dtypes.partition("+")
    element = "bf16" if data == "fp8" else data
    rope = rope.removesuffix("_rope") or data
    prescaled = "rope_prescaled" in problem.features
    features = problem.features & {"lse", "sinks", "softcap", "bias"}
    scale_scores = not positive_scale or bool(features & {"softcap", "bias"})
    parts = [
        f"prefill.mma.{problem.dtypes}_{problem.out_dtype}.d{problem.dims[0]}x{problem.dims[1]}.{problem.rope}",
        f"p{problem.page_size}a{problem.alignment}m{tile.block_m}n{tile.block_n}",
        "-".join(sorted(features)) or "plain",
        *(["scaled"] if scale_scores else []),
        *(["prescaled"] if prescaled else []),
        *(["rows"] if value_scales else []),
        *(["mma"] if fp8_mma else []),
        *(["transposed"] if "v_transposed" in problem.features else []),
        problem.mask.key,
    ]
    defines: tuple[tuple[str, int | str], ...] = (
        ("MLA_ELEMENT", C_TYPES[element]),
        ("MLA_DATA", C_TYPES[data]),
        ("MLA_ROPE", C_TYPES[rope]),
        ("MLA_OUTPUT", C_TYPES[problem.out_dtype]),
        ("MLA_NOPE_DIM", problem.qk_nope_head_dim),
        ("MLA_V_DIM", problem.v_head_dim),
        ("MLA_ROPE_KIND", ("paged", "batched", "ragged").index(problem.rope)),
        ("MLA_PAGE_SIZE", max(problem.page_size, 1)),
        ("MLA_ALIGNMENT", problem.alignment),
        ("MLA_LSE", int("lse" in features)),
        ("MLA_SINKS", int("sinks" in features)),
        ("MLA_SOFTCAP", int("softcap" in features)),
        ("MLA_SCALE_SCORES", int(scale_scores)),
        ("MLA_ROPE_PRESCALED", int(prescaled)),
        ("MLA_VALUE_SCALES", int(value_scales)),
        ("MLA_V_TRANSPOSED", int("v_transposed" in problem.features)),
        ("MLA_FP8_MMA", int(fp8_mma)),
        ("MLA_WARPS", tile.warps),
        ("MLA_WARP_ROWS", tile.warp_rows),
        ("MLA_BLOCK_N", tile.block_n),
        ("MLA_RESIDENT", tile.resident),
    )
    return KernelSpec(
        name=".".join(parts),
        source="sm80/prefill.cu",
        symbol="mla_prefill",
        params=PrefillParams,
        threads=32 * tile.warps,
        shared_bytes=tile.shared_bytes(problem, value_scales=value_scales),
        defines=defines,
        generated=(("mask.cuh", mask_code.c_source(problem.mask)),),
    )


class PrefillSm80:
    """Prefill by mma.sync; any strides whose last dim is contiguous."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Refuse an architecture whose shared memory holds no tile."""
        if tile_of(problem, arch) is not None:
            return None
        least = min(tile.shared_bytes(problem) for tile in TILES[problem.dims])
        return f"needs {least:,} bytes of shared memory a block, and {arch} has {shared_limit(arch):,}"

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead: DeepSeek-V3 steps, on Hopper those that its own kernels do not serve."""
        yield from usual_prefills_beside_fp8()
        if arch != "sm_90a":
            yield from usual_prefills()
            yield from usual_fp8_prefills()

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernels of one problem at a positive scale, tall and short; none where no tile fits."""
        tall = tile_of(problem, arch)
        tiles = () if tall is None else (tall, tall.halved())
        fp8_mma = multiplies_fp8(problem, arch)
        return tuple(prefill_spec(problem, tile, positive_scale=True, fp8_mma=fp8_mma) for tile in tiles)

    @staticmethod
    def workspace_bytes(problem: Problem, *, T: int, L: int, B: int, H: int) -> int:
        """Return 0: blocks find their work in the offsets of the batch."""
        return 0

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PrefillArgs], Again | None]:
        """Compile and load for a positive scale and values of one scale a head, for others when a call has them.

        The result launches. Calls that would leave processors idle, and those of short sequences, take tiles of half
        the height.
        """
        arch = runtime.arch_of(device)
        tall = tile_of(problem, arch)
        assert tall is not None, "dispatch asks check() first"
        short = tall.halved()
        blocks_at_once = runtime.properties(device).multi_processor_count * tall.resident

        @functools.cache
        def kernel(tile: Tile, positive_scale: bool, value_scales: bool) -> runtime.Kernel:
            options = {"positive_scale": positive_scale, "value_scales": value_scales}
            return runtime.load(prefill_spec(problem, tile, fp8_mma=multiplies_fp8(problem, arch), **options), device)

        for tile in (tall, short):
            kernel(tile, True, False)

        def run(args: PrefillArgs) -> Again | None:
            rows, heads = args.q.shape[:2]
            batch = args.cu_seqlens_q.shape[0] - 1
            if rows == 0 or batch == 0:
                return None
            few = (rows // tall.block_m + batch) * heads <= blocks_at_once
            tile = short if few or args.max_seqlen_q <= short.block_m else tall
            slots = rows // tile.block_m + batch
            value_scales = args.v_scale is not None and args.v_scale.ndim == 2
            params = _params(args, problem.granularity, batch, heads)
            return kernel(tile, args.softmax_scale > 0.0, value_scales).launch(params, slots * heads)

        return run


def _params(args: PrefillArgs, granularity: int, batch: int, heads: int) -> bytes:
    """Make the parameter block; strides in elements, those of rope and its scales in bytes."""
    logit_scale = args.softmax_scale * math.log2(math.e)
    cache, rope, mask = args.cache, args.rope, args.mask
    if cache is not None:
        table, rows = params.table_fields(cache), cache.rope
    else:
        assert rope is not None
        table, rows = (0, 0, 0), rope if args.rope_kind == "batched" else rope[None]
    scalars = _pack(
        *_row_fields(args.q),
        *((0, 0, 0) if args.q_rope is None else _row_fields(args.q_rope)),
        *_row_fields(args.k),
        *(_row_fields(args.v) if args.v.stride(2) == 1 else (args.v.data_ptr(), args.v.stride(2), args.v.stride(1))),
        *_row_fields(args.output),
        *((0, 0, 0) if args.lse is None else (args.lse.data_ptr(), *args.lse.stride())),
        params.pointer(args.sinks) or 0,
        *params.sequence_fields(args),
        *table,
        *params.row_fields(rows, rows.element_size()),
        *(_scale_fields(args, granularity) if granularity or args.q_scale is not None else _NO_SCALES),
        logit_scale,
        2.0 * logit_scale / args.softcap if args.softcap else 0.0,
        args.softcap * math.log2(math.e),
        batch,
        heads,
    )
    plain = not (mask.program.captures or mask.program.biases)
    return scalars + (_PLAIN_MASK if plain else bytes(mask_code.c_args(mask, args.q.device)))


_PLAIN_MASK = bytes(mask_code.MaskArgs())
_NO_SCALES = (0,) * 9


def _scale_fields(args: PrefillArgs, granularity: int) -> tuple[int, ...]:
    """Return the scalars of an `OperandScales`; one scale of v for all heads has stride 0."""
    fields: list[int] = []
    for scale in (args.q_scale, args.k_scales, args.v_scale):
        fields += (0, 0) if scale is None else (scale.data_ptr(), scale.stride(0) if scale.shape[0] > 1 else 0)
    return (*fields, *(_rope_scale_fields(args, granularity) if granularity else (0, 0, 0)))


def _rope_scale_fields(args: PrefillArgs, granularity: int) -> tuple[int, int, int]:
    """Return the scalars of the `PagedRows` of the rope's scales, one a row: that of the rope's block of columns."""
    if args.cache is not None:
        scales, column = args.cache.scales, KV_LORA_RANK
    else:
        scales, column = args.rope_scales, args.rope_scale_base
        assert scales is not None
        scales = scales if args.rope_kind == "batched" else scales[None]
    data, page_stride, token_stride = params.row_fields(scales, 4)
    return data + column // granularity * 4, page_stride, token_stride


def _row_fields(rows: torch.Tensor) -> tuple[int, int, int]:
    """Return address and both outer strides of [T, H, width] rows, in elements."""
    stride_t, stride_h, _ = rows.stride()
    return rows.data_ptr(), stride_t, stride_h
