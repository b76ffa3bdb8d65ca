"""Prefill on Hopper: ``sm90/prefill.cu``, TMA and wgmma."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from ctypes import Structure, c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla import mask_code
from mla.backends.cuda import params, runtime
from mla.backends.cuda.compiler import KernelSpec
from mla.backends.cuda.params import C_TYPES, PAGE_SIZES, PagedRows, PageTable, SequenceArgs
from mla.backends.cuda.runtime import TensorMap, with_tail
from mla.backends.cuda.tensor_map import tensor_map
from mla.mask_expr import postorder
from mla.masks import CausalMask, MaskProgram, NullMask
from mla.problem import QK_ROPE_HEAD_DIM, PrefillArgs, Problem

if TYPE_CHECKING:
    from mla.backends.cuda.runtime import Kernel

#: Sequences of a batch whose order each block works out by itself; more are ordered by a kernel of their own.
TABLE_SEQUENCES = 32
_SCHEDULE_THREADS = 1024
_BLOCKS_MAX = 4096
_ENTRY_BYTES = 32
_ROPE_WARPS = 3


@dataclass(frozen=True)
class Tile:
    """What ``prefill_layout.cuh`` calls its tile: one consumer warpgroup for each of `row_groups` blocks of 64 query rows."""

    row_groups: int
    block_n: int
    stages_k: int
    stages_v: int
    consumer_registers: int
    producer_registers: int

    @property
    def threads(self) -> int:
        return 128 * (self.row_groups + 1)

    def shared_bytes(self, dims: tuple[int, int]) -> int:
        """Dynamic shared memory of a block; the device asserts the same sum."""
        q_depth, v_head_dim = dims
        rows = 2 * (self.row_groups * 64 + self.stages_k * self.block_n) * q_depth
        values = 2 * self.stages_v * self.block_n * v_head_dim
        if self.stages_v == 1:  # room for a second stage, in the place of a row group's Q
            values += max(0, 2 * (self.block_n * v_head_dim - 64 * q_depth))
        items = 3 * self.row_groups * 48
        table = (TABLE_SEQUENCES + 1) * _ENTRY_BYTES
        barriers = 2 * self.row_groups + 2 * self.stages_k + 2 * 2 + _ROPE_WARPS
        return 1024 + rows + values + items + table + _ROPE_WARPS * 16 + self.stages_k * 8 + 8 * barriers

    def defines(self) -> tuple[tuple[str, int], ...]:
        return (
            ("MLA_BLOCK_N", self.block_n),
            ("MLA_STAGES_K", self.stages_k),
            ("MLA_STAGES_V", self.stages_v),
            ("MLA_CONSUMER_REGISTERS", self.consumer_registers),
            ("MLA_PRODUCER_REGISTERS", self.producer_registers),
        )


_TILE = Tile(3, 128, 2, 1, 160, 32)
#: Softcap and bias take more registers than three warpgroups leave each thread.
_TILE_FEATURES = Tile(2, 128, 2, 2, 216, 72)
_TILE_256 = Tile(2, 64, 2, 2, 216, 72)


def tile_of(problem: Problem) -> Tile:
    """Return the tile of a problem: by dims and features alone, so that a sequence's results depend on nothing else."""
    if problem.dims == (256, 256):
        return _TILE_256
    return _TILE_FEATURES if problem.features & {"softcap", "bias"} else _TILE


class ScheduleParams(Structure):
    """Parameter block of ``sm90/prefill_schedule.cu``."""

    _fields_ = [("sequences", SequenceArgs), ("table", c_void_p), ("batch", c_int), ("heads", c_int), ("grid", c_int)]


class PrefillParams(Structure):
    """Parameter block of ``sm90/prefill.cu``."""

    _fields_ = with_tail(
        [
            ("q", TensorMap),
            ("k", TensorMap),
            ("v", TensorMap),
            ("rope", TensorMap),
            ("sequences", SequenceArgs),
            ("page_table", PageTable),
            ("rope_rows", PagedRows),
            ("mask", params.MaskArgs),
            ("output", c_void_p),
            ("lse", c_void_p),
            ("sinks", c_void_p),
            ("table", c_void_p),
            ("counters", c_void_p),
            ("output_stride_t", c_longlong),
            ("output_stride_h", c_longlong),
            ("lse_stride_t", c_longlong),
            ("lse_stride_h", c_longlong),
            ("logit_scale", c_float),
            ("softcap_scale", c_float),
            ("softcap_logit", c_float),
            ("batch", c_int),
            ("heads", c_int),
        ]
    )


