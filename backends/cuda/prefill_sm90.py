"""Prefill on Hopper: ``sm90/prefill.cu``, TMA and wgmma, in two forms that share a call."""

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
from mla.masks import CausalMask, NullMask
from mla.problem import QK_ROPE_HEAD_DIM, PrefillArgs, Problem

if TYPE_CHECKING:
    from mla.backends.cuda.runtime import Kernel

#: A sequence is narrow when its items of 64 rows are no more than these, two for each SM of an H200 ...
NARROW_ITEMS = 264
#: ... and it has no more keys than these. Both by measurement: see docs/perf-log.md.
NARROW_KEYS = 2048
#: Sequences of a batch whose order each block works out by itself; more are ordered by a kernel of their own.
TABLE_SEQUENCES = 32
_SCHEDULE_THREADS = 1024
_ENTRY_BYTES = 32


@dataclass(frozen=True)
class Tile:
    """One form of the kernel: what ``prefill_layout.cuh`` calls its tile."""

    warpgroups: int
    sharing: int
    block_n: int
    stages_k: int
    stages_v: int
    consumer_registers: int
    producer_registers: int

    @property
    def block_m(self) -> int:
        return 64 * self.warpgroups // self.sharing

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def shared_bytes(self, dims: tuple[int, int]) -> int:
        """Dynamic shared memory of a block; the device asserts the same sum."""
        q_depth, v_head_dim = dims
        row_groups = self.warpgroups // self.sharing
        rows = 2 * (row_groups * 64 + self.stages_k * self.block_n) * q_depth
        values = 2 * self.stages_v * self.block_n * v_head_dim
        merge = self.warpgroups * 128 * (v_head_dim // 4 + 4) * 4 if self.sharing > 1 else 0
        items = 2 * row_groups * 48
        table = ((TABLE_SEQUENCES + 1) * _ENTRY_BYTES) // 16 * 16 + 16
        barriers = 2 * row_groups + 3 * self.stages_k + 2 * self.stages_v
        return 1024 + rows + values + merge + items + table + self.stages_k * (16 + 8) + 8 * barriers

    def defines(self) -> tuple[tuple[str, int], ...]:
        return (
            ("MLA_WARPGROUPS", self.warpgroups),
            ("MLA_SHARING", self.sharing),
            ("MLA_BLOCK_N", self.block_n),
            ("MLA_STAGES_K", self.stages_k),
            ("MLA_STAGES_V", self.stages_v),
            ("MLA_CONSUMER_REGISTERS", self.consumer_registers),
            ("MLA_PRODUCER_REGISTERS", self.producer_registers),
        )


#: Forms by dims: the wide one, and the narrow one where there is one.
TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (192, 128): (Tile(3, 1, 128, 2, 1, 160, 32), Tile(2, 2, 64, 4, 4, 232, 40)),
    (256, 256): (Tile(2, 1, 64, 2, 2, 232, 40),),
}


class ScheduleParams(Structure):
    """Parameter block of ``sm90/prefill_schedule.cu``."""

    _fields_ = [("sequences", SequenceArgs), ("tables", c_void_p * 2), ("batch", c_int), ("heads", c_int)]


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
            ("mask", mask_code.MaskArgsStruct),
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
            ("claim_first", c_int),
            ("wait_first", c_int),
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


def variant_of(problem: Problem, block_n: int, *, chunked: bool, positive_scale: bool) -> Variant:
    """Choose the variant: ``chunked`` when keys may begin inside a page."""
    scale_scores = not positive_scale or bool(problem.features & {"softcap", "bias"})
    if problem.rope != "paged":
        return Variant(block_n, False, scale_scores)
    box = math.gcd(problem.page_size, block_n)
    box = 0 if box % 8 else box
    return Variant(box, chunked or not box, scale_scores)


def _shape_defines(problem: Problem) -> tuple[tuple[str, int | str], ...]:
    tiles = TILES[problem.dims]
    rope_kind = ("paged", "batched", "ragged").index(problem.rope or "paged")
    return (
        ("MLA_ROPE_KIND", rope_kind),
        ("MLA_NOPE_DIM", problem.qk_nope_head_dim),
        ("MLA_V_DIM", problem.v_head_dim),
        ("MLA_WIDE_BLOCK_M", tiles[0].block_m),
        ("MLA_NARROW_BLOCK_M", tiles[1].block_m if len(tiles) > 1 else 0),
        ("MLA_NARROW_ITEMS", NARROW_ITEMS),
        ("MLA_NARROW_KEYS", NARROW_KEYS),
    )


@functools.lru_cache(maxsize=512)
def prefill_spec(problem: Problem, tile: Tile, variant: Variant, *, programmatic: bool) -> KernelSpec:
    """Describe the prefill kernel of one form."""
    assert problem.mask is not None
    form = "wide" if tile.sharing == 1 else "narrow"
    features = sorted(problem.features & {"lse", "sinks", "softcap", "bias"})
    parts = [
        f"prefill.wgmma.{form}.{problem.dtypes}_{problem.out_dtype}.d{problem.dims[0]}x{problem.dims[1]}.{problem.rope}",
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
        *_shape_defines(problem),
        *tile.defines(),
    )
    return KernelSpec(
        name=".".join(parts),
        source="sm90/prefill.cu",
        symbol="prefill",
        params=PrefillParams,
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(problem.dims),
        defines=defines,
        generated=(("mask.cuh", mask_code.c_source(problem.mask)),),
        programmatic=programmatic,
    )


def schedule_spec(problem: Problem) -> KernelSpec:
    """Describe the kernel that orders the sequences of a large batch."""
    name = f"prefill.schedule.d{problem.dims[0]}x{problem.dims[1]}.{problem.rope}"
    return KernelSpec(
        name, "sm90/prefill_schedule.cu", "prefill_schedule", ScheduleParams, _SCHEDULE_THREADS, defines=_shape_defines(problem)
    )
