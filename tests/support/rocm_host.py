"""The ROCm kernels built as host C++ and run workgroup by workgroup: quick to debug, and divergent barriers are found.

`on_host(monkeypatch, ...)` replaces what touches a device (loading, device properties) and nothing else: the entry
classes, their specs and the packing of parameters are the backend's own. What stands in for the hardware is told in
rocm_host.hpp and host_fibers.hpp. gfx950 is left to the interpreter: its `__bf16` is not in every host compiler.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mla.backends.rocm import compiler
from mla.backends.rocm.compiler import KernelSpec
from tests.support.host_execution import HERE, HostExecutor, HostFault, Mutation, needs_compiler
from tests.support.rocm import stand_in, through_public_functions

__all__ = ["ARCHS", "HostFault", "RocmHost", "needs_compiler", "on_host"]

ARCHS = ("gfx90a", "gfx942")

#: What only clang or only AMD's target knows, as patterns, and the same for a host compiler.
_ADAPTED = {
    r"typedef (\w+) (\w+) __attribute__\(\(ext_vector_type\((\d+)\)\)\)": (
        r"typedef \1 \2 __attribute__((vector_size(\3 * sizeof(\1))))"
    ),
    r"\*\(const (\w+) __attribute__\(\(address_space\(1\)\)\)\*\)p": r"host::load<\1>(p)",
    r"\*\(T __attribute__\(\(address_space\(1\)\)\)\*\)p = x": "host::store<T>(p, x)",
    r'asm( volatile)?\("" : "\+[vs]"': 'asm volatile("" : "+r"',
    r"__INTADDR__\(&\(\(\(type\*\)0\)->field\)\)": "__builtin_offsetof(type, field)",
    # A barrier knows the line that calls it.
    r"void barrier\(\)": "void barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE())",
    r"__builtin_amdgcn_s_barrier\(\)": "__builtin_amdgcn_s_barrier(file, line)",
}


class RocmHost(HostExecutor):
    """Stands for an AMD GPU."""

    definitions = (HERE / "rocm_host.hpp").read_text()
    warp = 64

    def __init__(self, arch: str, folder: Path, mutate: Mutation | None = None, seed: int = 0) -> None:
        super().__init__(folder, mutate, seed)
        self.arch = arch

    def text(self, spec: KernelSpec) -> str:
        """Return the text that hipRTC is given."""
        return f"#define __{self.arch}__ 1\n{compiler.unit(spec, self.arch).text}"

    def adapt(self, text: str) -> str:
        """Replace what a host compiler does not know; without a name outside, static variables may have a section."""
        for pattern, replacement in _ADAPTED.items():
            text = re.sub(pattern, replacement, text)
        return f"namespace {{\n{text}\n}}"


def on_host(
    monkeypatch: pytest.MonkeyPatch, arch: str, folder: Path, mutate: Mutation | None = None, seed: int = 0
) -> RocmHost:
    """Let the public functions run the ROCm backend on CPU tensors, on the host, for the rest of a test."""
    executor = RocmHost(arch, folder, mutate, seed)
    stand_in(monkeypatch, executor)
    through_public_functions(monkeypatch, executor)
    return executor
