"""Compilation ahead of time: every usual kernel of an architecture into a folder, without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from mla import jit_cache
from mla.backends.rocm import compiler
from mla.backends.rocm.ops import ENTRIES
from mla.jit_cache import Binary, Unit
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
    folder = jit_cache.cache_dir() if output_dir is None else Path(output_dir)
    units = {unit.kernel_id: unit for unit in _units(arch, ops)}

    def build(unit: Unit) -> Path:
        binary: Binary = jit_cache.obtain(unit, compiler.compile_unit, compiler.compiler_name)
        return jit_cache.write_ahead(unit, binary, compiler.compiler_name(), folder)

    paths = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {pool.submit(build, unit): kernel_id for kernel_id, unit in units.items()}
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                paths.append(future.result())
                if progress is not None:
                    progress(done, len(units), waiting[future])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return sorted(paths)


def _units(arch: str, ops: Collection[str]) -> Iterator[Unit]:
    for entry in ENTRIES:
        for problem in entry.problems(arch):
            if problem.op in ops:
                for spec in entry.specs(problem, arch):
                    yield compiler.unit(spec, arch)
