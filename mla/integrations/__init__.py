"""Adapters between this library and serving engines. `mla` imports none of them; each imports its engine."""

from __future__ import annotations

import importlib.util

import torch

from mla.errors import MissingPackageError
from mla.target import install_hint


def require_package(name: str, install: str = "") -> None:
    """Raise unless the package `name` is installed.

    Parameters
    ----------
    install : str
        The command that installs it; an extra of this package when empty.

    Raises
    ------
    MissingPackageError
    """
    if importlib.util.find_spec(name) is None:
        raise MissingPackageError(f"mla.integrations.{name} needs {name}: {install or install_hint(name)}")


def target_of(device: torch.device) -> str:
    """Return the target that an engine's call has, which names none: the vendor of its tensors, or the CPU."""
    return "cpu" if device.type == "cpu" else "gpu"
