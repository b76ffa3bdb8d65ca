"""``mla replay``: a recorded launch again, on any target, beside the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from mla.cli import machine
from mla.replay import Recording


def replay(
    file: Annotated[Path, typer.Argument(help="A file that MLA_LOGLEVEL=10 wrote.", exists=True, dir_okay=False)],
    target: Annotated[
        list[str] | None, typer.Option(help="cpu, cuda, rocm, triton, ...; repeatable. Default: all that can run here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Run a recorded launch again and compare it, and what was recorded of it, with a float64 oracle.

    A figure is the error as a share of its bound. Exit status 1 when one exceeds its bound.

    Examples: mla replay dumps/4711-000012-prefill.pt; mla replay FILE --target cuda --target cpu
    """
    recording = Recording.load(file)
    expected = recording.expect()
    places = {name: machine.locate(name)[1] for name in target or machine.available_targets()}
    rows: dict[str, dict[str, Any]] = {}
    if recording.results:
        rows["recorded"] = recording.errors(recording.results, expected)
    for name, device in places.items():
        rows[name] = recording.errors(recording.run(name, device), expected)
    passed = all(share <= 1 for shares in rows.values() for share in shares.values())
    if as_json:
        report = {
            "file": str(file), "op": recording.op, "implementation": recording.implementation, "passed": passed,
            "shares_of_the_bound": rows,
        }  # fmt: skip
        print(json.dumps(report, indent=2))
        raise typer.Exit(0 if passed else 1)
    console = Console()
    console.print(f"[bold]{recording.op}[/], recorded of {recording.implementation}", highlight=False)
    for name, value in recording.arguments.items():
        shape = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else value
        console.print(f"  {name}: {shape}", style="dim", highlight=False, markup=False)
    table = Table("", *expected, title="error, as a share of its bound", title_justify="left")
    for name, shares in rows.items():
        table.add_row(name, *(f"[{'green' if share <= 1 else 'bold red'}]{share:.2g}[/]" for share in shares.values()))
    console.print(table)
    raise typer.Exit(0 if passed else 1)
