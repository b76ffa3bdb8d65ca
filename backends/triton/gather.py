"""The gather entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mla.backends.triton import configs, runtime
from mla.backends.triton.compiler import ELEMENT_TYPES, ITEMSIZE, KernelSpec
from mla.backends.triton.entry import Entry, as_bytes, search_steps
from mla.problem import KV_LORA_RANK, Again, GatherArgs, Problem

#: Rows of one program.
BLOCK_R = 16


class Gather(Entry):
    """Latent rows out of the pages; a program copies `BLOCK_R` rows."""

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Describe the kernel."""
        scaled = problem.granularity > 0
        element = configs.fp8_element(arch, problem.dtypes) if scaled else ELEMENT_TYPES[problem.dtypes]
        types: dict[str, str | None] = {"output": "*" + ELEMENT_TYPES[problem.out_dtype], "latent": "*" + element}
        types |= {
            "scales": "*fp32" if scaled else None,
            "page_table": "*i32",
            "page_indptr": "*i32" if problem.csr else None,
        }
        types |= dict.fromkeys(("buffer_row_offsets", "cache_offsets", "buffer_length"), "*i32")
        types |= dict.fromkeys(("batch_size", "steps", "rows_max", "length_on_device"), "i32")
        types |= dict.fromkeys(("stride_output", "stride_page", "stride_token"), "i64")
        types |= {"stride_table": None if problem.csr else "i64"}
        types |= dict.fromkeys(("stride_scales_page", "stride_scales_token"), "i64" if scaled else None)
        divisible = {"output": problem.alignment, "latent": problem.alignment}
        for name, kind in (("stride_output", problem.out_dtype), ("stride_page", element), ("stride_token", element)):
            divisible[name] = max(problem.alignment // ITEMSIZE[kind], 1)
        constants = {
            "PAGE_SIZE": problem.page_size,
            "KV_LORA_RANK": KV_LORA_RANK,
            "GRANULARITY": problem.granularity,
            "FNUZ": "fnuz" in problem.dtypes,
            "INTERPRETED": arch == "cpu",
            "BLOCK_R": BLOCK_R,
        }
        return (
            KernelSpec("gather.gather", tuple(types.items()), tuple(constants.items()), None, tuple(divisible.items())),
        )

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[GatherArgs], Again | None]:
        """Compile; return the callable that only launches."""
        (spec,) = Gather.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        scaled = problem.granularity > 0

        def run(args: GatherArgs) -> Again | None:
            cache, output, length = args.cache, args.output, args.buffer_length
            latent, table, scales = cache.latent, cache.page_table, cache.scales
            on_device = isinstance(length, torch.Tensor)
            rows = output.shape[0] if isinstance(length, torch.Tensor) else min(length, output.shape[0])
            if rows <= 0 or cache.batch_size == 0:
                return None
            values = {
                "output": output, "stride_output": output.stride(0),
                "latent": as_bytes(latent) if scaled else latent,
                "stride_page": latent.stride(0), "stride_token": latent.stride(1), "scales": scales,
                "page_table": table, "stride_table": table.stride(0), "page_indptr": cache.page_indptr,
                "buffer_row_offsets": args.buffer_row_offsets, "cache_offsets": args.cache_offsets,
                "buffer_length": length if on_device else args.cache_offsets, "length_on_device": int(on_device),
                "batch_size": cache.batch_size, "steps": search_steps(cache.batch_size), "rows_max": rows,
            }  # fmt: skip
            if scales is not None:
                values["stride_scales_page"], values["stride_scales_token"] = scales.stride(0), scales.stride(1)
            return kernel.launch(values, -(-rows // BLOCK_R))

        return run

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield the usual problems."""
        for dtypes, granularity in (("bf16", 0), ("fp16", 0), ("fp8", 64), ("fp8_fnuz", 128), ("fp8", 576)):
            for csr in (False, True):
                features = frozenset({"scales"} if granularity else ())
                yield Problem(
                    "gather", dtypes, "bf16", page_size=64, csr=csr, features=features, granularity=granularity
                )