@dataclass(frozen=True)
class Variant:
    """What of a call, beside its problem, is compiled in.

    Attributes
    ----------
    rope_box : int
        Rope rows of one TMA box; 0 where pages allow none.
    rope_gather : bool
        Rope rows may have to be copied one by one.
    scale_scores : bool
        Scores are scaled before the maxima: always with softcap or bias, else for a scale that is not positive.
    """

    rope_box: int
    rope_gather: bool
    scale_scores: bool


def variant_of(problem: Problem, *, chunked: bool, positive_scale: bool) -> Variant:
    """Choose the variant: ``chunked`` when keys may begin inside a page."""
    block_n = tile_of(problem).block_n
    scale_scores = not positive_scale or bool(problem.features & {"softcap", "bias"})
    if problem.rope != "paged":
        return Variant(block_n, False, scale_scores)
    box = math.gcd(problem.page_size, block_n)
    box = 0 if box % 8 else box
    return Variant(box, chunked or not box, scale_scores)


def _comparisons(program: MaskProgram) -> int:
    return sum(node.op in ("lt", "le", "eq", "ne") for node in postorder(program.expression))


def _shape_defines(problem: Problem) -> tuple[tuple[str, int | str], ...]:
    rope_kind = ("paged", "batched", "ragged").index(problem.rope or "paged")
    return (
        ("MLA_ROPE_KIND", rope_kind),
        ("MLA_NOPE_DIM", problem.qk_nope_head_dim),
        ("MLA_V_DIM", problem.v_head_dim),
        ("MLA_ROW_GROUPS", tile_of(problem).row_groups),
    )


@functools.lru_cache(maxsize=512)
def prefill_spec(problem: Problem, variant: Variant, *, programmatic: bool) -> KernelSpec:
    """Describe the prefill kernel; ``programmatic``: as launched behind the kernel that orders a large batch."""
    assert problem.mask is not None
    tile = tile_of(problem)
    features = sorted(problem.features & {"lse", "sinks", "softcap", "bias"})
    parts = [
        f"prefill.wgmma.{problem.dtypes}_{problem.out_dtype}.d{problem.dims[0]}x{problem.dims[1]}.{problem.rope}",
        f"p{problem.page_size}b{variant.rope_box}{'g' if variant.rope_gather else ''}",
        "-".join(features) or "plain",
        *(["scaled"] if variant.scale_scores else []),
        problem.mask.key,
    ]
    defines: tuple[tuple[str, int | str], ...] = (
        ("MLA_ELEMENT", C_TYPES[problem.dtypes]),
        ("MLA_OUTPUT", C_TYPES[problem.out_dtype]),
        ("MLA_PAGE_SIZE", max(problem.page_size, 1)),
        ("MLA_ROPE_BOX", variant.rope_box),
        ("MLA_ROPE_GATHER", int(variant.rope_gather)),
        ("MLA_LSE", int("lse" in problem.features)),
        ("MLA_SINKS", int("sinks" in problem.features)),
        ("MLA_SOFTCAP", int("softcap" in problem.features)),
        ("MLA_SCALE_SCORES", int(variant.scale_scores)),
        ("MLA_MASK_UNROLL", int(_comparisons(problem.mask) <= 1)),
        *_shape_defines(problem),
        *tile.defines(),
    )
    return KernelSpec(
        name=".".join(parts),
        source="sm90/prefill.cu",
        symbol="mla_prefill",
        params=PrefillParams,
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(problem.dims),
        defines=defines,
        generated=(("mask.cuh", mask_code.c_source(problem.mask)),),
        programmatic=programmatic,
    )


def schedule_spec(problem: Problem) -> KernelSpec:
    """Describe the kernel that orders the sequences of a large batch."""
    name = f"prefill.schedule.d{problem.dims[0]}x{problem.dims[1]}g{tile_of(problem).row_groups}.{problem.rope}"
    return KernelSpec(
        name, "sm90/prefill_schedule.cu", "mla_prefill_schedule", ScheduleParams, _SCHEDULE_THREADS, defines=_shape_defines(problem)
    )


