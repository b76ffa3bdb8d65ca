"""``mla bench --tune`` with measured times injected: which tile takes the first place of a row."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from mla.cli import app, tune
from mla.problem import SUPPORTED_DIMS

configs = pytest.importorskip("mla.backends.triton.configs")
tuning = pytest.importorskip("mla.backends.triton.tune")
LIMIT = 227 * 1024


def decide(times: dict[str, list[float]], rest: list[float], arch: str = "sm_90a") -> tuple[str, dict[str, object]]:
    """Return what is printed and reported for a row where tiles take the times given; the others take `rest`."""
    out, compiled = io.StringIO(), []
    report = tune.tune_row(
        tune.usual_problem((192, 128)), arch, LIMIT, compiled.append, lambda tile: times.get(str(tile), rest),
        Console(file=out, width=400), Progress(disable=True),
    )  # fmt: skip
    assert set(map(str, compiled)) == set(report["ms"])
    return out.getvalue(), report


def test_a_faster_tile_comes_first() -> None:
    problem = tune.usual_problem((192, 128))
    old = configs.tiles("sm_90a", problem)
    winner = next(tile for tile in tuning.candidates("sm_90a", problem, LIMIT) if tile not in old)
    printed, report = decide({str(winner): [0.9, 1.8]}, [1.0, 2.0])
    row = report["new_row"]
    assert isinstance(row, list) and row[0] == str(winner) and f"{old[0]} -> {winner}" in printed
    assert set(row[1:]) < set(map(str, old)) and f"192: ({', '.join(row)})" in printed
    needs = {str(tile): configs.tile_bytes(tile, "sm_90a", problem) for tile in old}
    assert all(needs[tile] < configs.tile_bytes(winner, "sm_90a", problem) for tile in row[1:])


def test_noise_changes_nothing() -> None:
    printed, report = decide({}, [1.0, 2.0])
    assert report["new_row"] == report["row"] and "stays first" in printed
    first = str(configs.tiles("sm_90a", tune.usual_problem((192, 128)))[0])
    _, report = decide({first: [1.0, 2.0]}, [0.99, 1.99])
    assert report["new_row"] == report["row"]


def test_shapes_count_alike() -> None:
    a, b = configs.Tile(64, 32, 4, 1), configs.Tile(64, 64, 4, 1)
    assert tuning.fastest({a: [1.0, 100.0], b: [0.5, 110.0]}, a) == b  # the long shape alone would say a


def test_a_tile_that_does_not_compile_is_passed_over() -> None:
    out = io.StringIO()
    problem = tune.usual_problem((192, 128))
    first = configs.tiles("sm_90a", problem)[0]

    def measure(tile: object) -> list[float]:
        if tile == first:
            raise RuntimeError("out of resources: shared memory")
        return [1.0]

    report = tune.tune_row(
        problem, "sm_90a", LIMIT, measure, measure, Console(file=out, width=400), Progress(disable=True)
    )
    assert str(first) not in report["ms"] and "out of resources" in out.getvalue()
    assert report["new_row"][0] != str(first)


@pytest.mark.parametrize("dims", SUPPORTED_DIMS, ids=str)
@pytest.mark.parametrize(("arch", "limit"), [("sm_80", 163), ("sm_89", 99), ("sm_90a", 227), ("gfx942", 64)])
def test_candidates_fit(arch: str, limit: int, dims: tuple[int, int]) -> None:
    problem = tune.usual_problem(dims)
    found = tuning.candidates(arch, problem, limit * 1024)
    assert 4 <= len(found) <= 48 and configs.tiles(arch, problem)[0] in found
    assert all(configs.tile_bytes(tile, arch, problem) <= limit * 1024 for tile in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "--tune", "--output", str(tmp_path)])
    assert done.exit_code != 0 and "GPU" in str(done.exception)
