"""``mla explain``, ``mla doctor``, and how the command line fails."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mla.cli import app, main
from mla.target import TARGET_BACKENDS, Availability, install_hint

RUNNER = CliRunner()


def test_explain_prints_the_choice_and_its_reasons() -> None:
    done = RUNNER.invoke(app, ["explain", "prefill", "--target", "cpu"])
    assert done.exit_code == 0
    assert done.stdout.startswith("prefill on cpu: reference.cpu.prefill.torch\n")
    assert "+ (q_depth, v_head_dim) (192, 128) is in (192, 128), (256, 256)" in done.stdout


def test_explain_takes_the_problem_and_answers_in_json() -> None:
    options = ["--dims", "96", "96", "--mask", "NullMask", "--feature", "sinks", "--feature", "lse", "--page-size", "1"]
    done = RUNNER.invoke(app, ["explain", "prefill", "--target", "cpu", *options, "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 1 and told["chosen"] is None
    for word in ("q_depth 96", "NullMask", "page size 1", "lse, sinks"):
        assert word in told["problem"]
    assert told["candidates"][0]["against"] == ["(q_depth, v_head_dim) (96, 96) is not in (192, 128), (256, 256)"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "decode"], "op: 'decode' is not one of plan, gather, project, store, prefill, merge"),
        (["explain", "plan", "--target", "cude"], "unknown target 'cude' (did you mean 'cuda'?)"),
        (["explain", "prefill", "--mask", "Causal"], "mask: 'Causal' is not one of CausalMask, NullMask"),
        (["demo", "--target", "cuda:gfx942"], "target 'cuda:gfx942': unknown architecture 'gfx942'"),
        (["demo", "--target", "cpu", "--steps", "7"], "--steps: no step 7; steps shipped: 5, 155, 305"),
        (["demo", "--target", "cpu", "--steps", "none"], "--steps: 'none' is neither a file nor numbers"),
        (["demo", "--target", "cpu", "--output", "/proc/none"], "[Errno 2]"),
        (["check", "--target", "cpu", "--target", "cup"], "unknown target 'cup' (did you mean 'cpu'?)"),
        (["bench", "--target", "gpux"], "unknown target 'gpux' (did you mean 'gpu'?)"),
        (["compile", "--target", "cuda"], "--target: 'cuda' must be cuda or rocm with an architecture"),
        (["compile", "--target", "cuda:sm_75"], "--target: nothing is written for cuda:sm_75"),
        (["compile", "--target", "cuda:sm_90a", "--op", "decode"], "--op: 'decode' is not one of plan, gather"),
    ],
)
def test_an_error_is_one_line_a_hint_and_status_2(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mla", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    message, hint = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert message.startswith(f"mla: {words}") and hint.startswith("hint: `mla ")


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "mla", "explain", "decode"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("mla: op: 'decode' is not one of")


def test_doctor_names_every_target_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(backend: str) -> Availability:
        if backend == "reference":
            return Availability(None, ("cpu",), {"torch": "2.13.0"})
        return Availability(
            f"{backend}-library is not installed: {install_hint(backend)}", versions={f"{backend}-library": "none"}
        )

    monkeypatch.setattr("mla.dispatch.availability", told)
    monkeypatch.setenv("MLA_CACHE_DIR", "/somewhere/mine")
    report = json.loads(RUNNER.invoke(app, ["doctor", "--json"]).stdout)
    assert list(report["targets"]) == list(TARGET_BACKENDS)
    assert report["targets"]["cpu"] == {
        "available": True,
        "reason": None,
        "archs": ["cpu"],
        "versions": {"torch": "2.13.0"},
    }
    assert report["targets"]["rocm"]["reason"] == "rocm-library is not installed: pip install 'mla-prefill[rocm]'"
    assert report["cache folder"] == "/somewhere/mine"
    text = RUNNER.invoke(app, ["doctor"], env={"COLUMNS": "400"}).stdout
    assert (
        "rocm-library is not installed: pip install 'mla-prefill[rocm]'" in text
        and "cache folder: /somewhere/mine" in text
    )


def test_doctor_asks_every_backend_for_real() -> None:
    done = RUNNER.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["targets"]["cpu"]["available"]
