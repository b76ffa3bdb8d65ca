"""Prefill on Hopper: ``sm90/prefill.cu``, TMA and wgmma. The design is told in docs/hopper.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mla import mask_code
from mla.backends.cuda import prefill_sm90_block as blocks
from mla.backends.cuda.compiler import KernelSpec
from mla.backends.cuda.prefill_sm90_block import PrefillParams, ScheduleParams
from mla.backends.cuda.prefill_sm90_launch import launcher
from mla.backends.cuda.prefill_sm90_workspace import ENTRY_BYTES, TABLE_SEQUENCES, Workspace
from mla.backends.params import C_TYPES, usual_prefills
from mla.mask_expr import postorder
from mla.problem import Again, PrefillArgs, Problem

if TYPE_CHECKING:
    import torch

    from mla.masks import MaskProgram

_ITEM_BYTES = 48
_ROPE_WARPS = 3
_SCHEDULE_THREADS = 1024


@dataclass(frozen=True)
class Tile:
    """What ``prefill_layout.cuh`` calls its tile.

    Attributes
    ----------
    row_groups : int
        Blocks of 64 query rows of an item, with a consumer warpgroup for each.
    block_n : int
        Keys of a tile.
    stages_k, stages_v : int
        Depths of the rings.
    consumer_registers, producer_registers : int
        Of each thread, by setmaxnreg.
    """

    row_groups: int
    block_n: int
    stages_k: int
    stages_v: int
    consumer_registers: int
    producer_registers: int

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and the producer's warpgroup."""
        return 128 * (self.row_groups + 1)

    def shared_bytes(self, dims: tuple[int, int]) -> int:
        """Return the dynamic shared memory of a block; the device asserts the same sum."""
        q_depth, v_head_dim = dims
        rows = 2 * (self.row_groups * 64 + self.stages_k * self.block_n) * q_depth
        values = 2 * self.stages_v * self.block_n * v_head_dim
        if self.stages_v == 1:  # room for a second stage, in the place of a row group's Q
            values += max(0, 2 * (self.block_n * v_head_dim - 64 * q_depth))
        items = 3 * self.row_groups * _ITEM_BYTES
        table = (TABLE_SEQUENCES + 1) * ENTRY_BYTES
        barriers = 2 * self.row_groups + 2 * self.stages_k + 2 * 2 + _ROPE_WARPS
        return 1024 + rows + values + items + table + _ROPE_WARPS * 16 + self.stages_k * 16 + 8 * barriers


_TILE = Tile(3, 128, 2, 1, 160, 32)
#: Softcap and bias take more registers than three warpgroups leave each thread.
_TILE_FEATURES = Tile(2, 128, 2, 2, 216, 72)
_TILE_256 = Tile(2, 64, 2, 2, 216, 72)


def tile_of(problem: Problem) -> Tile:
    """Return the tile of a problem: by dims and features alone, so that a sequence's results depend on nothing else."""
    if problem.dims == (256, 256):
        return _TILE_256
    return _TILE_FEATURES if problem.features & {"softcap", "bias"} else _TILE


class Variant(NamedTuple):
    """What of a call, beside its problem, is compiled in.

    Attributes
    ----------
    chunked : bool
        Keys may begin inside a page, so rope rows may have to be copied one by one.
    positive_scale : bool
        A plain factor in the exponent will do for the scale.
    """

    chunked: bool
    positive_scale: bool


def _shape_defines(problem: Problem) -> tuple[tuple[str, int | str], ...]:
    return (
        ("MLA_ROPE_KIND", ("paged", "batched", "ragged").index(problem.rope or "paged")),
        ("MLA_NOPE_DIM", problem.qk_nope_head_dim),
        ("MLA_V_DIM", problem.v_head_dim),
        ("MLA_ROW_GROUPS", tile_of(problem).row_groups),
    )


def _comparisons(program: MaskProgram) -> int:
    return sum(node.op in ("lt", "le", "eq", "ne") for node in postorder(program.expression))


