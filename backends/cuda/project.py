"""The up-projection to fp8 on Hopper: ``sm90/project.cu``, TMA and wgmma."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import Structure, c_int, c_longlong, c_void_p
from typing import TYPE_CHECKING

from mla.backends.cuda import runtime
from mla.backends.cuda.compiler import KernelSpec
from mla.backends.cuda.runtime import TensorMap, with_tail
from mla.backends.cuda.tensor_map import tensor_map
from mla.errors import ShapeError
from mla.problem import KV_LORA_RANK, Again, Problem, ProjectArgs

if TYPE_CHECKING:
    import torch

#: Rows and columns of a tile.
ROWS, COLUMNS = 192, 128

_SLICE = 32  # of k, in a stage of the weight
_STAGES = 4
_SHARED_BYTES = 1024 + ROWS * KV_LORA_RANK * 2 + _STAGES * (COLUMNS * _SLICE * 2 + 16) + KV_LORA_RANK // 64 * 16


class ProjectParams(Structure):
    """Parameter block of ``sm90/project.cu``."""

    _fields_ = with_tail(
        [
            ("a", TensorMap),
            ("b", TensorMap),
            ("output", c_void_p),
            ("output_stride", c_longlong),
            ("scale", c_void_p),
            ("rows", c_int),
            ("columns", c_int),
            ("scale_rows", c_int),
            ("column_tiles", c_int),
            ("tiles", c_int),
        ]
    )


class ProjectSm90:
    """Latent rows times a weight, or the other way round, in fp8 with given scales."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: what the registry admits fits."""
        return None

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead."""
        if arch == "sm_90a":
            yield Problem("project", "bf16", "fp8", features=frozenset({"static_scale"}))

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernel."""
        name = f"project.{problem.dtypes}_{problem.out_dtype}"
        return (KernelSpec(name, "sm90/project.cu", "mla_project", ProjectParams, 512, _SHARED_BYTES),)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[ProjectArgs], Again | None]:
        """Compile and load; the result launches."""
        (spec,) = ProjectSm90.specs(problem, runtime.arch_of(device))
        kernel, processors = runtime.load(spec, device), runtime.properties(device).multi_processor_count

        def run(args: ProjectArgs) -> Again | None:
            (rows, columns), column_tiles = args.output.shape, -(-args.output.shape[1] // COLUMNS)
            tiles = -(-rows // ROWS) * column_tiles
            if tiles == 0:
                return None
            scale_rows = -(-rows // len(args.scale))
            if len(args.scale) > 1 and (rows % len(args.scale) or scale_rows % 64):
                raise ShapeError(f"scale: {len(args.scale)} of them for {rows} rows, but 64 rows share one")
            params = ProjectParams(
                _map(args.a, ROWS, 64), _map(args.b, COLUMNS, _SLICE), args.output.data_ptr(),
                args.output.stride(0), args.scale.data_ptr(), rows, columns, scale_rows, column_tiles, tiles,
            )  # fmt: skip
            return kernel.launch(params, min(tiles, processors))

        return run


def _map(rows: torch.Tensor, box: int, width: int) -> TensorMap:
    """Return the map of [n, 512] rows in boxes of so many rows and columns."""
    count = rows.shape[0]
    stride = (rows.stride(0) if count > 1 else KV_LORA_RANK) * rows.element_size()
    return tensor_map(
        rows.data_ptr(), rows.dtype, (KV_LORA_RANK, count, 1), (stride, stride * count), (width, box, 1),
        swizzle=width * rows.element_size(),
    )  # fmt: skip
