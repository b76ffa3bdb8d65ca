"""What a command runs on: the target, its device, and the versions that a number depends on."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mla import dispatch, registry
from mla._paths import PACKAGE
from mla.errors import TargetError
from mla.target import BACKENDS, Target, device_arch, runs_on

_GPU_BACKENDS = ("cuda", "rocm", "triton")


def available_targets() -> list[str]:
    """Return the targets of single backends that can run here, the CPU's first."""
    names = ["cpu", *_GPU_BACKENDS, *sorted(set(registry.default().backends) - set(BACKENDS))]
    return [name for name in names if all(dispatch.availability(one).reason is None for one in Target(name).backends)]


def default_target() -> str:
    """Return ``gpu`` where a backend can run on one, else ``cpu``."""
    return "gpu" if torch.cuda.is_available() and set(_GPU_BACKENDS) & set(available_targets()) else "cpu"


def locate(text: str) -> tuple[Target, torch.device]:
    """Return the target and the device that its tensors belong on.

    Raises
    ------
    TargetError
        The target is unknown, or cannot run on this machine; with the reason.
    """
    target = Target.parse(text, backends=registry.default().backends)
    reasons = {backend: dispatch.availability(backend).reason for backend in target.backends}
    gpu = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    for device in (*gpu, torch.device("cpu")):
        if any(reason is None and runs_on(backend, device) for backend, reason in reasons.items()):
            if target.arch is not None and target.arch != device_arch(device):
                raise TargetError(f"target {text!r} names {target.arch}, but {device} is {device_arch(device)}")
            return target, device
    why = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items() if reason is not None)
    raise TargetError(f"target {text!r} cannot run on this machine: {why}")


def name_of(device: torch.device) -> str:
    """Return a device's name as its maker has it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'s' * (threads > 1)}"


def describe(device: torch.device) -> dict[str, Any]:
    """Return what a number of this run depends on, as plain data."""
    return {
        "device": name_of(device),
        "arch": device_arch(device),
        "driver": _driver() if device.type == "cuda" else None,
        "mla": package_version(),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def package_version() -> str:
    """Return the installed version, or say that there is none."""
    try:
        return version("mla-prefill")
    except PackageNotFoundError:
        return "not installed (run from a checkout)"


def commit() -> str | None:
    """Return the commit of the checkout that the package runs from, ``+`` behind it when files have changed since.

    The variable ``MLA_COMMIT`` says it for a copy, whose own ``.git`` may be missing or older than its files.
    """
    root = PACKAGE.parent
    if "MLA_COMMIT" in os.environ or not (root / ".git").exists():
        return os.environ.get("MLA_COMMIT")
    head, changes = (
        _output("git", "-C", str(root), *words) for words in (("rev-parse", "HEAD"), ("status", "-s", "-uno"))
    )
    return head and head + ("+" if changes else "")


def _driver() -> str | None:
    if torch.version.hip is not None:
        return torch.version.hip
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")


@functools.cache
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
