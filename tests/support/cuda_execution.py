"""The CUDA backend on a machine without a GPU: its kernels built as host C++ and run block by block.

`executed(monkeypatch, ...)` replaces what touches a device (loading, device properties) and nothing else: the entry
classes, their specs and the packing of parameters are the backend's own. What stands in for the hardware, and what it
makes of races and stray reads, is told in cuda_execution.hpp.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
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
from tests.support.mask_host import compiler as host_compiler
from tests.support.rocm import tensors_of

#: Changes a kernel's source text before it is compiled.
Mutation = Callable[[str], str]

needs_compiler = pytest.mark.skipif(host_compiler() is None, reason="no host C++ compiler")
_HERE = Path(__file__).parent
_RESULTS = {1: "threads wait for others that never come", 2: "a read outside the tensors of the call"}


class HostFault(Exception):
    """A deadlock or a stray read."""


class _Range(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p)]


class Executor:
    """Stands for a device: what `runtime.load` returns runs on the host.

    Attributes
    ----------
    folder : Path
        Where sources and libraries go; equal texts are built once.
    launched : list of str
        Name of the kernel of each launch.
    """

    def __init__(self, folder: Path, mutate: Mutation | None = None, seed: int = 0) -> None:
        self.folder, self.mutate, self.seed = folder, mutate, seed
        self.launched: list[str] = []
        self._tensors: list[torch.Tensor] = []

    def load(self, spec: KernelSpec, device: torch.device) -> Any:
        """Take the place of `runtime.load`; what is never launched is never built."""

        def launch(params: ctypes.Structure | bytes, grid_x: int) -> None:
            library = ctypes.CDLL(str(self._build(spec)))
            block = bytes(params)
            assert len(block) == ctypes.sizeof(spec.params)
            storages = [tensor.untyped_storage() for tensor in self._tensors]
            ranges = [_Range(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]
            self.launched.append(spec.name)
            result = library.host_run(
                block, grid_x, spec.threads, self.seed, (_Range * len(ranges))(*ranges), len(ranges)
            )
            if result:
                raise HostFault(_RESULTS[result])

        return SimpleNamespace(launch=launch)

    def run(self, prepared: Callable[[Any], None], args: Any) -> None:
        """Call a prepared entry with its tensors as the only memory there is."""
        self._tensors = list(tensors_of(args))
        prepared(args)

    def _build(self, spec: KernelSpec) -> Path:
        text = jit_cache.assemble(
            KERNELS / "cuda" / spec.source,
            include_dirs=(compiler.INCLUDE,),
            defines={"MLA_THREADS": spec.threads, "MLA_SHARED_BYTES": spec.shared_bytes, **dict(spec.defines)},
            generated={**dict(spec.generated), "ptx.cuh": (_HERE / "cuda_execution_ptx.cuh").read_text()},
        )
        if self.mutate is not None:
            mutated = self.mutate(text)
            assert mutated != text, "the mutation changes nothing"
            text = mutated
        params = f"kernel::{spec.params.__name__}"
        text = f"""{(_HERE / "cuda_execution.hpp").read_text()}
namespace kernel {{
{text}
}}
static_assert(sizeof({params}) == {ctypes.sizeof(spec.params)}, "the host packs other bytes");
void host::call_kernel(const void* params) {{ kernel::{spec.symbol}(*static_cast<const {params}*>(params)); }}
"""
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        source, library = self.folder / f"{name}.cpp", self.folder / f"{name}.so"
        if not library.exists():
            source.write_text(text)
            command = [str(host_compiler()), "-std=c++17", "-O2", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
            done = subprocess.run([*command, "-o", library, source], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[:4000]
        return library


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
