"""This step's rows into the pages: ``cdna/store.hip``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mla.backends.params import C_TYPES, PAGE_SIZES, PagedRows, StoreParams, page_table, paged_rows
from mla.backends.rocm import runtime
from mla.backends.rocm.compiler import KernelSpec, fp8_name
from mla.problem import Problem, StoreArgs

if TYPE_CHECKING:
    import torch

THREADS = 256


class Store:
    """The store on an AMD GPU: copies, or quantises to fp8 with a scale a block."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: what the registry admits fits."""
        return None

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead: aligned rows at the usual page sizes."""
        for page_size in PAGE_SIZES:
            for dtype in ("bf16", "fp16"):
                yield Problem("store", dtype, dtype, page_size=page_size)
            for granularity in (64, 128, 576):
                yield Problem("store", "bf16", fp8_name(arch), page_size=page_size, granularity=granularity)
            yield Problem("store", "bf16", f"{fp8_name(arch)}+bf16_rope", page_size=page_size, granularity=128)

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernel; `out_dtype` names the cache's latent and, after a plus, its rope."""
        latent, _, rope = problem.out_dtype.partition("+")
        name = (
            f"store.{problem.dtypes}_{problem.out_dtype}.p{problem.page_size}"
            f".g{problem.granularity}.a{problem.alignment}"
        )
        defines = (
            ("MLA_SOURCE", C_TYPES[problem.dtypes]),
            ("MLA_LATENT", C_TYPES[latent]),
            ("MLA_ROPE", C_TYPES[rope.removesuffix("_rope") or latent]),
            ("MLA_PAGE_SIZE", problem.page_size),
            ("MLA_GRANULARITY", problem.granularity),
            ("MLA_ALIGNMENT", problem.alignment),
        )
        return (KernelSpec(name, "cdna/store.hip", "mla_store", StoreParams, THREADS, defines=defines),)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[StoreArgs], None]:
        """Compile and load; the result launches."""
        (spec,) = Store.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)

        def run(args: StoreArgs) -> None:
            cache, latent, rope = args.cache, args.latent, args.rope
            rows = latent.shape[0]
            params = StoreParams(
                paged_rows(cache.latent),
                paged_rows(cache.rope),
                PagedRows() if cache.scales is None else paged_rows(cache.scales),
                page_table(cache),
                args.input_row_offsets.data_ptr(),
                cache.lengths.data_ptr(),
                latent.data_ptr(),
                rope.data_ptr(),
                latent.stride(0) * latent.element_size(),
                rope.stride(0) * rope.element_size(),
                cache.lengths_include_new,
                cache.batch_size,
                rows,
            )
            kernel.launch(params, -(-rows // (THREADS // 64)))

        return run
