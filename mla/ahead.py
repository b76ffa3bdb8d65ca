"""Compilation ahead of time: every usual kernel of an architecture into a folder, without a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from pathlib import Path

from mla import jit_cache
from mla.problem import OPS


def compile_ahead(
    backend: str,
    arch: str,
    ops: Collection[str] = OPS,
    output_dir: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Path]:
    """Compile the usual variants of some operations for one architecture.

    Parameters
    ----------
    backend : str
        ``cuda`` or ``rocm``.
    arch : str
        ``sm_90a``, ``sm_80``, ... from sm_80 on; ``gfx90a``, ``gfx942`` or ``gfx950``.
    ops : collection of str
        Operations; all when missing.
    output_dir : Path, optional
        Where ``<kernel id>.cubin`` or ``.hsaco``, its source and its JSON (registers, spills, shared memory) go: the
        cache folder when missing. Another folder is found through ``MLA_AOT_DIR``.
    progress : callable, optional
        Called with (kernels done, kernels in all, kernel id) after each.

    Returns
    -------
    list of Path
        The binaries, ordered by kernel id.

    Raises
    ------
    CompileError
        A kernel does not compile; what was written before it stays.
    OSError
        The folder cannot be written.
    ImportError, RuntimeError
        The backend's compiler is not there.
    """
    compiler = importlib.import_module(f"mla.backends.{backend}.compiler")
    entries = importlib.import_module(f"mla.backends.{backend}.ops").ENTRIES
    units = (
        compiler.unit(spec, arch)
        for entry in entries
        for problem in entry.problems(arch)
        if problem.op in ops
        for spec in entry.specs(problem, arch)
    )
    return jit_cache.build_ahead(units, compiler.compile_unit, compiler.compiler_name, output_dir, progress)