class PrefillSm90:
    """Prefill by TMA and wgmma; k, v, q and rope with strides and addresses of 16 bytes."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: what the registry admits fits."""
        return None

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead: DeepSeek-V3 steps in bf16, whole and in chunks, at the usual page sizes."""
        if arch != "sm_90a":
            return
        for page_size in PAGE_SIZES:
            for mask in (CausalMask(), NullMask()):
                for out_dtype, features in (("bf16", ()), ("bf16", ("lse",)), ("fp32", ("lse",))):
                    yield Problem(
                        "prefill",
                        "bf16",
                        out_dtype,
                        page_size=page_size,
                        rope="paged",
                        mask=mask.program,
                        features=frozenset({"batch_invariant", *features}),
                    )

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernels of one problem at a positive scale: for whole sequences and for chunks."""
        specs = {schedule_spec(problem): None}
        for chunked in (False, True):
            variant = variant_of(problem, chunked=chunked, positive_scale=True)
            specs[prefill_spec(problem, variant, programmatic=False)] = None
        return tuple(specs)

    @staticmethod
    def workspace_bytes(problem: Problem, *, T: int, L: int, B: int, H: int) -> int:  # noqa: N803  (the specification's names)
        """Return the bytes of the order of work of a large batch; small ones need none."""
        return (B + 1) * _ENTRY_BYTES if B > TABLE_SEQUENCES else 0

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PrefillArgs], None]:
        """Compile and load for whole sequences or chunks as calls ask for them; the result launches."""
        block_n = tile_of(problem).block_n
        processors = torch.cuda.get_device_properties(device).multi_processor_count

        @functools.cache
        def kernel(chunked: bool, positive_scale: bool, programmatic: bool) -> Kernel:
            variant = variant_of(problem, chunked=chunked, positive_scale=positive_scale)
            return runtime.load(prefill_spec(problem, variant, programmatic=programmatic), device)

        @functools.cache
        def schedule() -> Kernel:
            return runtime.load(schedule_spec(problem), device)

        kernel(False, True, False)
        #: Parameter blocks by all that goes into them, only read once made: a model calls its layers with the same addresses again and again.
        blocks: dict[tuple[object, ...], PrefillParams] = {}

        def run(args: PrefillArgs) -> None:
            rows, heads = args.q.shape[:2]
            batch = args.cu_seqlens_q.shape[0] - 1
            if rows == 0 or batch == 0:
                return
            grid = min(processors, (-(-rows // 64) + batch) * heads)
            counters = _counters(args.q.device)
            key = (counters.data_ptr(), args.softmax_scale, args.softcap, *_addresses(args))
            block = blocks.get(key)
            if block is None:
                block = _params(args, heads, batch, block_n, counters)
                if len(blocks) >= _BLOCKS_MAX:
                    blocks.clear()
                if not args.mask.biases:
                    blocks[key] = block
            ordered = batch > TABLE_SEQUENCES
            if ordered:
                workspace = args.workspace
                if workspace is None:
                    need = PrefillSm90.workspace_bytes(problem, T=rows, L=args.k.shape[0], B=batch, H=heads)
                    workspace = torch.empty(need, dtype=torch.uint8, device=args.q.device)
                block = PrefillParams.from_buffer_copy(block)
                block.table = workspace.data_ptr()
                schedule().launch(ScheduleParams(block.sequences, block.table, batch, heads, grid), 1)
            kernel(args.cache_offsets is not None, args.softmax_scale > 0.0, ordered).launch(block, grid)

        return run


def _addresses(args: PrefillArgs) -> tuple[object, ...]:
    """Return all that a parameter block holds, without making it: biases apart, which few calls have."""
    q, k, v, output, lse, cache, rope = args.q, args.k, args.v, args.output, args.lse, args.cache, args.rope
    where: tuple[object, ...]
    if cache is not None:
        paged, table = cache.rope, cache.page_table
        where = (
            paged.data_ptr(), paged.shape, paged.stride(), table.data_ptr(), table.stride(0), cache.page_indptr is not None,
            params.pointer(cache.page_indptr), cache.lengths.data_ptr(), cache.lengths_include_new,
        )  # fmt: skip
    else:
        assert rope is not None
        where = (rope.data_ptr(), rope.shape, rope.stride())
    return (
        q.data_ptr(), q.shape, q.stride(), k.data_ptr(), k.shape, k.stride(), v.data_ptr(), v.stride(),
        output.data_ptr(), output.stride(), None if lse is None else (lse.data_ptr(), lse.stride()),
        args.cu_seqlens_q.data_ptr(), args.cu_seqlens_q.shape, args.cu_seqlens_k.data_ptr(), params.pointer(args.cache_offsets),
        params.pointer(args.start_positions), params.pointer(args.kv_lengths), params.pointer(args.sinks),
        *where, *(capture.data_ptr() for capture in args.mask.captures_on(q.device)),
    )  # fmt: skip


def _params(args: PrefillArgs, heads: int, batch: int, block_n: int, counters: torch.Tensor) -> PrefillParams:
    """Fill in the parameter block, apart from the table."""
    logit_scale = args.softmax_scale * math.log2(math.e)
    block = PrefillParams()
    q, output, lse = args.q, args.output, args.lse
    block.q = tensor_map(
        q.data_ptr(), q.dtype, (q.shape[2], heads, q.shape[0]), (2 * q.stride(1), 2 * q.stride(0)), (64, 1, 64)
    )
    block.k, block.v, block.rope = _key_maps(args, block_n, block.q)
    block.sequences = params.sequence_args(args)
    if args.cache is not None:
        block.page_table = params.page_table(args.cache)
        block.rope_rows = params.paged_rows(args.cache.rope)
    block.mask = params.mask_args(args.mask)
    for slot, capture in enumerate(args.mask.captures_on(q.device)):
        block.mask.capture[slot] = capture.data_ptr()
    block.output = output.data_ptr()
    block.output_stride_t, block.output_stride_h = output.stride(0), output.stride(1)
    if lse is not None:
        block.lse = lse.data_ptr()
        block.lse_stride_t, block.lse_stride_h = lse.stride()
    block.sinks = params.pointer(args.sinks)
    block.counters = counters.data_ptr()
    block.logit_scale = logit_scale
    if args.softcap:
        block.softcap_scale = 2.0 * logit_scale / args.softcap
        block.softcap_logit = args.softcap * math.log2(math.e)
    block.batch, block.heads = batch, heads
    return block


def _key_maps(args: PrefillArgs, block_n: int, unused: TensorMap) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Return the descriptors of k, v and rope; of an empty tensor nothing is loaded, and any descriptor will do."""
    k, v = args.k, args.v
    if k.shape[0] == 0:
        return unused, unused, unused
    maps = [
        tensor_map(
            x.data_ptr(), x.dtype, (x.shape[2], x.shape[1], x.shape[0]), (2 * x.stride(1), 2 * x.stride(0)), (64, 1, block_n)
        )
        for x in (k, v)
    ]
    return maps[0], maps[1], _rope_map(args, block_n, unused)


def _rope_map(args: PrefillArgs, block_n: int, unused: TensorMap) -> TensorMap:
    if args.cache is not None:
        rope = args.cache.rope  # [num_pages, P, dr]
        box = math.gcd(rope.shape[1], block_n)
        if box % 8:
            return unused
    else:
        assert args.rope is not None
        rope = args.rope if args.rope_kind == "batched" else args.rope[None]  # [B, n, dr] or [1, L, dr]
        box = block_n
    if rope.numel() == 0:
        return unused
    shape = (QK_ROPE_HEAD_DIM, rope.shape[1], rope.shape[0])
    return tensor_map(rope.data_ptr(), rope.dtype, shape, (2 * rope.stride(1), 2 * rope.stride(0)), (64, box, 1))


_stream_counters: dict[tuple[int, int], torch.Tensor] = {}


def _counters(device: torch.device) -> torch.Tensor:
    """Return two zeroed counters. Kernels leave them zero, so one set serves a stream; a graph has its own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    counters = _stream_counters.get(key)
    if counters is None:
        counters = _stream_counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return counters
