"""The quantise entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mla.backends.triton import configs, runtime
from mla.backends.triton.compiler import ELEMENT_TYPES, ITEMSIZE, KernelSpec
from mla.backends.triton.entry import Entry, as_bytes
from mla.problem import Again, Problem, QuantizeArgs

#: Columns of a tile and blocks of columns of a program, by granularity; 0: elements of a token at a time.
TILES = {0: (1024, 1), 64: (64, 32), 128: (128, 16), 576: (1024, 2)}


class Quantize(Entry):
    """Rows to fp8: a program takes some blocks of columns, or a token."""

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Describe the kernel."""
        types: dict[str, str | None] = {"x": "*" + ELEMENT_TYPES[problem.dtypes]}
        types |= {"output": "*" + configs.fp8_element(arch, problem.out_dtype), "scale": "*fp32"}
        types |= dict.fromkeys(("tokens", "heads", "width"), "i32")
        divisible = dict.fromkeys(("x", "output"), problem.alignment) | {"width": 8}
        for tensor in ("x", "output", "scale"):
            for axis in "th":
                types[f"stride_{tensor}_{axis}"] = "i64"
                if tensor != "scale":
                    itemsize = ITEMSIZE[problem.dtypes if tensor == "x" else problem.out_dtype]
                    divisible[f"stride_{tensor}_{axis}"] = max(problem.alignment // itemsize, 1)
        columns, rows = TILES[problem.granularity]
        constants = {
            "GRANULARITY": problem.granularity,
            "STATIC_SCALE": "static_scale" in problem.features,
            "FNUZ": "fnuz" in problem.out_dtype,
            "INTERPRETED": arch == "cpu",
            "BLOCK_R": rows,
            "BLOCK_D": columns,
        }
        spec = KernelSpec(
            "quantize.quantize", tuple(types.items()), tuple(constants.items()), None, tuple(divisible.items())
        )
        return (spec,)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[QuantizeArgs], Again | None]:
        """Compile; return the callable that only launches."""
        (spec,) = Quantize.specs(problem, runtime.arch_of(device))
        kernel = runtime.load(spec, device)
        granularity, rows = problem.granularity, TILES[problem.granularity][1]

        def run(args: QuantizeArgs) -> Again | None:
            x, output, scale = args.x, args.output, args.scale
            tokens, heads, width = x.shape
            values = {
                "x": x, "stride_x_t": x.stride(0), "stride_x_h": x.stride(1), "output": as_bytes(output),
                "stride_output_t": output.stride(0), "stride_output_h": output.stride(1), "scale": scale,
                "stride_scale_t": scale.stride(0) if scale.shape[0] > 1 else 0,
                "stride_scale_h": scale.stride(1) if scale.shape[1] > 1 else 0,
                "tokens": tokens, "heads": heads, "width": width,
            }  # fmt: skip
            units = tokens * heads * -(-width // granularity) if granularity else tokens
            return kernel.launch(values, -(-units // rows))

        return run

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield the usual problems."""
        fp8 = "fp8_fnuz" if arch == "gfx942" else "fp8"
        for granularity in TILES:
            yield Problem("quantize", "bf16", fp8, granularity=granularity)
        yield Problem("quantize", "bf16", fp8, features=frozenset({"static_scale"}))
