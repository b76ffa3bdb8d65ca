"""MLA_LOGLEVEL, its dumps, and `mla replay` of them."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mla
from mla import ArgumentError, dispatch, masks
from mla import logging as mla_logging
from mla.cli import app
from mla.replay import Recording
from tests.architecture.source_tree import ROOT
from tests.support.paged import make_paged
from tests.support.problems import Case, build
from tests.unit.test_chunked import job


@pytest.fixture
def say(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return a function that sets the level and returns the lines that a call brings."""
    monkeypatch.setenv("MLA_DUMP_DIR", str(tmp_path))

    def at(level: int, call: Any) -> list[str]:
        mla_logging.set_level(level)
        caplog.clear()
        with caplog.at_level(logging.INFO, "mla"):
            call()
        return [record.getMessage() for record in caplog.records if record.name == "mla"]

    yield at
    mla_logging.set_level(0)


def dumps(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt"))


def test_what_each_level_says(say: Any, tmp_path: Path) -> None:
    problem = build(Case())
    assert say(0, lambda: problem.run("cpu")) == []
    (line,) = say(1, lambda: problem.run("cpu"))
    assert "prefill: reference." in line
    lines = say(3, lambda: problem.run("cpu"))
    assert any("q: bfloat16 [205, 4, 192] strides" in line for line in lines)
    for words in ("cache.page_table: int32", "softmax_scale: 0.07"):
        assert any(words in line for line in lines)
    assert not any("mean" in line for line in lines)
    lines = say(5, lambda: problem.run("cpu"))
    assert any(" wrote output:" in line and "NaN" in line and "mean" in line for line in lines)
    assert not dumps(tmp_path)
    lines = say(10, lambda: problem.run("cpu"))
    (path,) = dumps(tmp_path)
    assert any(line.endswith(f"mla replay {path}") for line in lines)


def test_statistics(say: Any) -> None:
    a, lse = torch.tensor([1.0, -3.0, math.nan, math.inf]).expand(2, 1, 32, 4).reshape(2, 1, 128), torch.zeros(2, 1)
    lines = say(5, lambda: mla.merge_attn_states(torch.empty_like(a), a, lse, a, lse, target="cpu"))
    (line,) = (line for line in lines if "prefix_output" in line)
    assert line.endswith("; from -3 to 1, mean -1, 64 NaN, 64 inf")


def test_nothing_is_on_the_way_when_off(say: Any) -> None:
    problem = build(Case())
    say(1, lambda: problem.run("cpu"))
    mla_logging.set_level(0)
    problem.run("cpu")
    assert not any(isinstance(run, mla_logging._Logged) for run in dispatch._runners.values())


CASES = {
    "paged": Case(sinks=True, softcap=30.0, mask="documents"),
    "csr": Case(csr=True, page_size=16),
    "fp8 rope": Case(dtypes="bf16+fp8_rope", granularity=64, chunk=(64, 80)),
    "batched": Case(rope="batched", rope_width=576, dtypes="fp32+fp8_rope", overrides=False),
    "ragged": Case(rope="ragged", lse_layout="HT", mask="causal_bias", overrides=False),
    "fp8": Case(dtypes="fp8", v_transposed=True),
    "split": Case(dtypes="fp8+bf16_rope", v_scale="row", out_dtype="fp32"),
    "unsigned": Case(index_dtype=torch.uint32, mask="windows_of_heads"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_prefill_runs_again(name: str, say: Any, tmp_path: Path) -> None:
    problem = build(CASES[name])
    say(10, lambda: problem.run("cpu"))
    mla_logging.set_level(0)
    (path,) = dumps(tmp_path)
    recording = Recording.load(path)
    expected = recording.expect()
    results = recording.run("cpu", torch.device("cpu"))
    assert recording.results.keys() == results.keys() == expected.keys() == {"output", "lse"}
    for key, value in results.items():
        assert torch.equal(value.nan_to_num(7.0), recording.results[key].nan_to_num(7.0)), "the same call, bit by bit"
    assert max(recording.errors(results, expected).values()) <= 1
    recording.arguments["softmax_scale"] *= 1.5
    assert max(recording.errors(results, recording.expect()).values()) > 1, "another call has another answer"


@pytest.mark.parametrize("cache", ["plain", "fp8", "csr"])
def test_a_whole_job_and_a_store_run_again(cache: str, say: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"csr": True} if cache == "csr" else {}
    dtype = torch.float8_e4m3fn if cache == "fp8" else torch.float32
    data, q, weight = job([(70, 5), (0, 64), (0, 0), (33, 1)], dtype=dtype, **options)

    def call() -> None:
        data.cache.store(0, data.input_row_offsets, q[:, 0, :64].repeat(1, 8), q[:, 1, :64], target="cpu")
        mla.chunked_prefill(
            q, data.cache, 0, weight, data.input_row_offsets, masks.CausalMask(), 0.07, buffer_token_size=48,
            return_lse=True, max_chunks=5, target="cpu",
        )  # fmt: skip

    say(10, call)
    mla_logging.set_level(0)
    ops = set()
    for path in dumps(tmp_path):
        recording = Recording.load(path)
        results = recording.run("cpu", torch.device("cpu"))
        expected = recording.expect()
        assert results.keys() == expected.keys() == recording.results.keys()
        for shares in (recording.errors(results, expected), recording.errors(recording.results, expected)):
            assert max(shares.values()) <= 1, (path.name, shares)
        ops.add(recording.op)
    assert ops == {"store", "plan", "gather", "prefill", "merge"}


def test_only_live_pages_are_recorded(say: Any, tmp_path: Path) -> None:
    data = make_paged([40, 0], [3, 2], 16, spare_pages=1000)
    offsets = data.input_row_offsets
    say(10, lambda: mla.prefill_plan(offsets, data.cache, 0, 64, target="cpu"))
    latent, rope = torch.zeros(5, 512, dtype=torch.bfloat16), torch.zeros(5, 64, dtype=torch.bfloat16)
    data.cache.store(0, offsets, latent, rope, target="cpu")
    plan, store = (Recording.load(path) for path in dumps(tmp_path))
    assert plan.arguments["cache.latent"].shape[0] == 0 and store.arguments["cache.latent"].shape[0] == 4


class TestCommand:
    def record(self, say: Any, tmp_path: Path) -> Path:
        problem = build(Case(lengths=((20, 10),)))
        say(10, lambda: problem.run("cpu"))
        mla_logging.set_level(0)
        return dumps(tmp_path)[0]

    def test_json(self, say: Any, tmp_path: Path) -> None:
        path = self.record(say, tmp_path)
        done = CliRunner().invoke(app, ["replay", str(path), "--target", "cpu", "--json"])
        report = json.loads(done.stdout)
        assert done.exit_code == 0 and report["passed"] and report["op"] == "prefill"
        assert set(report["shares_of_the_bound"]) == {"recorded", "cpu"}

    def test_a_wrong_record_fails(self, say: Any, tmp_path: Path) -> None:
        path = self.record(say, tmp_path)
        recording = Recording.load(path)
        recording.results["output"][3] += 1.0
        recording.save(path)
        done = CliRunner().invoke(app, ["replay", str(path), "--target", "cpu"])
        assert done.exit_code == 1 and "recorded" in done.stdout and "softmax_scale" in done.stdout

    def test_another_file(self, tmp_path: Path) -> None:
        path = tmp_path / "x.pt"
        path.write_bytes(b"nothing of ours")
        with pytest.raises(ArgumentError, match="is no recording of this library"):
            Recording.load(path)
        torch.save({"format": 99}, path)
        with pytest.raises(ArgumentError, match="has format 99"):
            Recording.load(path)


@pytest.mark.parametrize("level", ["2", "loud", "-1", ""])
def test_a_level_that_is_none(level: str, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_LOGLEVEL", level)
    mla_logging.set_level_from_environment()
    problem = build(Case())
    with pytest.raises(ArgumentError, match="MLA_LOGLEVEL must be one of 0, 1, 3, 5, 10"):
        problem.run("cpu")
    assert say(0, lambda: problem.run("cpu")) == []


def test_the_command_line_refuses_a_level_that_is_none() -> None:
    environment = {**os.environ, "MLA_LOGLEVEL": "7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mla", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines()[0] == "mla: MLA_LOGLEVEL must be one of 0, 1, 3, 5, 10, got '7'"


def test_the_environment_sets_it_and_lines_go_to_stderr() -> None:
    script = (
        "import torch, mla; x, lse = torch.zeros(2, 1, 128), torch.zeros(2, 1); "
        "mla.merge_attn_states(x, x, lse, x, lse, target='cpu')"
    )
    environment = {**os.environ, "MLA_LOGLEVEL": "3", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert "merge: reference." in done.stderr and "output: float32 [2, 1, 128]" in done.stderr and not done.stdout
