"""The CUDA backend on a machine without a GPU: its kernels built as host C++ and run block by block.

`executed(monkeypatch, ...)` replaces what touches a device (loading, device properties) and nothing else: the entry
classes, their specs and the packing of parameters are the backend's own. What stands in for the hardware, and what it
makes of races and stray reads, is told in cuda_execution.hpp and host_fibers.hpp.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla import dispatch, jit_cache
from mla._paths import KERNELS
from mla.backends.cuda import compiler, runtime
from mla.backends.cuda.compiler import KernelSpec
from tests.support.host_execution import HERE, HostExecutor, HostFault, Mutation, needs_compiler

__all__ = ["Executor", "HostFault", "Mutation", "executed", "needs_compiler"]


class Executor(HostExecutor):
    """Stands for an NVIDIA GPU."""

    definitions = (HERE / "cuda_execution.hpp").read_text()
    warp = 32

    def text(self, spec: KernelSpec) -> str:
        """Return the kernel's text with `cuda_execution_ptx.cuh` in the place of its PTX."""
        return jit_cache.assemble(
            KERNELS / "cuda" / spec.source,
            include_dirs=(compiler.INCLUDE,),
            defines={"MLA_THREADS": spec.threads, "MLA_SHARED_BYTES": spec.shared_bytes, **dict(spec.defines)},
            generated={**dict(spec.generated), "ptx.cuh": (HERE / "cuda_execution_ptx.cuh").read_text()},
        )


def executed(
    monkeypatch: pytest.MonkeyPatch, arch: str, entry: Any, folder: Path, mutate: Mutation | None = None, seed: int = 0
) -> Executor:
    """Let the public functions run an entry of the CUDA backend on CPU tensors for the rest of a test."""
    executor = Executor(folder, mutate, seed)
    monkeypatch.setattr(runtime, "load", executor.load)
    monkeypatch.setattr(runtime, "arch_of", lambda device: arch)
    monkeypatch.setattr(runtime, "properties", lambda device: SimpleNamespace(multi_processor_count=1))

    def resolve(problem: Any, target: object, device: torch.device) -> Callable[[Any], None]:
        prepared = entry.prepare(problem, device)
        return lambda args: executor.run(prepared, args)

    monkeypatch.setattr("mla.dispatch.resolve", resolve)
    dispatch.forget()
    return executor
