"""The registry and the tree agree, in both directions."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from mla._paths import REGISTRY
from mla.registry import Registry
from tests.architecture.source_tree import ROOT, imports, modules, package_of

KERNEL_SUFFIXES = {".cu", ".cuh", ".hip", ".hpp", ".py"}


def _packaged() -> Registry:
    registry = Registry()
    registry.add(REGISTRY)
    return registry


def test_every_entry_loads_without_any_vendor_library() -> None:
    """`mla.explain` asks entries about hardware whose libraries are not installed."""
    script = """
import importlib, json, sys
for vendor in ("cuda", "hip", "rocm", "triton"):
    sys.modules[vendor] = None
wanted, faults = json.load(sys.stdin), []
for entry, op in wanted:
    module, _, name = entry.partition(":")
    cls = getattr(importlib.import_module(module), name, None)
    methods = ("check", "prepare", "workspace_bytes") if op == "prefill" else ("check", "prepare")
    faults += [f"{entry} lacks {method}" for method in methods if not callable(getattr(cls, method, None))]
print(json.dumps(faults))
"""
    wanted = json.dumps([(one.entry, one.op) for one in _packaged()])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], input=wanted, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_every_entry_class_is_registered() -> None:
    registered = {one.entry for one in _packaged()}
    found = set()
    for module, path in modules().items():
        if not re.fullmatch(r"mla\.backends\.\w+\.ops", module):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                if "prepare" in names:
                    found.add(f"{module}:{node.name}")
    assert found <= registered, f"not in registry.yaml: {sorted(found - registered)}"


def test_every_kernel_source_is_reached_from_the_registry() -> None:
    reached: set[Path] = set()
    waiting = [source.resolve() for one in _packaged() for source in one.sources]
    while waiting:
        source = waiting.pop()
        if source not in reached:
            reached.add(source)
            waiting += _used_by(source)
    sources = {path for path in (ROOT / "kernels").rglob("*") if path.suffix in KERNEL_SUFFIXES}
    unreached = sorted(str(path.relative_to(ROOT)) for path in sources - reached)
    assert not unreached, f"neither registered nor included by what is: {unreached}"


def _used_by(source: Path) -> list[Path]:
    """Kernel sources that a source includes or imports."""
    if source.suffix == ".py":
        module = ".".join(("mla", *source.relative_to(ROOT).with_suffix("").parts))
        names = [one.name for one in imports(source, package_of(module, source))]
        known = modules()
        return [known[name] for full in names for name in (full, full.rpartition(".")[0]) if name in known]
    vendor = ROOT / "kernels" / source.relative_to(ROOT / "kernels").parts[0]
    included = re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(), re.MULTILINE)
    folders = (source.parent, vendor / "include", vendor, ROOT / "kernels")
    return [(folder / name).resolve() for name in included for folder in folders if (folder / name).is_file()]
