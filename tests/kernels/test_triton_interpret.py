"""The Triton kernels on CPU tensors under Triton's interpreter, against the oracle.

``TRITON_INTERPRET`` counts when Triton is first imported, so the cases run in a process of their own: the cross-backend
matrix, with a selection of its cases. The interpreter checks logic, not compiled code, and is known to be wrong in
places (see mla/backends/triton).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mla
from mla.errors import DeviceError

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]

SELECTIONS = {
    "plan": "test_plan and triton",
    "gather": "test_gather and triton and (64 or 16)",
    "store": "test_store and triton",
    "merge": "test_merge and triton",
    "quantize": "test_quantize and triton",
    "prefill": "test_prefill and triton.any and (default or sink_window or softcap or fp16+fp8_rope] or number)",
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already inside")
@pytest.mark.parametrize("op", SELECTIONS)
def test_interpreted(op: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/kernels/test_matrix.py",
        "-k",
        SELECTIONS[op],
        "-p",
        "no:randomly",
    ]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= 3


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="CPU tensors are taken here")
def test_cpu_tensors_are_refused_with_the_hint() -> None:
    part, lse = torch.zeros(2, 1, 128), torch.zeros(2, 1)
    with pytest.raises(DeviceError, match="TRITON_INTERPRET=1"):
        mla.merge_attn_states(torch.empty_like(part), part, lse, part, lse, target="triton")
