"""The ROCm backend's Python side, end to end through the real hip-python, on a machine without ROCm."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla.backends.rocm import runtime
from tests.support.hip import needs_clang

ROOT = Path(__file__).parents[2]
DOUBLE = ROOT / "tests" / "support" / "hip_double"
needs_bindings = pytest.mark.skipif(
    importlib.util.find_spec("hip") is None, reason="no hip-python: pip install hip-python"
)


@pytest.fixture(scope="module")
def rocm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ROCM_PATH, with the double under both libraries' names."""
    root = tmp_path_factory.mktemp("rocm")
    (root / "lib").mkdir()
    library = root / "lib" / "libamdhip64.so"
    # The system's compiler is ready at once; zig's builds its C++ library first.
    compiler = [found] if (found := shutil.which("c++")) else [sys.executable, "-m", "ziglang", "c++"]
    command = ("-shared", "-fPIC", "-O1", "-std=c++17", "-o", str(library), str(DOUBLE / "double.cpp"))
    subprocess.run([*compiler, *command], check=True)
    (root / "lib" / "libhiprtc.so").symlink_to(library)
    return root


@needs_bindings
@needs_clang
def test_every_operation_through_hip_python(rocm_path: Path, tmp_path: Path) -> None:
    """hipRTC's and HIP's calls, parameter blocks, streams, errors and the cache, with the kernels executed."""
    environment = {
        **os.environ,
        "ROCM_PATH": str(rocm_path),
        "MLA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    library = rocm_path / "lib" / "libamdhip64.so"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hip_double.session", str(library)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mla_prefill" in done.stdout
    assert len(list((tmp_path / "cache").glob("rocm.gfx942.*.hsaco"))) == 5


@pytest.mark.skipif(torch.version.hip is not None, reason="this torch has a HIP runtime")
def test_without_rocm_the_reason_says_what_to_install() -> None:
    reason = runtime.probe().reason
    assert reason is not None
    assert "install" in reason or "not built for AMD" in reason
