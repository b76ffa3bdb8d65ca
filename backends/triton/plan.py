"""The plan entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mla.backends.triton import runtime
from mla.backends.triton.compiler import KernelSpec
from mla.backends.triton.entry import Entry
from mla.problem import Again, PlanArgs, Problem

#: Sequences that one block of the plan scans at a time, the most segments that a batch is cut into, and programs.
PLAN_BLOCK = 1024
PLAN_SEGMENTS = 64
PLAN_PROGRAMS = 128


class Plan(Entry):
    """The plan: (groups of chunks, segments) programs."""

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Describe the kernel."""
        tables = (
            "buffer_row_offsets",
            "cache_offsets",
            "buffer_lengths",
            "required_chunks",
            "input_row_offsets",
            "lengths",
        )
        numbers = (
            "batch_size", "chunks", "buffer_token_size", "stride_rows", "stride_offsets", "stride_lengths",
            "lengths_include_new", "wants_required_chunks",
        )  # fmt: skip
        types = dict.fromkeys(tables, "*i32") | dict.fromkeys(numbers, "i32")
        constants = {"PAGE_SIZE": problem.page_size, "BLOCK": PLAN_BLOCK}
        return (KernelSpec("plan.plan", tuple(types.items()), tuple(constants.items()), num_warps=8),)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PlanArgs], Again | None]:
        """Compile; return the callable that only launches."""
        (spec,) = Plan.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)

        def run(args: PlanArgs) -> Again | None:
            cache, rows, offsets, used = args.cache, args.buffer_row_offsets, args.cache_offsets, args.buffer_lengths
            batch = cache.batch_size
            required = args.required_chunks
            values = {
                "buffer_row_offsets": rows, "cache_offsets": offsets, "buffer_lengths": used,
                "required_chunks": used if required is None else required, "wants_required_chunks": int(required is
                not None), "input_row_offsets": args.input_row_offsets, "lengths": cache.lengths,
                "lengths_include_new": int(cache.lengths_include_new),
                "batch_size": batch, "chunks": rows.shape[0], "buffer_token_size": args.buffer_token_size,
                "stride_rows": rows.stride(0), "stride_offsets": offsets.stride(0), "stride_lengths": used.stride(0),
            }  # fmt: skip
            segments = max(1, min(PLAN_SEGMENTS, -(-batch // PLAN_BLOCK)))
            return kernel.launch(values, min(rows.shape[0], PLAN_PROGRAMS // segments), segments)

        return run

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield the usual problems."""
        for page_size in (1, 64):
            yield Problem("plan", "int32", "int32", page_size=page_size, alignment=4)
