"""``mla check``: every target against the float64 oracle and against each other, on random ragged batches."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mla.cli import machine
from mla.cli.check_cases import CASES, OPERATIONS, Answer, Plan
from mla.errors import UnsupportedError
from mla.target import device_arch
from mla.tolerance import lse_error, output_error


@dataclass(slots=True)
class Row:
    """What one case came to: errors as shares of their bounds, or why a target refused it."""

    case: str
    exact: bool
    against_oracle: dict[str, float] = field(default_factory=dict)  # by target
    between: dict[str, float] = field(default_factory=dict)  # by "one/other", of twice the bound
    refused: dict[str, str] = field(default_factory=dict)  # by target

    @property
    def passed(self) -> bool:
        """Whether every error is within its bound."""
        return all(share <= 1 for share in (*self.against_oracle.values(), *self.between.values()))


def check(
    target: Annotated[
        list[str] | None, typer.Option(help="cpu, cuda, rocm, triton, ...; repeatable. Default: all that can run here.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How many random batches each case gets.")] = 1,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**62, help="Repeats a run; the seed of every run is printed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Compare every target with a float64 oracle and with every other target.

    Each case is a random ragged batch with sequences of no, one and many tokens; the cases go through operations,
    dtypes, page sizes, masks, sinks and softcap, LSE included. A figure is the error as a share of its bound, which is
    twice as wide between two targets. Exit status 1 when one exceeds its bound.

    Examples:

    - `mla check`
    - `mla check --target cpu --rounds 5`
    - `mla check --target cuda --target triton --seed 7`
    """
    names = target or machine.available_targets()
    places = {name: machine.locate(name)[1] for name in names}
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    console, progress_console = Console(quiet=as_json), Console(stderr=True)
    console.print(f"[bold]mla check[/], seed {seed} (repeat with --seed {seed})", highlight=False)
    for name, device in places.items():
        console.print(f"{name}: {machine.name_of(device)}", highlight=False)
    fnuz = any(device_arch(device).startswith("gfx94") for device in places.values())
    rows = []
    with Progress(console=progress_console, transient=True, disable=not progress_console.is_terminal) as progress:
        task = progress.add_task("", total=len(CASES) * rounds)
        for number, case in enumerate(case for case in CASES for _ in range(rounds)):
            progress.update(task, description=f"{case.name:32}")
            problem = OPERATIONS[case.op](case, torch.Generator().manual_seed(seed + number), fnuz)
            rows.append(_compare(case.name, problem, places))
            progress.advance(task)
    idle = [name for name in names if not any(name in row.against_oracle for row in rows)]
    passed = all(row.passed for row in rows) and not idle
    if as_json:
        report = {
            "seed": seed, "passed": passed,
            "targets": {name: machine.describe(device) for name, device in places.items()},
            "cases": [{**asdict(row), "passed": row.passed} for row in rows],
        }  # fmt: skip
        print(json.dumps(report, indent=2))
    console.print(_table(rows, list(places)))
    for name in idle:
        console.print(f"[bold red]{name} served no case[/]")
    refusals = sorted({f"{name}: {why}" for row in rows for name, why in row.refused.items()})
    for line in refusals:
        console.print(f"refused by {line}", style="dim", highlight=False, soft_wrap=True)
    failed = sum(not row.passed for row in rows)
    console.print(f"[bold red]{failed} of {len(rows)} cases disagree[/]" if failed else f"{len(rows)} cases agree")
    raise typer.Exit(0 if passed else 1)


def _compare(name: str, problem: Plan, places: dict[str, torch.device]) -> Row:
    """Run a case everywhere and work out the errors."""
    row, answers = Row(name, problem.precision == "exact"), {}
    expected = problem.expect()
    for target, device in places.items():
        try:
            answers[target] = problem.run(target, device)
        except UnsupportedError as error:
            row.refused[target] = _reason(error)
            continue
        row.against_oracle[target] = _error(answers[target], expected, problem.precision)
    for one, other in itertools.combinations(answers, 2):
        row.between[f"{one}/{other}"] = _error(answers[one], answers[other], problem.precision) / 2
    return row


def _error(actual: Answer, expected: Answer, precision: str) -> float:
    """Return the largest share of a bound; what has no precision must be equal."""
    if precision == "exact":
        same = all(torch.equal(a.double().cpu(), b.double().cpu()) for a, b in zip(actual, expected, strict=True))
        return 0.0 if same else math.inf
    return max(output_error(actual[0], expected[0], precision), lse_error(actual[1], expected[1], precision))


def _reason(error: UnsupportedError) -> str:
    """Return what speaks against the candidates in one line."""
    if error.explanation is None or not error.explanation.candidates:
        return str(error).splitlines()[0]
    return "; ".join(f"{one.id}: {one.against[0]}" for one in error.explanation.candidates if one.against)


def _table(rows: list[Row], names: list[str]) -> Table:
    pairs = [f"{one}/{other}" for one, other in itertools.combinations(names, 2)]
    table = Table("case", *names, *pairs, title="error, as a share of its bound", title_justify="left")
    for row in rows:
        cells: list[Any] = [row.case]
        for name in names:
            cells.append("[dim]refused[/]" if name in row.refused else _cell(row.against_oracle[name], row.exact))
        cells += [_cell(row.between[pair], row.exact) if pair in row.between else "" for pair in pairs]
        table.add_row(*cells)
    return table


def _cell(share: float, exact: bool) -> str:
    style = "green" if share <= 1 else "bold red"
    words = ("equal" if share == 0 else "different") if exact else f"{share:.2g}"
    return f"[{style}]{words}[/]"
