"""The prefill plan: one launch of ``cdna/plan.hip``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import Structure, c_int, c_void_p
from typing import TYPE_CHECKING

from mla.backends.params import pointer
from mla.backends.rocm import runtime
from mla.backends.rocm.compiler import KernelSpec
from mla.problem import PlanArgs, Problem

if TYPE_CHECKING:
    import torch

THREADS = 1024
#: Tiles of sequences at most; bounds the work of summing what lies before a tile to a multiple of B.
MAX_TILES = 64


class PlanParams(Structure):
    """Parameter block of ``cdna/plan.hip``."""

    _fields_ = [
        ("input_row_offsets", c_void_p),
        ("lengths", c_void_p),
        ("buffer_row_offsets", c_void_p),
        ("cache_offsets", c_void_p),
        ("buffer_lengths", c_void_p),
        ("required_chunks", c_void_p),
        ("batch_size", c_int),
        ("chunks", c_int),
        ("buffer_token_size", c_int),
        ("page_size", c_int),
        ("lengths_include_new", c_int),
        ("tile", c_int),
        ("tiles", c_int),
        ("groups", c_int),
    ]


class Plan:
    """The plan on an AMD GPU: one kernel for every page size and batch."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: every plan fits."""
        return None

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead."""
        yield Problem("plan", "int32", "int32", alignment=4)

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernel."""
        return (KernelSpec("plan.scan", "cdna/plan.hip", "mla_plan", PlanParams, THREADS),)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PlanArgs], None]:
        """Compile and load; the result launches."""
        (spec,) = Plan.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        blocks = 2 * runtime.properties(device).multi_processor_count

        def run(args: PlanArgs) -> None:
            cache = args.cache
            batch_size, chunks = cache.batch_size, args.buffer_lengths.shape[0]
            tile = THREADS * -(-batch_size // (THREADS * MAX_TILES)) or THREADS
            tiles = -(-batch_size // tile) or 1
            groups = min(chunks, max(1, blocks // tiles))
            params = PlanParams(
                args.input_row_offsets.data_ptr(),
                cache.lengths.data_ptr(),
                args.buffer_row_offsets.data_ptr(),
                args.cache_offsets.data_ptr(),
                args.buffer_lengths.data_ptr(),
                pointer(args.required_chunks),
                batch_size,
                chunks,
                args.buffer_token_size,
                cache.page_size,
                cache.lengths_include_new,
                tile,
                tiles,
                groups,
            )
            kernel.launch(params, tiles, groups)

        return run
