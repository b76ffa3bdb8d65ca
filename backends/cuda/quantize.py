"""Rows to fp8: ``sm80/quantize.cu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mla.backends.cuda import runtime
from mla.backends.cuda.compiler import KernelSpec
from mla.backends.params import C_SIZES, C_TYPES, QuantizeParams, packer, row_fields
from mla.problem import Again, Problem, QuantizeArgs

if TYPE_CHECKING:
    import torch


THREADS = 256
#: Threads that share a scale, by granularity.
LANES = {0: THREADS, 64: 8, 128: 16, 576: 32}


class Quantize:
    """Quantisation on an NVIDIA GPU, in integer arithmetic where it has no fp8 instructions."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: what the registry admits fits."""
        return None

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead: aligned bf16 rows."""
        for granularity in LANES:
            yield Problem("quantize", "bf16", "fp8", granularity=granularity)
        yield Problem("quantize", "bf16", "fp8", features=frozenset({"static_scale"}))

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernel."""
        static = "static_scale" in problem.features
        way = "static" if static else f"g{problem.granularity}"
        name = f"quantize.{problem.dtypes}_{problem.out_dtype}.{way}.a{problem.alignment}"
        defines = (
            ("MLA_SOURCE", C_TYPES[problem.dtypes]),
            ("MLA_OUTPUT", C_TYPES[problem.out_dtype]),
            ("MLA_GRANULARITY", problem.granularity),
            ("MLA_STATIC_SCALE", int(static)),
            ("MLA_ALIGNMENT", problem.alignment),
        )
        shared = 0 if static or problem.granularity else THREADS // 32 * 4  # the maximum of each warp
        spec = KernelSpec(name, "sm80/quantize.cu", "mla_quantize", QuantizeParams, THREADS, shared, defines=defines)
        return (spec,)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[QuantizeArgs], Again | None]:
        """Compile and load; the result launches."""
        (spec,) = Quantize.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        pack, size, output_size = packer(QuantizeParams), C_SIZES[problem.dtypes], C_SIZES[problem.out_dtype]
        granularity, units_per_block = problem.granularity, THREADS // LANES[problem.granularity]

        def run(args: QuantizeArgs) -> Again | None:
            tokens, heads, width = args.x.shape
            scale = args.scale
            units = tokens * heads * -(-width // granularity) if granularity else tokens
            params = pack(
                *row_fields(args.x, size),
                *row_fields(args.output, output_size),
                scale.data_ptr(),
                scale.stride(0) * 4 if scale.shape[0] > 1 else 0,
                scale.stride(1) * 4 if scale.shape[1] > 1 else 0,
                tokens,
                heads,
                width,
            )
            return kernel.launch(params, -(-units // units_per_block))

        return run
