"""This step's rows into the pages: ``sm80/store.cu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mla.backends.cuda import runtime
from mla.backends.cuda.compiler import KernelSpec
from mla.backends.params import (
    C_SIZES,
    C_TYPES,
    PAGE_SIZES,
    StoreParams,
    packer,
    row_fields,
    table_fields,
)
from mla.problem import Again, Problem, StoreArgs

if TYPE_CHECKING:
    import torch


THREADS = 128
#: Rows of a warp: with three chunks of a row, twelve 16-byte loads a lane in flight.
ROWS = 4


def _cache_dtypes(problem: Problem) -> tuple[str, str]:
    """Return the dtypes of the cache's latent and rope: `out_dtype`, the rope's after a plus where it differs."""
    latent, _, rope = problem.out_dtype.partition("+")
    return latent, rope.removesuffix("_rope") or latent


class Store:
    """The store on an NVIDIA GPU: copies, or quantises to fp8 with a scale a block."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return why the cache's dtype cannot be written, or None."""
        return "float8_e4m3fnuz is AMD's format" if "fnuz" in problem.out_dtype else None

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead: aligned rows at the usual page sizes."""
        for page_size in PAGE_SIZES:
            for dtype in ("bf16", "fp16"):
                yield Problem("store", dtype, dtype, page_size=page_size)
            for granularity in (64, 128, 576):
                yield Problem("store", "bf16", "fp8", page_size=page_size, granularity=granularity)
            yield Problem("store", "bf16", "fp8+bf16_rope", page_size=page_size, granularity=128)

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernel."""
        latent, rope = _cache_dtypes(problem)
        name = (
            f"store.{problem.dtypes}_{problem.out_dtype}.p{problem.page_size}"
            f".g{problem.granularity}.a{problem.alignment}"
        )
        defines = (
            ("MLA_SOURCE", C_TYPES[problem.dtypes]),
            ("MLA_LATENT", C_TYPES[latent]),
            ("MLA_ROPE", C_TYPES[rope]),
            ("MLA_PAGE_SIZE", problem.page_size),
            ("MLA_GRANULARITY", problem.granularity),
            ("MLA_ALIGNMENT", problem.alignment),
            ("MLA_ROWS", ROWS),
        )
        return (KernelSpec(name, "sm80/store.cu", "mla_store", StoreParams, THREADS, defines=defines),)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[StoreArgs], Again | None]:
        """Compile and load; the result launches."""
        (spec,) = Store.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        pack, size = packer(StoreParams), C_SIZES[problem.dtypes]
        latent_size, rope_size = (C_SIZES[dtype] for dtype in _cache_dtypes(problem))
        rows_per_block = ROWS * THREADS // 32

        def run(args: StoreArgs) -> Again | None:
            cache, latent, rope = args.cache, args.latent, args.rope
            rows = latent.shape[0]
            params = pack(
                *row_fields(cache.latent, latent_size),
                *row_fields(cache.rope, rope_size),
                *row_fields(cache.scales, 4),
                *table_fields(cache),
                args.input_row_offsets.data_ptr(),
                cache.lengths.data_ptr(),
                latent.data_ptr(),
                rope.data_ptr(),
                latent.stride(0) * size,
                rope.stride(0) * size,
                cache.lengths_include_new,
                cache.batch_size,
                rows,
            )
            return kernel.launch(params, -(-rows // rows_per_block))

        return run
