"""Latent rows out of the pages: ``sm80/gather.cu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mla.backends.cuda import runtime
from mla.backends.cuda.compiler import KernelSpec
from mla.backends.params import (
    C_SIZES,
    C_TYPES,
    PAGE_SIZES,
    GatherParams,
    packer,
    row_fields,
    table_fields,
)
from mla.problem import KV_LORA_RANK, Again, GatherArgs, Problem

if TYPE_CHECKING:
    import torch


THREADS = 256


def _rows_per_warp(problem: Problem) -> int:
    """Rows that a warp has in flight: 16 accesses a lane; 8 of fp8, whose conversion takes registers."""
    size = C_SIZES[problem.dtypes]
    access = max(size, min(problem.alignment, 16, 8 * size))
    accesses_of_a_row = KV_LORA_RANK * size // (32 * access)
    return max(1, (8 if problem.dtypes == "fp8" else 16) // accesses_of_a_row)


class Gather:
    """The gather on an NVIDIA GPU: any page size, strides and alignment, fp8 with its scales."""

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
                    yield Problem("gather", "fp8", dtype, page_size=page_size, granularity=granularity)

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
            ("MLA_ROWS", _rows_per_warp(problem)),
        )
        return (KernelSpec(name, "sm80/gather.cu", "mla_gather", GatherParams, THREADS, defines=defines),)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[GatherArgs], Again | None]:
        """Compile and load; the result launches."""
        (spec,) = Gather.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        rows_per_block = _rows_per_warp(problem) * THREADS // 32
        pack, size, output_size = packer(GatherParams), C_SIZES[problem.dtypes], C_SIZES[problem.out_dtype]

        def run(args: GatherArgs) -> Again | None:
            cache, output, length = args.cache, args.output, args.buffer_length
            rows = max(length, 0) if isinstance(length, int) else output.shape[0]
            params = pack(
                *row_fields(cache.latent, size),
                *row_fields(cache.scales, 4),
                *table_fields(cache),
                args.buffer_row_offsets.data_ptr(),
                args.cache_offsets.data_ptr(),
                0 if isinstance(length, int) else length.data_ptr(),
                output.data_ptr(),
                output.stride(0) * output_size,
                cache.batch_size,
                rows,
            )
            return kernel.launch(params, -(-rows // rows_per_block))

        return run
