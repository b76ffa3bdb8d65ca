"""``mla check`` and its bounds: what is right passes, what is wrong is found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mla import dispatch, registry
from mla._paths import REGISTRY
from mla.backends.reference.ops import Merge
from mla.cli import app, check
from mla.cli.check_cases import CASES, Case
from mla.problem import MergeArgs, Problem
from mla.tolerance import lse_error, output_error


class Broken:
    """Merges well, but for one element."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        return None if problem.dtypes == "fp32" else "takes fp32 alone"

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[MergeArgs], None]:
        right: Any = Merge.prepare(problem, device)

        def run(args: MergeArgs) -> None:
            right(args)
            args.output[-1, 0, 0] += 1

        return run


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(check, "CASES", (Case("merge", "fp32"), Case("merge", "bf16")))
    entry = {"id": "broken.any.merge.one", "op": "merge", "backend": "broken", "entry": f"{__name__}:Broken"}
    own = registry.Registry()
    own.add(REGISTRY)
    own.add({"schema": 1, "implementations": [{**entry, "priority": 1}]})
    monkeypatch.setattr(registry, "_read_default", lambda: own)
    dispatch.forget()
    yield
    dispatch.forget()


def test_the_cpu_agrees_with_the_oracle(seed: int) -> None:
    done = CliRunner().invoke(app, ["check", "--target", "cpu", "--seed", str(seed), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["seed"] == seed and report["passed"] and len(report["cases"]) == len(CASES)
    assert all(case["against_oracle"]["cpu"] <= 1 for case in report["cases"])
    inexact = [case["against_oracle"]["cpu"] for case in report["cases"] if not case["exact"]]
    assert min(inexact) > 0, "a case that computes nothing"


def test_the_cases_cover_what_the_help_says() -> None:
    assert {case.page_size for case in CASES if case.op == "prefill"} == {1, 16, 32, 64, 128, 256}
    assert len({case.mask for case in CASES}) == 7
    assert any(case.sinks for case in CASES) and any(case.softcap for case in CASES)


@pytest.mark.usefixtures("broken")
def test_a_target_that_is_wrong_is_found_and_one_that_refuses_is_named() -> None:
    done = CliRunner().invoke(app, ["check", "--target", "cpu", "--target", "broken", "--seed", "3", "--json"])
    merged, refused = json.loads(done.stdout)["cases"]
    assert done.exit_code == 1 and not merged["passed"]
    assert merged["against_oracle"]["broken"] > 1 >= merged["against_oracle"]["cpu"]
    assert merged["between"]["cpu/broken"] > 1
    assert refused["passed"] and refused["refused"] == {"broken": "broken.any.merge.one: takes fp32 alone"}
    text = CliRunner().invoke(app, ["check", "--target", "cpu", "--target", "broken"]).stdout
    assert "1 of 2 cases disagree" in text and "refused by broken: " in text


@pytest.mark.usefixtures("broken")
def test_a_target_that_serves_nothing_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CASES", (Case("merge", "bf16"),))
    done = CliRunner().invoke(app, ["check", "--target", "broken"])
    assert done.exit_code == 1 and "broken served no case" in done.stdout


def test_the_bounds_see_nan_infinity_and_single_elements() -> None:
    expected = torch.randn(8, 4, 16, dtype=torch.float64)
    assert output_error(expected, expected, "fp32") == 0
    assert output_error(expected * (1 + 2e-5), expected, "fp32") == pytest.approx(2)
    one = expected.clone()
    one[3, 2, 1] += 0.1
    assert output_error(one, expected, "bf16") > 1
    one[3, 2, 1] = math.nan
    assert output_error(one, expected, "fp8") == math.inf == output_error(expected, one, "fp8")
    lse = torch.tensor([1.0, -math.inf, 2.0])
    assert lse_error(lse, lse, "bf16") == 0
    assert lse_error(lse + torch.tensor([2.2e-4, 0, 0]), lse, "bf16") == pytest.approx(2, rel=1e-2)
    assert lse_error(torch.tensor([1.0, -90.0, 2.0]), lse, "fp8") == math.inf
    assert lse_error(torch.tensor([math.nan, -math.inf, 2.0]), lse, "fp8") == math.inf
