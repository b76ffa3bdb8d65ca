"""Rows to fp8: ``cdna/quantize.hip``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mla.backends.params import C_TYPES, HeadRows, QuantizeParams
from mla.backends.rocm import runtime
from mla.backends.rocm.compiler import KernelSpec, fp8_name
from mla.problem import Problem, QuantizeArgs

if TYPE_CHECKING:
    import torch

THREADS = 256
#: Threads that share a scale, by granularity.
LANES = {0: THREADS, 64: 8, 128: 16, 576: 64}


def _rows(tensor: torch.Tensor) -> HeadRows:
    """Describe rows; an extent of 1 stands for all."""
    strides = (tensor.stride(i) * tensor.element_size() if tensor.shape[i] > 1 else 0 for i in (0, 1))
    return HeadRows(tensor.data_ptr(), *strides)


class Quantize:
    """Quantisation on an AMD GPU, elements encoded by integer arithmetic: gfx90a has no fp8 instructions."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: what the registry admits fits."""
        return None

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead: aligned bf16 rows."""
        for granularity in LANES:
            yield Problem("quantize", "bf16", fp8_name(arch), granularity=granularity)
        yield Problem("quantize", "bf16", fp8_name(arch), features=frozenset({"static_scale"}))

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
        return (KernelSpec(name, "cdna/quantize.hip", "mla_quantize", QuantizeParams, THREADS, defines=defines),)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[QuantizeArgs], None]:
        """Compile and load; the result launches."""
        (spec,) = Quantize.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        granularity, units_per_block = problem.granularity, THREADS // LANES[problem.granularity]

        def run(args: QuantizeArgs) -> None:
            tokens, heads, width = args.x.shape
            units = tokens * heads * -(-width // granularity) if granularity else tokens
            params = QuantizeParams(_rows(args.x), _rows(args.output), _rows(args.scale), tokens, heads, width)
            kernel.launch(params, -(-units // units_per_block))

        return run
