"""Prefill in fp8 on Hopper: ``sm90/prefill_fp8.cu``. The design is told in docs/hopper.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mla import mask_code
from mla.backends.cuda import prefill_fp8_sm90_block as blocks
from mla.backends.cuda.compiler import KernelSpec
from mla.backends.cuda.prefill_fp8_sm90_block import PrefillParams
from mla.backends.cuda.prefill_sm90 import schedule_spec, workspace_of
from mla.backends.cuda.prefill_sm90_launch import launcher
from mla.backends.cuda.prefill_sm90_workspace import ENTRY_BYTES, TABLE_SEQUENCES
from mla.backends.params import C_TYPES, usual_fp8_prefills
from mla.mask_expr import postorder
from mla.problem import Again, PrefillArgs, Problem

if TYPE_CHECKING:
    import torch

    from mla.masks import MaskProgram

_BLOCK_N = 128
_ITEM_BYTES = 48
_KNOWN_TILES = 256


@dataclass(frozen=True)
class Tile:
    """What ``prefill_fp8_layout.cuh`` calls its tile.

    Attributes
    ----------
    row_groups : int
        Blocks of 64 query rows of an item, with a consumer warpgroup for each.
    stages_k, stages_v, stages_raw : int
        Depths of the rings of K, of V^T and of rows of V that are still to be transposed.
    consumer_registers, producer_registers : int
        Of each thread, by setmaxnreg.
    """

    row_groups: int
    stages_k: int
    stages_v: int
    stages_raw: int
    consumer_registers: int
    producer_registers: int

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and the producer's warpgroup."""
        return 128 * (self.row_groups + 1)

    def shared_bytes(self, *, rope_size: int, ones: bool, value_scales: bool) -> int:
        """Return the dynamic shared memory of a block; the device asserts the same sum.

        Parameters
        ----------
        rope_size : int
            Bytes of an element of the rope.
        ones : bool
            Whether row sums come from a column of ones.
        value_scales : bool
            Whether each key has a scale of its V.
        """
        row = 128 + 64 * rope_size
        rows = (64 * self.row_groups + _BLOCK_N * self.stages_k) * row
        values = self.stages_v * _BLOCK_N * (128 + 8 * ones) + self.stages_raw * _BLOCK_N * 128
        scales = self.stages_k * (2 + value_scales) * _BLOCK_N * 4
        scales += 4 * 64 * self.row_groups
        small = (
            8 * _KNOWN_TILES
            + self.stages_k * (2 * 16 + 32)
            + 3 * self.row_groups * _ITEM_BYTES
            + (TABLE_SEQUENCES + 1) * ENTRY_BYTES
        )
        barriers = 2 * self.row_groups + 3 * self.stages_k + 3 * self.stages_v + 2 * self.stages_raw
        return 1024 + rows + values + scales + small + 8 * barriers + 8


def tile_of(problem: Problem) -> Tile:
    """Return the tile of a problem: by features alone, so that a sequence's results depend on nothing else."""
    raw = 0 if "v_transposed" in problem.features else 2
    stages_k = 3 if raw and problem.dtypes == "fp8+bf16_rope" else 4
    if problem.features & {"softcap", "bias"}:  # more registers than three warpgroups leave each thread
        return Tile(2, stages_k, 2, raw, 216, 72)
    return Tile(3, stages_k, 2, raw, 160, 32)


class Variant(NamedTuple):
    """What of a call, beside its problem, is compiled in.

    Attributes
    ----------
    chunked : bool
        Keys may begin inside a page, so rope rows may have to be copied one by one.
    value_scales : bool
        v_scale is one a key.
    """

    chunked: bool
    value_scales: bool


def _comparisons(program: MaskProgram) -> int:
    return sum(node.op in ("lt", "le", "eq", "ne") for node in postorder(program.expression))


