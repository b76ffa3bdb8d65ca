"""Who may import whom; docs/design.md draws the arrows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, Import, imports, modules, package_of

VENDORS = {"cuda": {"cuda"}, "rocm": {"hip", "rocm"}, "triton": {"triton"}, "reference": set()}
VENDOR_LIBRARIES = frozenset().union(*VENDORS.values())
#: From the ground up: each may import only what stands before it.
GROUND = (
    "errors",
    "problem",
    "target",
    "requirements",
    "registry_file",
    "explanation",
    "_paths",
    "registry",
    "dispatch",
)


def _imports(module: str) -> tuple[Import, ...]:
    path = modules()[module]
    return imports(path, package_of(module, path))


def _below(prefix: str) -> list[str]:
    return [name for name in modules() if name == prefix or name.startswith(f"{prefix}.")]


def _core() -> list[str]:
    return [name for name in modules() if not name.startswith(("mla.backends", "mla.kernels"))]


def _top(one: Import) -> str:
    return one.name.partition(".")[0]


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _say(faults: list[tuple[str, Import]]) -> str:
    return "\n".join(f"{module}:{one.line} imports {one.name}" for module, one in faults)


def test_the_core_imports_no_vendor_library_and_no_backend() -> None:
    faults = [
        (module, one)
        for module in _core()
        for one in _imports(module)
        if _top(one) in VENDOR_LIBRARIES or (one.at_load and _is_within(one.name, "mla.backends"))
    ]
    assert not faults, _say(faults)


@pytest.mark.parametrize("backend", VENDORS)
def test_a_backend_imports_only_its_own_vendor(backend: str) -> None:
    others = [f"mla.backends.{other}" for other in VENDORS if other != backend]
    faults = [
        (module, one)
        for module in _below(f"mla.backends.{backend}")
        for one in _imports(module)
        if _top(one) in VENDOR_LIBRARIES - VENDORS[backend] or any(_is_within(one.name, other) for other in others)
    ]
    assert not faults, _say(faults)


def test_a_backend_does_not_reach_up() -> None:
    above = [f"mla.{name}" for name in ("dispatch", "registry", "registry_file", "explanation", "cli", "api")]
    faults = [
        (module, one)
        for module in _below("mla.backends")
        for one in _imports(module)
        if any(_is_within(one.name, name) for name in above)
    ]
    assert not faults, _say(faults)


def test_the_ground_is_layered() -> None:
    ground = [f"mla.{name}" for name in GROUND]
    faults = [
        (module, one)
        for level, module in enumerate(ground)
        for one in _imports(module)
        if one.at_load and _top(one) == "mla"
        if one.name != "mla.registry" and not any(_is_within(one.name, lower) for lower in ground[:level])
    ]
    assert not faults, _say(faults)


def test_kernels_hold_sources_only() -> None:
    assert not list((ROOT / "kernels").rglob("__init__.py")), "a bare `import kernels` must stay another project's"
    faults = [
        (module, one)
        for module in _below("mla.kernels")
        for one in _imports(module)
        if _top(one) not in ("triton", "__future__") and not _is_within(one.name, "mla.kernels.triton")
    ]
    assert not faults, _say(faults)


def test_no_bare_import_of_backends_or_kernels() -> None:
    files = [
        path for folder in ("mla", "backends", "kernels", "tests", "benchmarks") for path in _python(ROOT / folder)
    ]
    faults = [(str(path), one) for path in files for one in imports(path) if _top(one) in ("backends", "kernels")]
    assert not faults, _say(faults)


def _python(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if not path.is_symlink()]


def test_importing_the_package_loads_no_vendor_library() -> None:
    script = f"""
import sys
def vendors():
    return {{name for name in sys.modules if name.partition('.')[0] in {sorted(VENDOR_LIBRARIES)}}}
import torch
before = vendors()
import mla
print(*sorted(vendors() - before))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []


def test_the_walker_tells_import_time_from_later(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport cuda.core\nfrom . import sibling\nfrom ..up import thing\n"
        "if TYPE_CHECKING:\n    import hip\nclass A:\n    import inner\ndef f():\n    from triton import jit\n"
    )
    seen = {(one.name, one.at_load) for one in imports(file, "mla.backends.cuda")}
    assert seen == {
        ("typing.TYPE_CHECKING", True),
        ("cuda.core", True),
        ("mla.backends.cuda.sibling", True),
        ("mla.backends.up.thing", True),
        ("hip", False),
        ("inner", True),
        ("triton.jit", False),
    }
