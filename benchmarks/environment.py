"""What the numbers of a benchmark depend on, as every JSON in results/ has it."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

from mla.cli import machine


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Describe a device, the current GPU if none is given."""
    device = device or torch.device("cuda", torch.cuda.current_device())
    found = machine.describe(device)
    if device.type == "cuda":
        found |= {"power limit": _power_limit(device), "cudnn": str(torch.backends.cudnn.version())}
    return found


def _power_limit(device: torch.device) -> str:
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader", "-i", name]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
