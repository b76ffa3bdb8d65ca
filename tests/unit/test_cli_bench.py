"""``mla bench`` and ``mla compile``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mla.cli import app, bench, clock, machine, sdpa
from mla.cli.steps import Step, find_shapes
from mla.errors import ArgumentError


def test_bench_measures_shapes_steps_and_sdpa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [Step("tiny", (0, 30), (40, 7), heads=2), Step("tiny full", (0,), (40,), heads=2, mask="none")]
    monkeypatch.setattr(bench, "find_shapes", lambda kind, wanted: shapes)
    monkeypatch.setattr(clock, "matmul_tflops", lambda device, dtype: 0.1)
    monkeypatch.setattr(clock, "copy_gbytes", lambda device: 10.0)
    monkeypatch.setattr(sdpa, "compare", lambda: [sdpa._compare(torch.float32, tokens=64, heads=2, rounds=2)])
    steps = tmp_path / "steps.jsonl"
    steps.write_text('{"cached": [64], "new": [32]}\n')
    options = ["--target", "cpu", "--steps", str(steps), "--heads", "2", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [(one["job"], one["name"]) for one in report["measurements"]] == [
        ("prefill", "tiny"), ("prefill", "tiny full"), ("whole job", "1"),
    ]  # fmt: skip
    for one in report["measurements"]:
        assert 0 < one["ms_20"] <= one["ms"] <= one["ms_80"] and one["runs"] >= 3
    (beside,) = report["sdpa"]
    assert beside["difference"] < 1e-5 and beside["ratio"] == beside["mla_ms"] / beside["sdpa_ms"]
    assert report["targets"]["cpu"]["torch"] == torch.__version__
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "torch SDPA" in done.stdout and "TFLOP/s" in done.stdout


def test_shapes_are_chosen_by_name() -> None:
    assert [shape.name for shape in find_shapes("gpu", "1k,8k")] == ["1k", "8k"]
    assert len(find_shapes("cpu")) >= 3
    done = CliRunner().invoke(app, ["bench", "--target", "cpu", "--shapes", "8k"])
    assert isinstance(done.exception, ArgumentError) and "2k, ragged" in str(done.exception)


def test_a_time_is_a_median_with_its_spread() -> None:
    assert clock.summarise([4.0, 1.0, 2.0, 3.0, 100.0]) == clock.Timing(3.0, 1.8, 23.2, 5)
    assert clock.summarise([2.0]) == clock.Timing(2.0, 2.0, 2.0, 1)


def test_the_roof_is_the_slower_of_matmul_and_copy() -> None:
    roof = bench.Roof(tflops=1.0, gbytes=100.0)
    assert roof.share(flops=10**9, moved=0, ms=2.0) == pytest.approx(0.5)
    assert roof.share(flops=10**9, moved=10**9, ms=20.0) == pytest.approx(0.5)


def test_a_copy_is_told_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_COMMIT", "abc123")
    assert machine.commit() == "abc123"
    monkeypatch.delenv("MLA_COMMIT")
    monkeypatch.setattr(machine, "PACKAGE", tmp_path / "mla")
    assert machine.commit() is None


def test_compile_writes_binaries_and_reports_them(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="needs the extra cuda")
    command = [sys.executable, "-m", "mla", "compile", "--target", "cuda:sm_90a", "--op", "plan", "--json"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["target"] == "cuda:sm_90a" and report["binaries"]
    assert all(Path(path).parent == tmp_path and Path(path).stat().st_size > 0 for path in report["binaries"])