@functools.lru_cache(maxsize=512)
def prefill_spec(problem: Problem, variant: Variant, *, programmatic: bool = False) -> KernelSpec:
    """Describe the prefill kernel; ``programmatic``: as launched behind the kernel that orders a large batch."""
    assert problem.mask is not None
    tile, features = tile_of(problem), problem.features & {"lse", "sinks", "softcap", "bias"}
    transposed, prescaled = "v_transposed" in problem.features, "rope_prescaled" in problem.features
    box, copy = 64, False
    if problem.rope == "paged":
        box = blocks.rope_box(problem.page_size)
        copy = variant.chunked or box == 0
    scaled = "v_scale" in problem.features
    rope = "e4m3" if problem.dtypes == "fp8" else "bf16"
    parts = [
        f"prefill.fp8.{rope}{'-prescaled' if prescaled else ''}_{problem.out_dtype}.{problem.rope}",
        f"p{problem.page_size}b{box}{'c' if copy else ''}",
        f"v{'t' if transposed else 'r'}{'k' if variant.value_scales else 's' if scaled else ''}",
        "-".join(sorted(features)) or "plain",
        problem.mask.key,
    ]
    defines: tuple[tuple[str, int | str], ...] = (
        ("MLA_ROPE", rope),
        ("MLA_ROPE_PRESCALED", int(prescaled)),
        ("MLA_OUTPUT", C_TYPES[problem.out_dtype]),
        ("MLA_ROPE_KIND", ("paged", "batched", "ragged").index(problem.rope or "paged")),
        ("MLA_NOPE_DIM", problem.qk_nope_head_dim),
        ("MLA_V_DIM", problem.v_head_dim),
        ("MLA_PAGE_SIZE", max(problem.page_size, 1)),
        ("MLA_ROPE_BOX", box),
        ("MLA_ROPE_COPY", int(copy)),
        ("MLA_V_ROWS", int(not transposed)),
        ("MLA_V_SCALES", 2 if variant.value_scales else int(scaled)),
        ("MLA_LSE", int("lse" in features)),
        ("MLA_SINKS", int("sinks" in features)),
        ("MLA_SOFTCAP", int("softcap" in features)),
        ("MLA_MASK_UNROLL", int(_comparisons(problem.mask) <= 1)),
        ("MLA_ROW_GROUPS", tile.row_groups),
        ("MLA_BLOCK_N", _BLOCK_N),
        ("MLA_STAGES_K", tile.stages_k),
        ("MLA_STAGES_V", tile.stages_v),
        ("MLA_STAGES_RAW", tile.stages_raw),
        ("MLA_CONSUMER_REGISTERS", tile.consumer_registers),
        ("MLA_PRODUCER_REGISTERS", tile.producer_registers),
    )
    return KernelSpec(
        name=".".join(parts),
        source="sm90/prefill_fp8.cu",
        symbol="mla_prefill_fp8",
        params=PrefillParams,
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(
            rope_size=1 if rope == "e4m3" else 2, ones="lse" not in features, value_scales=variant.value_scales
        ),
        defines=defines,
        generated=(("mask.cuh", mask_code.c_source(problem.mask)),),
        programmatic=programmatic,
    )


class PrefillFp8Sm90:
    """Prefill of fp8 q, k and v by TMA and wgmma; tensors with addresses and strides of 16 bytes."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: what the registry admits fits."""
        return None

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead: chunks of DeepSeek-V3 steps."""
        if arch == "sm_90a":
            yield from usual_fp8_prefills()

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernels of one problem with a v_scale of each head or of all."""
        variants = (Variant(chunked, False) for chunked in (False, True))
        return (*dict.fromkeys(prefill_spec(problem, variant) for variant in variants), schedule_spec(problem))

    @staticmethod
    def workspace_bytes(problem: Problem, *, T: int, L: int, B: int, H: int) -> int:
        """Return the bytes of the order of work of a large batch and of results of parts of long sequences."""
        return workspace_of(problem, T=T, L=L, B=B, H=H).bytes

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PrefillArgs], Again | None]:
        """Compile and load for whole sequences and a v_scale of each head; the result launches."""
        return launcher(
            device,
            prefill_spec=lambda variant, programmatic: prefill_spec(problem, variant, programmatic=programmatic),
            schedule_spec=schedule_spec(problem),
            workspace_of=lambda T, L, B, H: workspace_of(problem, T=T, L=L, B=B, H=H),
            make=blocks.make,
            block_n=_BLOCK_N,
            variant_of=lambda args: Variant(
                args.cache_offsets is not None, args.v_scale is not None and args.v_scale.ndim == 2
            ),
            usual=Variant(False, False),
        )
