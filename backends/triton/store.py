"""The store entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mla.backends.triton import configs, runtime
from mla.backends.triton.compiler import ELEMENT_TYPES, ITEMSIZE, KernelSpec
from mla.backends.triton.entry import Entry, as_bytes, search_steps
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM, Again, Problem, StoreArgs

#: Rows of one program.
BLOCK_R = 16


class Store(Entry):
    """This step's rows into the pages; a program writes `BLOCK_R` rows."""

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Describe the kernel; the rows come in `dtypes`, the cache has `out_dtype`."""
        latent, _, rope = problem.out_dtype.partition("+")
        scaled, rope_scaled = problem.granularity > 0, problem.granularity > 0 and not rope
        cached = configs.fp8_element(arch, latent) if scaled else ELEMENT_TYPES[latent]
        rope_element = "bf16" if rope else cached
        source = "*" + ELEMENT_TYPES[problem.dtypes]
        types: dict[str, str | None] = {"latent": "*" + cached, "rope": "*" + rope_element}
        types |= {"scales": "*fp32" if scaled else None, "source_latent": source, "source_rope": source}
        types |= {"page_table": "*i32", "page_indptr": "*i32" if problem.csr else None}
        types |= dict.fromkeys(("lengths", "input_row_offsets"), "*i32")
        types |= dict.fromkeys(("batch_size", "steps", "lengths_include_new"), "i32")
        wide = (
            "stride_source_latent", "stride_source_rope", "stride_latent_page", "stride_latent_token",
            "stride_rope_page", "stride_rope_token",
        )  # fmt: skip
        types |= dict.fromkeys(wide, "i64")
        types |= {"stride_table": None if problem.csr else "i64"}
        types |= dict.fromkeys(("stride_scales_page", "stride_scales_token"), "i64" if scaled else None)
        divisible = dict.fromkeys(("latent", "rope", "source_latent", "source_rope"), problem.alignment)
        for name in wide:
            element = problem.dtypes if "source" in name else cached if "latent" in name else rope_element
            divisible[name] = max(problem.alignment // ITEMSIZE[element], 1)
        constants = {
            "PAGE_SIZE": problem.page_size,
            "KV_LORA_RANK": KV_LORA_RANK,
            "ROPE_DIM": QK_ROPE_HEAD_DIM,
            "GRANULARITY": problem.granularity,
            "ROPE_QUANTIZED": rope_scaled,
            "FNUZ": "fnuz" in problem.out_dtype,
            "INTERPRETED": arch == "cpu",
            "BLOCK_R": BLOCK_R,
        }
        return (
            KernelSpec("store.store", tuple(types.items()), tuple(constants.items()), None, tuple(divisible.items())),
        )

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[StoreArgs], Again | None]:
        """Compile; return the callable that only launches."""
        (spec,) = Store.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        scaled, rope_scaled = problem.granularity > 0, problem.granularity > 0 and "+" not in problem.out_dtype

        def run(args: StoreArgs) -> Again | None:
            cache, x, r = args.cache, args.latent, args.rope
            latent, rope, scales, table = cache.latent, cache.rope, cache.scales, cache.page_table
            if x.shape[0] == 0 or cache.batch_size == 0:
                return None
            values = {
                "latent": as_bytes(latent) if scaled else latent,
                "stride_latent_page": latent.stride(0), "stride_latent_token": latent.stride(1),
                "rope": as_bytes(rope) if rope_scaled else rope,
                "stride_rope_page": rope.stride(0), "stride_rope_token": rope.stride(1), "scales": scales,
                "source_latent": x, "stride_source_latent": x.stride(0),
                "source_rope": r, "stride_source_rope": r.stride(0),
                "page_table": table, "stride_table": table.stride(0), "page_indptr": cache.page_indptr,
                "lengths": cache.lengths, "lengths_include_new": int(cache.lengths_include_new),
                "input_row_offsets": args.input_row_offsets,
                "batch_size": cache.batch_size, "steps": search_steps(cache.batch_size),
            }  # fmt: skip
            if scales is not None:
                values["stride_scales_page"], values["stride_scales_token"] = scales.stride(0), scales.stride(1)
            return kernel.launch(values, -(-x.shape[0] // BLOCK_R))

        return run

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield the usual problems."""
        caches = (("bf16", 0), ("fp8", 64), ("fp8_fnuz", 128), ("fp8", 576), ("fp8+bf16_rope", 128))
        for dtypes, granularity in caches:
            features = frozenset({"scales"} if granularity else ())
            yield Problem("store", "bf16", dtypes, page_size=64, features=features, granularity=granularity)
