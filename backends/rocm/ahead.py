"""Compilation ahead of time: every usual kernel of an architecture into a folder, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from mla import jit_cache
from mla.backends.rocm import compiler
from mla.backends.rocm.ops import ENTRIES
from mla.problem import OPS


def compile_ahead(
    arch: str,
    ops: Collection[str] = OPS,
    output_dir: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Path]:
    """Compile the usual variants of some operations for one architecture.

    Parameters
    ----------
    arch : str
        ``gfx90a``, ``gfx942`` or ``gfx950``.
    ops : collection of str
        Operations; all when missing.
    output_dir : Path, optional
        Where ``<kernel id>.hsaco``, its source and its JSON (registers, spills, LDS) go: the cache folder
        when missing. Another folder is found through ``MLA_AOT_DIR``.
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
    """
    units = (
        compiler.unit(spec, arch)
        for entry in ENTRIES
        for problem in entry.problems(arch)
        if problem.op in ops
        for spec in entry.specs(problem, arch)
    )
    return jit_cache.build_ahead(units, compiler.compile_unit, compiler.compiler_name, output_dir, progress)
