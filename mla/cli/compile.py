"""``mla compile``: kernels of an architecture ahead of time, on a machine without that GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from mla import jit_cache
from mla.ahead import compile_ahead
from mla.dispatch import explain
from mla.errors import ArgumentError, TargetError, UnsupportedError
from mla.problem import OPS
from mla.target import Target, install_hint


def compile_(
    target: Annotated[str, typer.Option(help="With its architecture: cuda:sm_90a, cuda:sm_80, rocm:gfx942.")],
    op: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(OPS)}; repeatable. Default: all of them.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the binaries; name it in MLA_AOT_DIR. Default: the cache folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Compile the usual kernels of an architecture into a folder; no GPU is needed.

    Each binary comes with its source and a JSON of its registers, spills and shared memory. A program that finds the
    folder in MLA_AOT_DIR loads from it what it would have compiled.

    Examples:

    - `mla compile --target cuda:sm_90a`
    - `mla compile --target rocm:gfx942 --op prefill --output kernels-gfx942`
    """
    where = Target.parse(target)
    if unknown := [name for name in op or () if name not in OPS]:
        raise ArgumentError(f"--op: {unknown[0]!r} is not one of {', '.join(OPS)}")
    if where.name not in ("cuda", "rocm") or where.arch is None:
        raise TargetError(f"--target: {target!r} must be cuda or rocm with an architecture, such as cuda:sm_90a")
    for name in op or OPS:
        explanation = explain(name, target=where)
        if explanation.chosen is None:
            raise UnsupportedError(f"--target: nothing is written for {where}", explanation)
    console = Console(stderr=True)
    start = time.perf_counter()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=None)

        def show(done: int, total: int, kernel_id: str) -> None:
            progress.update(task, completed=done, total=total, description=kernel_id)

        try:
            paths = compile_ahead(where.name, where.arch, op or OPS, output, show)
        except (ImportError, RuntimeError) as error:
            why = str(error).splitlines()[-1]
            raise TargetError(f"cannot compile for {where}: {why}; {install_hint(where.name)}") from error
    seconds = time.perf_counter() - start
    folder = output or jit_cache.cache_dir()
    if as_json:
        report = {"target": str(where), "folder": str(folder), "seconds": seconds, "binaries": [str(p) for p in paths]}
        print(json.dumps(report, indent=2))
        return
    for path in paths:
        print(f"{path.stat().st_size:>10,} bytes  {path.name}")
    print(f"{len(paths)} kernels for {where} in {seconds:.1f} s, in {folder}")
