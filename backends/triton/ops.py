"""The entry classes that the registry names: which kernels a problem takes, and how a call becomes their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mla.backends.triton.compiler import ELEMENT_TYPES, ITEMSIZE, KernelSpec
from mla.backends.triton.prefill import Prefill
from mla.backends.triton.runtime import interpreted, load
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM, GatherArgs, MergeArgs, PlanArgs, Problem, StoreArgs

__all__ = ["Gather", "Merge", "Plan", "Prefill", "Store", "variants"]

#: Sequences that one block of the plan scans at a time, and the most segments that a batch is cut into.
PLAN_BLOCK = 1024
PLAN_SEGMENTS = 8
#: Rows that one program of gather, store and merge moves.
ROWS = 16


def steps_of(batch_size: int) -> int:
    """Return how many halvings find one of `batch_size` sequences."""
    return max(batch_size - 1, 1).bit_length()


class _Simple:
    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return why a problem cannot be served, or None."""
        if arch == "cpu" and not interpreted():
            return "CPU tensors need TRITON_INTERPRET=1 in the environment"
        return None


class Plan(_Simple):
    """The plan: (chunks, segments) programs."""

    @staticmethod
    def spec(problem: Problem) -> KernelSpec:
        """Describe the kernel."""
        tables = ("buffer_row_offsets", "cache_offsets", "buffer_lengths", "required_chunks", "input_row_offsets", "lengths")
        numbers = ("batch_size", "buffer_token_size", "stride_rows", "stride_offsets", "stride_lengths", "lengths_include_new",
                   "wants_required_chunks")  # fmt: skip
        types = dict.fromkeys(tables, "*i32") | dict.fromkeys(numbers, "i32")
        constants = {"PAGE_SIZE": problem.page_size, "BLOCK": PLAN_BLOCK}
        return KernelSpec("plan.plan", tuple(types.items()), tuple(constants.items()))

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PlanArgs], None]:
        """Compile; return the callable that only launches."""
        kernel = load(Plan.spec(problem), device)

        def run(args: PlanArgs) -> None:
            cache, rows, offsets, used = args.cache, args.buffer_row_offsets, args.cache_offsets, args.buffer_lengths
            batch = cache.batch_size
            required = args.required_chunks
            kernel.launch(
                (rows, offsets, used, used if required is None else required, args.input_row_offsets, cache.lengths,
                 batch, args.buffer_token_size, rows.stride(0), offsets.stride(0), used.stride(0),
                 int(cache.lengths_include_new), int(required is not None)),
                rows.shape[0], max(1, min(PLAN_SEGMENTS, -(-batch // PLAN_BLOCK))),
            )  # fmt: skip

        return run


class Gather(_Simple):
    """Latent rows out of the pages; a program copies `ROWS` rows."""

    @staticmethod
    def spec(problem: Problem) -> KernelSpec:
        """Describe the kernel."""
        scaled = problem.granularity > 0
        element = ELEMENT_TYPES[problem.dtypes.partition("+")[0]]
        types: dict[str, str | None] = {"output": "*" + ELEMENT_TYPES[problem.out_dtype], "latent": "*" + element}
        types |= {"scales": "*fp32" if scaled else None, "page_table": "*i32", "page_indptr": "*i32" if problem.csr else None}
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
            "BLOCK_R": ROWS,
        }
        return KernelSpec("gather.gather", tuple(types.items()), tuple(constants.items()), None, tuple(divisible.items()))

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[GatherArgs], None]:
        """Compile; return the callable that only launches."""
        kernel = load(Gather.spec(problem), device)
        scaled = problem.granularity > 0

        def run(args: GatherArgs) -> None:
            cache, output, length = args.cache, args.output, args.buffer_length
            latent, table, scales = cache.latent, cache.page_table, cache.scales
            on_device = isinstance(length, torch.Tensor)
            rows = output.shape[0] if on_device else min(length, output.shape[0])
            if rows <= 0 or cache.batch_size == 0:
                return
            kernel.launch(
                (output, as_bytes(latent) if scaled else latent, scales, table, cache.page_indptr,
                 args.buffer_row_offsets, args.cache_offsets, length if on_device else args.cache_offsets,
                 cache.batch_size, steps_of(cache.batch_size), rows, int(on_device),
                 output.stride(0), latent.stride(0), latent.stride(1), None if problem.csr else table.stride(0),
                 scales.stride(0) if scaled else None, scales.stride(1) if scaled else None),
                -(-rows // ROWS),
            )  # fmt: skip

        return run


class Store(_Simple):
    """This step's rows into the pages; a program writes `ROWS` rows."""

    @staticmethod
    def spec(problem: Problem) -> KernelSpec:
        """Describe the kernel; the rows come in `dtypes`, the cache has `out_dtype`."""
        latent, _, rope = problem.out_dtype.partition("+")
        scaled, rope_scaled = problem.granularity > 0, problem.granularity > 0 and not rope
        rope_element = ELEMENT_TYPES["bf16" if rope else latent]
        source = "*" + ELEMENT_TYPES[problem.dtypes]
        types: dict[str, str | None] = {"latent": "*" + ELEMENT_TYPES[latent], "rope": "*" + rope_element}
        types |= {"scales": "*fp32" if scaled else None, "source_latent": source, "source_rope": source}
        types |= {"page_table": "*i32", "page_indptr": "*i32" if problem.csr else None}
        types |= dict.fromkeys(("lengths", "input_row_offsets"), "*i32")
        types |= dict.fromkeys(("batch_size", "steps", "lengths_include_new"), "i32")
        wide = ("stride_source_latent", "stride_source_rope", "stride_latent_page", "stride_latent_token", "stride_rope_page",
                "stride_rope_token")  # fmt: skip
        types |= dict.fromkeys(wide, "i64")
        types |= {"stride_table": None if problem.csr else "i64"}
        types |= dict.fromkeys(("stride_scales_page", "stride_scales_token"), "i64" if scaled else None)
        divisible = {name: problem.alignment for name in ("latent", "rope", "source_latent", "source_rope")}
        for name in wide:
            element = problem.dtypes if "source" in name else latent if "latent" in name else rope_element
            divisible[name] = max(problem.alignment // ITEMSIZE[element], 1)
        constants = {
            "PAGE_SIZE": problem.page_size,
            "KV_LORA_RANK": KV_LORA_RANK,
            "ROPE_DIM": QK_ROPE_HEAD_DIM,
            "GRANULARITY": problem.granularity,
            "ROPE_QUANTIZED": rope_scaled,
            "FNUZ": "fnuz" in problem.out_dtype,
            "BLOCK_R": ROWS,
        }
        return KernelSpec("store.store", tuple(types.items()), tuple(constants.items()), None, tuple(divisible.items()))

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[StoreArgs], None]:
        """Compile; return the callable that only launches."""
        kernel = load(Store.spec(problem), device)
        scaled, rope_scaled = problem.granularity > 0, problem.granularity > 0 and "+" not in problem.out_dtype

        def run(args: StoreArgs) -> None:
            cache, x, r = args.cache, args.latent, args.rope
            latent, rope, scales, table = cache.latent, cache.rope, cache.scales, cache.page_table
            if x.shape[0] == 0 or cache.batch_size == 0:
                return
            kernel.launch(
                (as_bytes(latent) if scaled else latent, as_bytes(rope) if rope_scaled else rope, scales, x, r,
                 table, cache.page_indptr, cache.lengths, args.input_row_offsets,
                 cache.batch_size, steps_of(cache.batch_size), int(cache.lengths_include_new),
                 x.stride(0), r.stride(0), latent.stride(0), latent.stride(1), rope.stride(0), rope.stride(1),
                 None if problem.csr else table.stride(0),
                 scales.stride(0) if scaled else None, scales.stride(1) if scaled else None),
                -(-x.shape[0] // ROWS),
            )  # fmt: skip

        return run


class Merge(_Simple):
    """Two partial results into one; a program takes `ROWS` (row, head) pairs."""

    @staticmethod
    def spec(problem: Problem) -> KernelSpec:
        """Describe the kernel."""
        types: dict[str, str | None] = {"output": "*" + ELEMENT_TYPES[problem.out_dtype]}
        types |= dict.fromkeys(("prefix", "suffix"), "*" + ELEMENT_TYPES[problem.dtypes])
        wants_lse = "lse" in problem.features
        types |= {"prefix_lse": "*fp32", "suffix_lse": "*fp32", "output_lse": "*fp32" if wants_lse else None}
        types |= {"pairs": "i64", "num_heads": "i32"}
        divisible = dict.fromkeys(("output", "prefix", "suffix"), problem.alignment)
        for tensor in ("output", "prefix", "suffix", "prefix_lse", "suffix_lse", "output_lse"):
            for axis in "th":
                types[f"stride_{tensor}_{axis}"] = "i64" if types[tensor] else None
                if "lse" not in tensor:
                    kind = problem.out_dtype if tensor == "output" else problem.dtypes
                    divisible[f"stride_{tensor}_{axis}"] = max(problem.alignment // ITEMSIZE[kind], 1)
        constants = {"V_HEAD_DIM": problem.v_head_dim, "BLOCK_R": ROWS}
        return KernelSpec("merge.merge", tuple(types.items()), tuple(constants.items()), None, tuple(divisible.items()))

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[MergeArgs], None]:
        """Compile; return the callable that only launches."""
        kernel = load(Merge.spec(problem), device)

        def run(args: MergeArgs) -> None:
            output = args.output
            pairs = output.shape[0] * output.shape[1]
            tensors = (output, args.prefix_output, args.suffix_output, args.prefix_lse, args.suffix_lse, args.output_lse)
            strides = [None if x is None else x.stride(axis) for x in tensors for axis in (0, 1)]
            kernel.launch((*tensors, pairs, output.shape[1], *strides), -(-pairs // ROWS))

        return run


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View fp8 as bytes: kernels decode it themselves."""
    return x.view(torch.uint8)


def variants(arch: str) -> Iterator[tuple[str, Problem]]:
    """Yield what is compiled ahead for an architecture: an id and its problem."""
    for page_size in (1, 64):
        yield f"triton.{arch}.plan.p{page_size}", Problem("plan", "int32", "int32", page_size=page_size)
        for dtype in ("bf16", "fp16"):
            yield f"triton.{arch}.gather.{dtype}.p{page_size}", Problem("gather", dtype, dtype, page_size=page_size)
            yield f"triton.{arch}.store.{dtype}.p{page_size}", Problem("store", dtype, dtype, page_size=page_size)
    for dtype in ("bf16", "fp16", "fp32"):
        yield f"triton.{arch}.merge.{dtype}", Problem("merge", dtype, dtype, features=frozenset({"lse"}))
    for problem in Prefill.problems(arch):
        assert problem.mask is not None
        name = f"{problem.dtypes}.{problem.dims[0]}x{problem.dims[1]}.{problem.mask.name}.p{problem.page_size}"
        yield f"triton.{arch}.prefill.{name}", problem
