"""The merge of two attention results: ``cdna/merge.hip``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mla.backends.params import C_TYPES, HeadRows, MergeParams, head_rows
from mla.backends.rocm import runtime
from mla.backends.rocm.compiler import KernelSpec
from mla.problem import SUPPORTED_DIMS, MergeArgs, Problem

if TYPE_CHECKING:
    import torch

THREADS = 256
#: (token, head) rows of a thread: with two inputs, eight 16-byte loads in flight.
ROWS = 4
_CHUNK = 8


class Merge:
    """The merge on an AMD GPU: any strides, the output may be an input."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: what the registry admits fits."""
        return None

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead."""
        for dims in SUPPORTED_DIMS:
            for out_dtype in ("bf16", "fp16", "fp32"):
                for dtype in dict.fromkeys((out_dtype, "fp32")):
                    yield Problem("merge", dtype, out_dtype, dims=dims)

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernel."""
        name = f"merge.{problem.dtypes}_{problem.out_dtype}.dv{problem.v_head_dim}.a{problem.alignment}"
        defines = (
            ("MLA_SOURCE", C_TYPES[problem.dtypes]),
            ("MLA_OUTPUT", C_TYPES[problem.out_dtype]),
            ("MLA_V_HEAD_DIM", problem.v_head_dim),
            ("MLA_ALIGNMENT", problem.alignment),
            ("MLA_ROWS", ROWS),
        )
        return (KernelSpec(name, "cdna/merge.hip", "mla_merge", MergeParams, THREADS, defines=defines),)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[MergeArgs], None]:
        """Compile and load; the result launches."""
        (spec,) = Merge.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        rows_per_block = ROWS * THREADS * _CHUNK // problem.v_head_dim

        def run(args: MergeArgs) -> None:
            tokens, heads = args.output.shape[:2]
            params = MergeParams(
                head_rows(args.output),
                head_rows(args.prefix_output),
                head_rows(args.suffix_output),
                head_rows(args.prefix_lse),
                head_rows(args.suffix_lse),
                HeadRows() if args.output_lse is None else head_rows(args.output_lse),
                tokens,
                heads,
            )
            kernel.launch(params, -(-tokens * heads // rows_per_block))

        return run
