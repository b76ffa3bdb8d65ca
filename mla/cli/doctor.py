"""``mla doctor``: what can run on this machine, and what mends the rest."""

from __future__ import annotations

import json
import platform
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mla import dispatch, jit_cache, registry
from mla.cli import machine
from mla.target import BACKENDS, TARGET_BACKENDS, Availability, Target


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Show for every target whether it can run here, or why not, with versions, devices and the cache folder."""
    report = examine()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    table = Table("target", "state", "architectures", "versions")
    for name, found in report["targets"].items():
        state = Text("available", "green")
        if not found["available"]:
            state = Text.assemble(("not available", "red"), f": {found['reason']}")
        versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
        table.add_row(name, state, ", ".join(found["archs"]), versions)
    console.print(table)
    for key in ("mla", "commit", "python", "torch", "platform", "cache folder", "implementations"):
        console.print(f"{key}: {report[key]}", highlight=False, soft_wrap=True)
    for device in report["devices"]:
        console.print(f"device: {device}", highlight=False, soft_wrap=True)


def examine() -> dict[str, Any]:
    """Collect what `doctor` shows as plain data."""
    targets = {}
    for name in (*TARGET_BACKENDS, *sorted(set(registry.default().backends) - set(BACKENDS))):
        backends = Target(name).backends
        found = {backend: dispatch.availability(backend) for backend in backends}
        usable = {backend: one for backend, one in found.items() if one.reason is None}
        versions = {key: value for one in found.values() for key, value in one.versions.items()}
        targets[name] = {
            "available": bool(usable),
            "reason": None if usable else _reason(found),
            "archs": sorted({arch for one in usable.values() for arch in one.archs}),
            "versions": versions if len(backends) == 1 else {},  # those of several stand in their own lines
        }
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {
        "targets": targets,
        "mla": machine.package_version(),
        "commit": machine.commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "devices": [machine.name_of(device) for device in (*devices, torch.device("cpu"))],
        "cache folder": str(jit_cache.cache_dir()),
        "implementations": len(registry.default()),
    }


def _reason(found: dict[str, Availability]) -> str:
    if len(found) == 1:
        return str(next(iter(found.values())).reason)
    return f"none of {', '.join(found)} is"