@functools.lru_cache(maxsize=512)
def prefill_spec(problem: Problem, variant: Variant, *, programmatic: bool = False) -> KernelSpec:
    """Describe the prefill kernel; ``programmatic``: as launched behind the kernel that orders a large batch."""
    assert problem.mask is not None
    tile, features = tile_of(problem), problem.features & {"lse", "sinks", "softcap", "bias"}
    box, gather = tile.block_n, False
    if problem.rope == "paged":
        box = blocks.rope_box(problem.page_size, tile.block_n)
        gather = variant.chunked or box == 0
    scale_scores = not variant.positive_scale or bool(features & {"softcap", "bias"})
    parts = [
        f"prefill.wgmma.{problem.dtypes}_{problem.out_dtype}.d{problem.dims[0]}x{problem.dims[1]}.{problem.rope}",
        f"p{problem.page_size}b{box}{'g' if gather else ''}",
        "-".join(sorted(features)) or "plain",
        *(["scaled"] if scale_scores else []),
        problem.mask.key,
    ]
    defines: tuple[tuple[str, int | str], ...] = (
        ("MLA_ELEMENT", C_TYPES[problem.dtypes]),
        ("MLA_OUTPUT", C_TYPES[problem.out_dtype]),
        ("MLA_PAGE_SIZE", max(problem.page_size, 1)),
        ("MLA_ROPE_BOX", box),
        ("MLA_ROPE_GATHER", int(gather)),
        ("MLA_LSE", int("lse" in features)),
        ("MLA_SINKS", int("sinks" in features)),
        ("MLA_SOFTCAP", int("softcap" in features)),
        ("MLA_SCALE_SCORES", int(scale_scores)),
        ("MLA_MASK_UNROLL", int(_comparisons(problem.mask) <= 1)),
        *_shape_defines(problem),
        ("MLA_BLOCK_N", tile.block_n),
        ("MLA_STAGES_K", tile.stages_k),
        ("MLA_STAGES_V", tile.stages_v),
        ("MLA_CONSUMER_REGISTERS", tile.consumer_registers),
        ("MLA_PRODUCER_REGISTERS", tile.producer_registers),
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
    return KernelSpec(
        name=f"prefill.schedule.d{problem.dims[0]}x{problem.dims[1]}g{tile_of(problem).row_groups}.{problem.rope}",
        source="sm90/prefill_schedule.cu",
        symbol="mla_prefill_schedule",
        params=ScheduleParams,
        threads=_SCHEDULE_THREADS,
        defines=_shape_defines(problem),
    )


def workspace_of(problem: Problem, *, T: int, L: int, B: int, H: int) -> Workspace:
    """Return what a call of these extents needs."""
    row_groups = tile_of(problem).row_groups
    return Workspace.of(T=T, L=L, B=B, H=H, v_head_dim=problem.v_head_dim, row_groups=row_groups)


class PrefillSm90:
    """Prefill by TMA and wgmma; q, k, v, rope and output with addresses and strides of 16 bytes."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: what the registry admits fits."""
        return None

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead: DeepSeek-V3 steps in bf16, whole and in chunks, at the usual page sizes."""
        if arch == "sm_90a":
            yield from usual_prefills()

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernels of one problem at a positive scale, for whole sequences and for chunks."""
        variants = (Variant(chunked, True) for chunked in (False, True))
        return (*dict.fromkeys(prefill_spec(problem, variant) for variant in variants), schedule_spec(problem))

    @staticmethod
    def workspace_bytes(problem: Problem, *, T: int, L: int, B: int, H: int) -> int:
        """Return the bytes of the order of work of a large batch and of results of parts of long sequences."""
        return workspace_of(problem, T=T, L=L, B=B, H=H).bytes

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PrefillArgs], Again | None]:
        """Compile and load for a positive scale and whole sequences; the result launches."""
        return launcher(
            device,
            prefill_spec=lambda variant, programmatic: prefill_spec(problem, variant, programmatic=programmatic),
            schedule_spec=schedule_spec(problem),
            workspace_of=lambda T, L, B, H: workspace_of(problem, T=T, L=L, B=B, H=H),
            make=blocks.make,
            block_n=tile_of(problem).block_n,
            variant_of=lambda args: Variant(args.cache_offsets is not None, args.softmax_scale > 0.0),
            usual=Variant(False, True),
        )
