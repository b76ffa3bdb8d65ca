"""Run the matrix's cases of every CUDA implementation under the four tools of compute-sanitizer, and count reports.

    python -m tests.support.sanitize [--tools memcheck,racecheck] [--only prefill] [--most N] [--logs FOLDER] [--jobs N]

Needs an NVIDIA GPU and compute-sanitizer on the path. Only kernels of this library are checked, but by initcheck, which
has to see every write. Each tensor is an allocation of its own, so that one step past its end is seen. The exit status
says whether every tool ran to its end; reports do not change it, since racecheck does not follow mbarriers: see
docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
CASES_A_JOB = 10
SECONDS_A_JOB = 300
_PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "--tb=line",
    "-m",
    "cuda and not full_matrix",
]
_MATRIX = "tests/kernels/test_matrix.py"
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_REPORT = re.compile(
    r"^========= ((?:Error|Warning|Invalid|Uninitialized|Barrier|Divergent|Potential)\b.*)", re.MULTILINE
)


@dataclass(frozen=True)
class Outcome:
    """What one process under one tool gave; ``reports`` is None where the tool did not come to its end."""

    tool: str
    implementation: str
    reports: int | None
    tests: str
    kinds: Counter[str]


def implementation_of(case: str) -> str:
    """Return the registry's id in a test's id."""
    found = re.search(r"\[(?:[a-z_]+-)?(cuda\.[a-z0-9]+\.[a-z]+\.[a-z0-9_]+)", case)
    return found.group(1) if found else ""


def find_cases(only: str) -> dict[str, list[str]]:
    """Return the test ids of each implementation."""
    listed = subprocess.run([*_PYTEST, "--collect-only", _MATRIX], capture_output=True, text=True, check=True).stdout
    cases = sorted((line for line in listed.splitlines() if implementation_of(line)), key=implementation_of)
    groups = {name: list(group) for name, group in itertools.groupby(cases, implementation_of)}
    return {name: group for name, group in groups.items() if only in name}


def run(tool: str | None, implementation: str, cases: Sequence[str], log: Path | None) -> Outcome:
    """Run some cases in a process of their own; without a tool, which fills the cache of compiled kernels."""
    command = [*_PYTEST, *cases]
    environment = dict(os.environ)
    if tool is not None:
        every = [] if tool == "initcheck" else ["--kernel-name", "kernel_substring=mla_"]
        command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", *every, *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    try:
        output = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=SECONDS_A_JOB
        ).stdout
    except subprocess.TimeoutExpired as error:
        seen = error.stdout or b""  # bytes, whatever was asked for
        output = (seen if isinstance(seen, str) else seen.decode(errors="replace")) + "\n1 timed out in this process"
    if log is not None:
        log.write_text(output, encoding="utf-8")
    summaries = _SUMMARY.findall(output)
    kinds = Counter(re.sub(r"\[\d+ hazards\]|0x[0-9a-f]{9,}", "", kind).strip() for kind in _REPORT.findall(output))
    tests = next(
        (line for line in reversed(output.splitlines()) if re.search(r"\d+ (passed|failed|skipped|timed)", line)), ""
    )
    return Outcome(
        tool or "", implementation, sum(map(int, summaries)) if summaries else None, tests.strip("= "), kinds
    )


def show(outcomes: list[Outcome]) -> None:
    """Print what each implementation gave under each tool."""
    for (name, tool), some in itertools.groupby(outcomes, lambda one: (one.implementation, one.tool)):
        found = list(some)
        reports = sum(one.reports or 0 for one in found)
        broken = sum(one.reports is None for one in found) if tool else 0
        counts: Counter[str] = Counter()
        for one in found:
            counts.update({word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", one.tests)})
        tests = ", ".join(f"{counts[word]} {word}" for word in ("passed", "failed", "skipped", "timed") if counts[word])
        end = f"  {broken} processes broke off" if broken else ""
        print(f"{name:28}{tool or 'no tool':11}{reports:6} reports  {tests}{end}")
        kinds: Counter[str] = sum((one.kinds for one in found), Counter())
        for kind, count in kinds.most_common(6):
            print(f"      {count} x {kind}")
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--only", default="", help="part of an implementation's id")
    parser.add_argument("--most", type=int, default=10_000, help="cases of an implementation, taken evenly from all")
    parser.add_argument("--logs", type=Path, help="folder for the tools' output")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    chosen = {name: cases[:: -(-len(cases) // args.most)] for name, cases in find_cases(args.only).items()}
    groups = [
        (name, cases[first : first + CASES_A_JOB])
        for name, cases in chosen.items()
        for first in range(0, len(cases), CASES_A_JOB)
    ]
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    unfinished = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for tool in (None, *args.tools.split(",")):
            logs = [args.logs / f"{tool}.{name}.{i}.log" if args.logs else None for i, (name, _) in enumerate(groups)]
            outcomes = list(pool.map(lambda group, log, tool=tool: run(tool, *group, log), groups, logs))
            show(outcomes)
            unfinished += sum(one.reports is None for one in outcomes) if tool is not None else 0
    return int(unfinished > 0)


if __name__ == "__main__":
    raise SystemExit(main())
