"""The merge entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mla.backends.triton import runtime
from mla.backends.triton.compiler import ELEMENT_TYPES, ITEMSIZE, KernelSpec
from mla.backends.triton.entry import Entry
from mla.problem import Again, MergeArgs, Problem

#: (row, head) pairs of one program.
BLOCK_R = 16

_MERGED = ("output", "prefix", "suffix", "prefix_lse", "suffix_lse", "output_lse")


class Merge(Entry):
    """Two partial results into one; a program takes `BLOCK_R` (row, head) pairs."""

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Describe the kernel."""
        types: dict[str, str | None] = {"output": "*" + ELEMENT_TYPES[problem.out_dtype]}
        types |= dict.fromkeys(("prefix", "suffix"), "*" + ELEMENT_TYPES[problem.dtypes])
        wants_lse = "lse" in problem.features
        types |= {"prefix_lse": "*fp32", "suffix_lse": "*fp32", "output_lse": "*fp32" if wants_lse else None}
        types |= {"pairs": "i64", "num_heads": "i32", "in_place": "i32"}
        divisible = dict.fromkeys(("output", "prefix", "suffix"), problem.alignment)
        for tensor in _MERGED:
            for axis in "th":
                types[f"stride_{tensor}_{axis}"] = "i64" if types[tensor] else None
                if "lse" not in tensor:
                    kind = problem.out_dtype if tensor == "output" else problem.dtypes
                    divisible[f"stride_{tensor}_{axis}"] = max(problem.alignment // ITEMSIZE[kind], 1)
        constants = {"V_HEAD_DIM": problem.v_head_dim, "INTERPRETED": arch == "cpu", "BLOCK_R": BLOCK_R}
        return (
            KernelSpec("merge.merge", tuple(types.items()), tuple(constants.items()), None, tuple(divisible.items())),
        )

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[MergeArgs], Again | None]:
        """Compile; return the callable that only launches."""
        (spec,) = Merge.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)

        def run(args: MergeArgs) -> Again | None:
            output = args.output
            pairs = output.shape[0] * output.shape[1]
            in_place = output.dtype == args.prefix_output.dtype and output.data_ptr() == args.prefix_output.data_ptr()
            values: dict[str, Any] = {
                "output": output, "prefix": args.prefix_output, "suffix": args.suffix_output,
                "prefix_lse": args.prefix_lse, "suffix_lse": args.suffix_lse, "output_lse": args.output_lse,
                "pairs": pairs, "num_heads": output.shape[1], "in_place": int(in_place),
            }  # fmt: skip
            for name in _MERGED:
                tensor = values[name]
                if tensor is not None:
                    values[f"stride_{name}_t"], values[f"stride_{name}_h"] = tensor.stride(0), tensor.stride(1)
            return kernel.launch(values, -(-pairs // BLOCK_R))

        return run

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield the usual problems."""
        for dtypes, out_dtype in (("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")):
            yield Problem("merge", dtypes, out_dtype, features=frozenset({"lse"}))
