"""Latent rows out of the pages: ``cdna/gather.hip``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mla.backends.params import C_TYPES, PAGE_SIZES, GatherParams, PagedRows, page_table, paged_rows
from mla.backends.rocm import runtime
from mla.backends.rocm.compiler import KernelSpec, fp8_name
from mla.problem import GatherArgs, Problem

if TYPE_CHECKING:
    import torch

THREADS = 256


def _rows_per_wave(problem: Problem) -> int:
    """Rows in flight: 8 accesses of 16 bytes a lane."""
    return 4 if problem.dtypes == "fp32" else 8


class Gather:
    """The gather on an AMD GPU: any page size, strides and alignment, fp8 with its scales."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: what the registry admits fits."""
        return None

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead: aligned caches at the usual page sizes."""
        for page_size in PAGE_SIZES:
            for dtype in ("bf16", "fp16"):
                yield Problem("gather", dtype, dtype, page_size=page_size)
                for granularity in (64, 128, 576):
                    yield Problem("gather", fp8_name(arch), dtype, page_size=page_size, granularity=granularity)

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernel."""
        name = (
            f"gather.{problem.dtypes}_{problem.out_dtype}.p{problem.page_size}"
            f".g{problem.granularity}.a{problem.alignment}"
        )
        defines = (
            ("MLA_SOURCE", C_TYPES[problem.dtypes]),
            ("MLA_OUTPUT", C_TYPES[problem.out_dtype]),
            ("MLA_PAGE_SIZE", problem.page_size),
            ("MLA_GRANULARITY", problem.granularity),
            ("MLA_ALIGNMENT", problem.alignment),
            ("MLA_ROWS", _rows_per_wave(problem)),
        )
        return (KernelSpec(name, "cdna/gather.hip", "mla_gather", GatherParams, THREADS, defines=defines),)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[GatherArgs], None]:
        """Compile and load; the result launches."""
        (spec,) = Gather.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        rows_per_block = _rows_per_wave(problem) * THREADS // 64

        def run(args: GatherArgs) -> None:
            cache, output, length = args.cache, args.output, args.buffer_length
            rows = max(length, 0) if isinstance(length, int) else output.shape[0]
            params = GatherParams(
                paged_rows(cache.latent),
                PagedRows() if cache.scales is None else paged_rows(cache.scales),
                page_table(cache),
                args.buffer_row_offsets.data_ptr(),
                args.cache_offsets.data_ptr(),
                None if isinstance(length, int) else length.data_ptr(),
                output.data_ptr(),
                output.stride(0) * output.element_size(),
                cache.batch_size,
                rows,
            )
            kernel.launch(params, -(-rows // rows_per_block))

        return run
