"""The tracked Python files of the repository and what each of them imports."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Import:
    """One imported name: dotted, absolute. ``at_load`` is False inside functions and under TYPE_CHECKING."""

    name: str
    line: int
    at_load: bool


def modules() -> dict[str, Path]:
    """Python modules of the package by dotted name, as they are imported."""
    found = {}
    for folder, prefix in (("mla", "mla"), ("backends", "mla.backends"), ("kernels", "mla.kernels")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder == "mla" and path.relative_to(ROOT / folder).parts[0] in ("backends", "kernels"):
                continue
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((prefix, *(part for part in parts if part != "__init__")))
            found[name] = path
    return found


@functools.cache
def imports(path: Path, package: str = "") -> tuple[Import, ...]:
    """Every import of a file; relative ones are made absolute below ``package``."""
    return tuple(_walk(ast.parse(path.read_text(encoding="utf-8")), package, True))


def package_of(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def _walk(node: ast.AST, package: str, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_load)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - child.level + 1], *filter(None, [base])])
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, at_load)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _walk(child, package, False)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _walk(ast.Module(child.body, []), package, False)
            yield from _walk(ast.Module(child.orelse, []), package, at_load)
        else:
            yield from _walk(child, package, at_load)
