"""HIP C++ -> amdgcn assembly with the clang of the ziglang wheel; no ROCm is needed.

The device code generator is the same LLVM target that hipRTC uses; `hip_prelude.h` stands in for hipRTC's headers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest

ARCHS = ("gfx90a", "gfx942", "gfx950")
needs_clang = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="no clang for AMD targets: pip install ziglang"
)
_PRELUDE = Path(__file__).with_name("hip_prelude.h")


class HipCompileError(Exception):
    """clang refused the source; the message is its log."""


@lru_cache(maxsize=256)
def compile_hip(source: str, arch: str, options: Sequence[str] = ()) -> str:
    """Assembly of HIP source text for one architecture.

    Raises
    ------
    HipCompileError
        With clang's log.
    """
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as folder:
        hip, ll, asm = (Path(folder) / f"{name}.{suffix}" for suffix in ("hip", "ll", "s"))
        hip.write_text(source)
        _clang(
            "-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", f"--offload-arch={arch}", "-nogpulib",
            "-nogpuinc", "-O3", "-std=c++17", "-include", str(_PRELUDE), *options, "-S", "-emit-llvm",
            "-o", str(ll), str(hip),
        )  # fmt: skip
        _clang(
            "-x", "ir", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-O3", "-nogpulib", "-S", "-o", str(asm), str(ll)
        )
        return asm.read_text()


def _clang(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "ziglang", "clang", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise HipCompileError(done.stderr)
