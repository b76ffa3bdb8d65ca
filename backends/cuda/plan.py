"""The prefill plan: one launch of ``sm80/plan.cu``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from ctypes import Structure, c_int, c_uint, c_void_p
from typing import TYPE_CHECKING

from mla.backends.cuda import runtime
from mla.backends.cuda.compiler import KernelSpec
from mla.backends.params import packer
from mla.problem import Again, PlanArgs, Problem

if TYPE_CHECKING:
    import torch


THREADS = 1024
#: Tiles of sequences at most; bounds the work of summing what lies before a tile to a multiple of B.
MAX_TILES = 64


class PlanParams(Structure):
    """Parameter block of ``sm80/plan.cu``."""

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
        ("page_reciprocal", c_uint),
        ("page_shift", c_int),
        ("new_weight", c_int),
        ("tile", c_int),
    ]


def reciprocal(divisor: int) -> tuple[int, int]:
    """Return (m, k) with ``n // divisor == n * m >> k`` for 0 <= n < 2^31, m below 2^32.

    m = ceil(2^k / d) with k = 31 + ceil(log2 d): n * (m * d - 2^k) < 2^31 * d <= 2^k (Granlund and Montgomery,
    "Division by invariant integers using multiplication", 1994).
    """
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


class Plan:
    """The plan on an NVIDIA GPU: one kernel for every page size and batch."""

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
        return (KernelSpec("plan.scan", "sm80/plan.cu", "mla_plan", PlanParams, THREADS),)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PlanArgs], Again | None]:
        """Compile and load; the result launches."""
        (spec,) = Plan.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        blocks = runtime.properties(device).multi_processor_count
        pack, reciprocals = packer(PlanParams), functools.cache(reciprocal)

        def run(args: PlanArgs) -> Again | None:
            cache, required = args.cache, args.required_chunks
            batch_size, chunks = cache.batch_size, args.buffer_lengths.shape[0]
            tile = THREADS * -(-batch_size // (THREADS * MAX_TILES)) or THREADS
            tiles = -(-batch_size // tile) or 1
            params = pack(
                args.input_row_offsets.data_ptr(),
                cache.lengths.data_ptr(),
                args.buffer_row_offsets.data_ptr(),
                args.cache_offsets.data_ptr(),
                args.buffer_lengths.data_ptr(),
                0 if required is None else required.data_ptr(),
                batch_size,
                chunks,
                args.buffer_token_size,
                cache.page_size,
                *reciprocals(cache.page_size),
                0 if cache.lengths_include_new else 1,
                tile,
            )
            return kernel.launch(params, tiles, min(chunks, max(1, blocks // tiles)))

        return run
