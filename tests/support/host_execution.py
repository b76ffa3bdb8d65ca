"""Kernels built as host C++ and run block by block: what the CUDA and the ROCm executor share.

The threads of a block are fibers (host_fibers.hpp). A file of definitions stands in for the vendor's compiler
(cuda_execution.hpp, rocm_host.hpp); the kernel's text is the very one that is compiled for the device. MLA_HOST_FLAGS
adds options of the host compiler, such as ``-O0 -g`` for a debugger.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.mask_host import compiler as host_compiler
from tests.support.rocm import tensors_of

#: Changes a kernel's source text before it is compiled.
Mutation = Callable[[str], str]

needs_compiler = pytest.mark.skipif(host_compiler() is None, reason="no host C++ compiler")
HERE = Path(__file__).parent
_RESULTS = {
    1: "threads wait for others that never come: ",
    2: "an access outside the tensors of the call",
    3: "a block goes on for ever: ",
}


class HostFault(Exception):
    """A deadlock or divergent barrier, with who waits where; or a stray access."""


class _Range(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p)]


class HostExecutor:
    """Stands for a device: what `runtime.load` returns runs on the host.

    A vendor's executor gives `definitions` (C++ text before the kernel's namespace), `warp` (lanes) and `text`.

    Attributes
    ----------
    folder : Path
        Where sources and libraries go; equal texts are built once.
    launched : list of str
        Name of the kernel of each launch.
    slow : int
        The warp that moves only when nothing else can; past the last one: the copy engine (CUDA); -1: none.
    """

    definitions: str
    warp: int

    def __init__(self, folder: Path, mutate: Mutation | None = None, seed: int = 0) -> None:
        self.folder, self.mutate, self.seed = folder, mutate, seed
        self.launched: list[str] = []
        self.slow = -1
        self._tensors: list[torch.Tensor] = []

    def text(self, spec: Any) -> str:
        """Return the kernel's assembled text."""
        raise NotImplementedError

    def adapt(self, text: str) -> str:
        """Return a kernel's text as a host compiler takes it."""
        return text

    def load(self, spec: Any, device: torch.device) -> Any:
        """Take the place of `runtime.load`; what is never launched is never built."""

        def launch(params: ctypes.Structure | bytes, *grid: int) -> None:
            library = ctypes.CDLL(str(self._build(spec)))
            library.host_report.restype = ctypes.c_char_p
            block = bytes(params)
            assert len(block) == ctypes.sizeof(spec.params)
            storages = [tensor.untyped_storage() for tensor in self._tensors]
            ranges = [_Range(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]
            extents = (ctypes.c_int * 3)(*grid, *(1,) * (3 - len(grid)))
            self.launched.append(spec.name)
            result = library.host_run(
                block, extents, spec.threads, self.seed, self.slow, (_Range * len(ranges))(*ranges), len(ranges)
            )
            if result:
                raise HostFault(_RESULTS[result] + library.host_report().decode())

        return SimpleNamespace(launch=launch)

    def run(self, prepared: Callable[[Any], None], args: Any) -> None:
        """Call a prepared entry with its tensors as the only memory there is."""
        self._tensors = list(tensors_of(args))
        prepared(args)

    def each_late(self, threads: int) -> Iterator[int]:
        """Let each warp of a block in turn, and then the copy engine, be as far behind the others as it can be."""
        for late in range(threads // self.warp + 1):
            self.slow = late
            yield late
        self.slow = -1

    def _build(self, spec: Any) -> Path:
        text = self.text(spec)
        if self.mutate is not None:
            mutated = self.mutate(text)
            if mutated == text:
                raise ValueError("the mutation changes nothing")
            text = mutated
        params = f"kernel::{spec.params.__name__}"
        text = f"""#define HOST_WARP {self.warp}
{(HERE / "host_fibers.hpp").read_text()}
{self.definitions}
namespace kernel {{
{self.adapt(text)}
}}
static_assert(sizeof({params}) == {ctypes.sizeof(spec.params)}, "the host packs other bytes");
void host::call_kernel(const void* params) {{ kernel::{spec.symbol}(*static_cast<const {params}*>(params)); }}
"""
        options = shlex.split(os.environ.get("MLA_HOST_FLAGS", ""))
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        source, library = self.folder / f"{name}.cpp", self.folder / f"{name}.so"
        if not library.exists():
            source.write_text(text)
            flags = ["-std=c++17", "-O2", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
            command = [str(host_compiler()), *flags, *options]
            done = subprocess.run([*command, "-o", library, source], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr[:4000])
        return library
