"""The gfx90a kernels through a real hipRTC: that of Debian 12 (ROCm 5.2.3), which compiles without a GPU.

It runs in a process of its own, and for gfx90a alone: given gfx942, which it does not know, it ends the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = "libamdhip64-5 libhiprtc-builtins5 libamd-comgr2 rocm-device-libs"
ROOT = Path(__file__).parents[2]
FOLDERS = (*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), "/usr/lib/x86_64-linux-gnu")
LIBRARY = next((path for path in (Path(folder) / "libamdhip64.so.5" for folder in FOLDERS) if path.exists()), None)

SCRIPT = """
import json
from mla.backends.rocm import compiler
from tests.kernels.test_rocm_compile import one_of_each
reports = {}
for kernel_id, spec in one_of_each("gfx90a"):
    report = compiler.compile_unit(compiler.unit(spec, "gfx90a")).report
    reports[kernel_id] = {name: value for name, value in report.items() if name != "log"}
print(json.dumps(reports))
"""


@pytest.mark.skipif(importlib.util.find_spec("hip") is None, reason="no hip-python: pip install hip-python")
@pytest.mark.skipif(LIBRARY is None, reason=f"no libamdhip64.so.5: apt install {PACKAGES} (Debian 12)")
def test_every_kernel(tmp_path: Path) -> None:
    assert LIBRARY is not None
    (tmp_path / "lib").mkdir()
    for name in ("libamdhip64.so", "libhiprtc.so"):  # hipRTC is part of the one library there
        (tmp_path / "lib" / name).symlink_to(LIBRARY)
    environment = {**os.environ, "ROCM_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(done.stdout.splitlines()[-1])
    assert len(reports) >= 20
    for kernel_id, report in reports.items():
        assert report["vgpr_spills"] == 0, kernel_id
        if "prefill" in kernel_id:
            assert report["vgprs"] <= (256 if "d192x128" in kernel_id else 512), kernel_id
