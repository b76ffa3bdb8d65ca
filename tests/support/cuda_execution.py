"""The CUDA backend on a machine without a GPU: its kernels built as host C++ and run block by block.

`executed(monkeypatch, ...)` replaces what touches a device (loading, device properties) and nothing else: the entry
classes, their specs and the packing of parameters are the backend's own. What stands in for the hardware, and what it
makes of races and stray reads, is told in cuda_execution.hpp and host_fibers.hpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla import dispatch, jit_cache
from mla._paths import KERNELS
from mla.backends.cuda import compiler, runtime, tensor_map
from mla.backends.cuda.compiler import KernelSpec
from tests.support.host_execution import HERE, HostExecutor, HostFault, Mutation, needs_compiler

__all__ = ["Executor", "HostFault", "Mutation", "executed", "needs_compiler"]


_SM90_HEADERS = ("ptx_sm90.cuh", "wgmma_sm90.cuh", "wgmma_e4m3_sm90.cuh")


class _Map(ctypes.Structure):
    """What stands for a tensor map's 128 bytes, as cuda_execution_sm90.cuh reads it."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("shape", ctypes.c_uint64 * 3), ("strides", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint32 * 3), ("steps", ctypes.c_uint32 * 3), ("element", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
    ]  # fmt: skip


class Driver:
    """Stands for the NVIDIA driver: writes tensor maps of three dimensions, and refuses what it would refuse."""

    @staticmethod
    def cuTensorMapEncodeTiled(
        address: Any, kind: int, rank: Any, data: Any, shape: Any, strides: Any, box: Any, steps: Any,
        interleave: int, swizzle: int, promotion: int, fill: int,
    ) -> int:  # fmt: skip
        element, width = {0: 1, 6: 2, 9: 2}[kind], (0, 32, 64, 128)[swizzle]
        assert rank.value == 3 and interleave == fill == 0
        fits = data.value % 16 == 0 and all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in strides)
        fits = fits and all(0 < extent <= 1 << 32 for extent in shape) and all(1 <= step <= 8 for step in steps)
        fits = fits and all(1 <= extent <= 256 for extent in box) and steps[0] == 1 and box[0] * element <= width
        made = _Map(data.value, tuple(shape), (element, *strides), tuple(box), tuple(steps), element, width)
        ctypes.memmove(address.value, ctypes.byref(made), ctypes.sizeof(made))
        return 0 if fits else 1

    @staticmethod
    def cuGetErrorName(result: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


class Executor(HostExecutor):
    """Stands for an NVIDIA GPU."""

    definitions = (HERE / "cuda_execution.hpp").read_text()
    warp = 32

    def text(self, spec: KernelSpec) -> str:
        """Return the kernel's text with C++ in the place of its PTX."""
        ptx, sm90 = ((HERE / f"cuda_execution_{name}.cuh").read_text() for name in ("ptx", "sm90"))
        instructions = {"ptx.cuh": ptx, **dict.fromkeys(_SM90_HEADERS, sm90)}
        text = jit_cache.assemble(
            KERNELS / "cuda" / spec.source,
            include_dirs=(compiler.INCLUDE,),
            defines={"MLA_THREADS": spec.threads, "MLA_SHARED_BYTES": spec.shared_bytes, **dict(spec.defines)},
            generated={**dict(spec.generated), **instructions},
        )
        return text.replace("extern __shared__", "extern")


def executed(
    monkeypatch: pytest.MonkeyPatch, arch: str, entry: Any, folder: Path, mutate: Mutation | None = None, seed: int = 0
) -> Executor:
    """Let the public functions run an entry of the CUDA backend on CPU tensors for the rest of a test."""
    executor = Executor(folder, mutate, seed)
    monkeypatch.setattr(runtime, "load", executor.load)
    monkeypatch.setattr(runtime, "arch_of", lambda device: arch)
    monkeypatch.setattr(runtime, "properties", lambda device: SimpleNamespace(multi_processor_count=1))
    for module in (runtime, tensor_map):
        monkeypatch.setattr(module, "driver", lambda: Driver)
    tensor_map.tensor_map.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def resolve(problem: Any, target: object, device: torch.device) -> Callable[[Any], None]:
        prepared = entry.prepare(problem, device)
        return lambda args: executor.run(prepared, args)

    monkeypatch.setattr("mla.dispatch.resolve", resolve)
    dispatch.forget()
    return executor
