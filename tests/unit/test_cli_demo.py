"""``mla demo``: its picture of a plan, and a small run of the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mla.cli import app, demo
from mla.cli.batches import make_batch
from mla.cli.plan_view import Segment, as_text, find_segments
from mla.cli.steps import BENCH_STEPS, DEMO_STEPS, Step, find_shapes, find_steps
from mla.errors import ArgumentError
from mla.plan import prefill_plan

STEP = Step("two", (70, 0), (5, 100), heads=2)


def _chunks(step: Step, page_size: int, buffer: int) -> list[list[Segment]]:
    batch = make_batch(step.cached, step.new, page_size, device=torch.device("cpu"), target="cpu", seed=0)
    plan = prefill_plan(batch.input_row_offsets, batch.collection, 0, buffer, seq_lens_cpu=step.lengths, target="cpu")
    return find_segments(plan, step)


def test_segments_tell_cached_new_and_padding_apart_across_chunks() -> None:
    first, second, third = _chunks(STEP, page_size=64, buffer=96)
    assert first == [Segment(0, "cached", 0, 70), Segment(0, "new", 70, 75), Segment(0, "padding", 75, 96)]
    assert second == [Segment(0, "padding", 0, 32), Segment(1, "new", 32, 96)]
    assert third == [Segment(1, "new", 0, 36), Segment(1, "padding", 36, 64)]


def test_the_text_draws_padding_however_little_it_is() -> None:
    text = as_text(_chunks(Step("one", (0,), (1000,)), page_size=1001, buffer=2002), 2002, width=20).plain
    assert text.splitlines()[0] == "chunk  0 |AAAAAAAAA/..........|  1,001 rows"


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    steps = tmp_path / "steps.jsonl"
    steps.write_text('{"cached": [70, 0, 3], "new": [5, 300, 0]}\n{"cached": [0], "new": [1]}\n')
    options = ["--target", "cpu", "--heads", "3", "--steps", str(steps), "--page-size", "16", "--buffer", "128"]
    return ["demo", *options, "--output", str(tmp_path / "out")]


def test_a_demo_checks_itself_and_writes_what_it_says(small: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*small, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["passed"] and [step["chunk_rows"] for step in report["steps"]] == [[128, 128, 128, 16], [16]]
    many, alone = report["steps"]
    assert 0 < many["error"] < 4e-3 and alone["error"] == 0, "a token that sees itself alone has its own value"
    assert json.loads((tmp_path / "out" / "demo.json").read_text()) == report
    assert (tmp_path / "out" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_text_of_a_demo(small: list[str]) -> None:
    done = CliRunner().invoke(app, small)
    assert "cached+new tokens of each sequence: A 70+5, B 0+300, C 3+0" in done.stdout
    assert "new tokens/s" in done.stdout and done.stdout.count("agrees with float64") == 2


def test_a_wrong_result_is_found(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = demo.chunked_prefill

    def shifted(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, lse = real(q, *args, **kwargs)
        return output.roll(1, 1), lse

    monkeypatch.setattr(demo, "chunked_prefill", shifted)
    done = CliRunner().invoke(app, small)
    assert done.exit_code == 1 and "DISAGREES with float64" in done.stdout


def test_the_shipped_steps_are_those_that_the_commands_name() -> None:
    for numbers in (DEMO_STEPS, BENCH_STEPS):
        assert [step.name for step in find_steps(None, numbers, heads=16)] == [str(number) for number in numbers]
    assert all(sum(step.new) <= 8192 for step in find_steps(None, BENCH_STEPS, heads=1))


def test_shapes_count_visible_pairs() -> None:
    shapes = {shape.name: shape for shape in find_shapes("gpu")}
    assert shapes["8k"].flops == 640 * 128 * sum(range(1, 8193))
    assert shapes["chunk"].flops == 640 * 128 * sum(range(14337, 16385))
    assert shapes["full"].flops == 640 * 16 * 4 * 4096**2


@pytest.mark.parametrize(
    "line", ["{", '{"cached": [1]}', '{"cached": [1], "new": [1, 2]}', '{"cached": [-1], "new": [1]}']
)
def test_a_line_that_is_no_step_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"cached": [0], "new": [1]}\n' + line)
    with pytest.raises(ArgumentError, match=r"mine\.jsonl:2 is not a step"):
        find_steps(str(file), DEMO_STEPS, 1)
