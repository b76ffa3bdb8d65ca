"""The merge of two attention results: ``sm80/merge.cu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mla.backends.cuda import runtime
from mla.backends.cuda.compiler import KernelSpec
from mla.backends.params import C_SIZES, C_TYPES, MergeParams, packer, row_fields
from mla.problem import SUPPORTED_DIMS, Again, MergeArgs, Problem

if TYPE_CHECKING:
    import torch


THREADS = 256
#: (token, head) rows of a thread: with two inputs, four 16-byte loads in flight.
ROWS = 2
_CHUNK = 8


class Merge:
    """The merge on an NVIDIA GPU: any strides, the output may be an input."""

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
        return (KernelSpec(name, "sm80/merge.cu", "mla_merge", MergeParams, THREADS, defines=defines),)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[MergeArgs], Again | None]:
        """Compile and load; the result launches."""
        (spec,) = Merge.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        pack, size, output_size = packer(MergeParams), C_SIZES[problem.dtypes], C_SIZES[problem.out_dtype]
        rows_per_block = ROWS * THREADS * _CHUNK // problem.v_head_dim

        def run(args: MergeArgs) -> Again | None:
            tokens, heads = args.output.shape[:2]
            params = pack(
                *row_fields(args.output, output_size),
                *row_fields(args.prefix_output, size),
                *row_fields(args.suffix_output, size),
                *row_fields(args.prefix_lse, 4),
                *row_fields(args.suffix_lse, 4),
                *row_fields(args.output_lse, 4),
                tokens,
                heads,
            )
            return kernel.launch(params, -(-tokens * heads // rows_per_block))

        return run
