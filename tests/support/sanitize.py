"""Run the matrix's cases of CUDA and Triton kernels under the four tools of compute-sanitizer, and count reports.

    python -m tests.support.sanitize [--tools memcheck,racecheck] [--only prefill] [--most N] [--logs FOLDER] [--jobs N]

Needs an NVIDIA GPU and compute-sanitizer on the path. Only kernels of this library are checked, but by initcheck, which
has to see every write. Each tensor is an allocation of its own, so that one step past its end is seen. Faults planted
in copies of the sources (sanitizer_edits.py) run the same way, since "0 reports" says something only of a tool that
finds them; and racecheck sees the kernels for sm_90 in a copy where it can follow their barriers. What it reports of
memory through which Triton itself hands the registers of a kernel to its warps (`is_hand_over`) does not count. The
exit status is 0 where every tool came to its end, reported nothing of the kernels without a fault, and found every
fault.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from mla import registry
from mla.target import device_arch
from tests.support.matrix_cases import LONG_ROWS, PREFILLS
from tests.support.problems import problem_of
from tests.support.sanitizer_edits import FAULTS, FOR_RACECHECK, ROOT, Fault, copy_sources

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
CASES_A_JOB = 8
SECONDS_A_JOB = 300
_PYTEST = [
    sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "-rp", "-m",
    "(cuda or triton) and not full_matrix",
]  # fmt: skip
_MATRIX = "tests/kernels/test_matrix.py"
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_REPORT = re.compile(
    r"^========= ((?:Error|Warning|Invalid|Uninitialized|Barrier|Divergent|Potential)\b.*)", re.MULTILINE
)
#: A report of racecheck: an access in its first line, others in the lines behind.
_RACE = re.compile(r"========= Error: Race reported between .*(?:\n=========     and .*)*")
_PLACE = re.compile(r" access at \S+ in (\S.*?):(\d+)(?: \[\d+ hazards\])?$", re.MULTILINE)
#: Kernels of Triton have the plain names of their functions; those of CUDA all begin alike.
_TRITON_KERNELS = {"prefill": ("prefill", "schedule")}


@dataclass(frozen=True)
class Job:
    """Cases of one implementation for one process under one tool, in the sources or in a copy with edits."""

    tool: str
    implementation: str
    cases: Sequence[str]
    folder: Path = ROOT
    fault: Fault | None = None


@dataclass(frozen=True)
class Outcome:
    """What a process gave; ``reports`` is None where the tool did not come to its end."""

    job: Job
    reports: int | None
    passed: int
    kinds: Counter[str]
    seconds: float

    @property
    def good(self) -> bool:
        """Whether the tool came to its end with what it should have found."""
        return self.reports is not None and (self.reports > 0) == (self.job.fault is not None)

    def __str__(self) -> str:
        job = self.job
        found = "broke off" if self.reports is None else f"{self.reports} reports"
        what = f"planted in {job.fault.edit.file}" if job.fault else f"{self.passed} of {len(job.cases)} tests passed"
        lines = [f"{job.implementation:28}{job.tool:11}{found:>14}  {what}, {self.seconds:.0f} s"]
        return "\n".join([*lines, *(f"      {count} x {kind}" for kind, count in self.kinds.most_common(4))])


def implementation_of(case: str) -> str:
    """Return the registry's id in a test's id."""
    found = re.search(r"\[(?:[a-z_]+-)?((?:cuda|triton)\.[a-z0-9]+\.[a-z]+\.[a-z0-9_]+)", case)
    return found.group(1) if found else ""


def find_cases(only: str) -> list[str]:
    """Return the ids of the tests that an implementation does not refuse."""
    listed = subprocess.run([*_PYTEST, "--collect-only", _MATRIX], capture_output=True, text=True, check=True).stdout
    problems = {str(case): problem_of(case) for case in (*PREFILLS, *LONG_ROWS)}

    def fits(case: str) -> bool:
        name = implementation_of(case)
        if not name or only not in name:
            return False
        problem, arch = problems.get(case.partition(f"{name}-")[2].rstrip("]")), device_arch(torch.device("cuda"))
        one = next(one for one in registry.default() if one.id == name)
        return problem is None or not (one.requires.compare(problem, arch)[1] or one.load().check(problem, arch))

    return [line for line in listed.splitlines() if fits(line)]


def divide(tool: str, cases: Sequence[str], most: int, for_racecheck: Path) -> list[Job]:
    """Return jobs of equal sizes for each implementation, of `most` cases taken evenly from all of its own."""
    jobs = []
    for name, own in itertools.groupby(sorted(cases, key=implementation_of), implementation_of):
        group = list(own)
        chosen = group[:: -(-len(group) // most)]
        count = -(-len(chosen) // CASES_A_JOB)
        folder = for_racecheck if tool == "racecheck" and ".sm90." in name else ROOT
        jobs += [Job(tool, name, chosen[first::count], folder) for first in range(count)]
    return jobs


def command_of(job: Job) -> list[str]:
    """Return the command line of a job."""
    backend, _, op, _ = job.implementation.split(".")
    names = ["kernel_substring=mla_"] if backend == "cuda" else [
        f"kernel_name={name}" for name in _TRITON_KERNELS.get(op, (op,))
    ]  # fmt: skip
    filters = [] if job.tool == "initcheck" else [word for name in names for word in ("--kernel-name", name)]
    # Padding, so that what lies past the end of a tensor is not another one.
    padding = ["--padding", str(1 << 20)] if job.tool == "memcheck" else []
    return [
        "compute-sanitizer",
        "--tool",
        job.tool,
        "--report-api-errors",
        "no",
        "--print-limit",
        "10000",
        *padding,
        *filters,
        *_PYTEST,
        *job.cases,
    ]


def run(job: Job, log: Path | None) -> Outcome:
    """Run a job in a process of its own."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.monotonic()
    try:
        output = subprocess.run(
            command_of(job), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
            cwd=job.folder, timeout=SECONDS_A_JOB,
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired as error:
        seen = error.stdout or b""  # bytes, whatever was asked for
        output = seen if isinstance(seen, str) else seen.decode(errors="replace")
    if log is not None:
        log.write_text(output, encoding="utf-8")
    summaries = [int(count) for count in _SUMMARY.findall(output)]
    hand_overs = [race for race in _RACE.findall(output) if is_hand_over(race, job.folder)]
    for race in hand_overs:
        output = output.replace(race, "", 1)
    kinds = Counter(re.sub(r"\[\d+ hazards\]|0x[0-9a-f]{9,}", "", kind).strip() for kind in _REPORT.findall(output))
    return Outcome(
        job=job,
        reports=sum(summaries) - len(hand_overs) if summaries else None,
        passed=len(re.findall(r"^PASSED ", output, re.MULTILINE)),
        kinds=kinds,
        seconds=time.monotonic() - begin,
    )


@functools.cache
def _ends_of_kernel(folder: Path) -> frozenset[str]:
    """Return the lines where the Triton kernel for sm_90 begins and where its last statement does."""
    tree = ast.parse((folder / "kernels/triton/prefill_hopper.py").read_text(encoding="utf-8"))
    (kernel,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "prefill")
    return frozenset({str(kernel.lineno), str(kernel.body[-1].lineno)})


def is_hand_over(race: str, folder: Path = ROOT) -> bool:
    """Tell whether all accesses of a race are Triton's own, by which it hands registers to warps of other roles.

    Code of no statement counts for the line where the kernel begins or for its last statement, both outside of every
    role: words that the first warps write and the others read, with ``barrier.sync 1`` of the whole block between
    them, as the assembly shows. racecheck reports some of them all the same. Memory of ours is accessed in other lines.
    """
    places = _PLACE.findall(race)
    own = all(file.startswith("<prefill_hopper ") and line in _ends_of_kernel(folder) for file, line in places)
    return bool(places) and own


def show(outcomes: Sequence[Outcome]) -> None:
    """Print what each implementation gave under each tool, and which faults were found."""
    kept = sorted((one for one in outcomes if one.job.fault is None), key=_of)
    print("\nwithout a fault:")
    for (name, tool), group in itertools.groupby(kept, _of):
        some = list(group)
        broken = sum(one.reports is None for one in some)
        end = f", {broken} of {len(some)} processes broke off" if broken else ""
        reports, passed = sum(one.reports or 0 for one in some), sum(one.passed for one in some)
        print(
            f"{name:28}{tool:11}{reports:6} reports, {passed} of {sum(len(one.job.cases) for one in some)} passed{end}"
        )
    planted = [one for one in outcomes if one.job.fault is not None]
    print(f"faults found: {sum(one.good for one in planted)} of {len(planted)}")


def _of(outcome: Outcome) -> tuple[str, str]:
    return outcome.job.implementation, outcome.job.tool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--only", default="", help="part of an implementation's id")
    parser.add_argument(
        "--most", type=int, default=10_000, help="cases of an implementation, evenly from all; 0: faults alone"
    )
    parser.add_argument("--logs", type=Path, help="folder for the tools' output")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    tools = args.tools.split(",")
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        numbers = itertools.count()

        def start(job: Job) -> Future[Outcome]:
            log = f"{job.tool}.{job.implementation}.{next(numbers)}.log"
            return pool.submit(run, job, args.logs / log if args.logs else None)

        running = []
        for number, fault in enumerate(FAULTS):
            if args.only in fault.implementation and fault.tool in tools:
                copy = Path(folder, str(number))
                copy_sources(copy, [fault.edit])
                running.append(start(Job(fault.tool, fault.implementation, [fault.test_id], copy, fault)))
        for_racecheck = Path(folder, "racecheck")
        copy_sources(for_racecheck, FOR_RACECHECK)
        cases = find_cases(args.only) if args.most else []
        running += [start(job) for tool in tools for job in divide(tool, cases, args.most, for_racecheck)]
        outcomes = []
        for future in as_completed(running):
            outcomes.append(future.result())
            print(outcomes[-1], flush=True)
    show(outcomes)
    return int(not all(one.good for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
