"""The CPU as a device: always there, nothing to load."""

from __future__ import annotations

import torch

from mla.target import Availability


def probe() -> Availability:
    """Return what this backend runs on."""
    return Availability(None, ("cpu",), {"torch": torch.__version__})


def arch_of(device: torch.device) -> str:
    """Return the architecture name of a device."""
    return device.type
