"""Every CUDA kernel through NVRTC for every architecture, without a GPU: registers, spills, shared memory, SASS."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mla import jit_cache
from mla.ahead import compile_ahead
from mla.backends.cuda import compiler
from mla.backends.cuda.compiler import KernelSpec
from mla.backends.cuda.gather import Gather
from mla.backends.cuda.merge import Merge
from mla.backends.cuda.ops import variants
from mla.backends.cuda.plan import Plan, PlanParams
from mla.backends.cuda.quantize import Quantize
from mla.backends.cuda.store import Store
from mla.errors import CompileError
from mla.problem import Problem
from tests.architecture.source_tree import ROOT

pytest.importorskip("cuda.core", reason="needs cuda-core, cuda-bindings and NVRTC (the extra `cuda`)")

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120")

#: Registers of a thread that leave 32 warps of an SM's 64 to plan (one block), 16 to the others.
MOST_REGISTERS = {"plan": 64, "gather": 128, "store": 128, "merge": 128, "quantize": 128}
STATIC_SHARED_BYTES = {"plan": 2 * 32 * 8, "gather": 0, "store": 0, "merge": 0, "quantize": 0}


def usual_problems() -> Iterator[Problem]:
    """Yield what is compiled ahead, at one page size: the size is a constant that changes no budget."""
    yield from Plan.problems("")
    for entry in (Gather, Store, Merge, Quantize):
        yield from (problem for problem in entry.problems("") if problem.page_size in (0, 64))


def unusual_problems() -> Iterator[Problem]:
    """Yield every alignment, fp32, and page sizes that are no power of two."""
    for alignment in (1, 2, 4, 8):
        yield Problem("gather", "fp8", "bf16", page_size=7, granularity=128, alignment=alignment)
        yield Problem("store", "bf16", "fp8", page_size=7, granularity=64, alignment=alignment)
        yield Problem("quantize", "bf16", "fp8", granularity=64, alignment=max(alignment, 2))
        yield Problem("quantize", "fp32", "fp8", alignment=max(alignment, 4))
        for op in ("gather", "store", "merge"):
            if alignment >= 2:
                yield Problem(op, "bf16", "bf16", page_size=1, alignment=alignment)
            if alignment >= 4:
                yield Problem(op, "fp32", "fp32", page_size=1, alignment=alignment)
    yield Problem("store", "fp32", "fp8", page_size=16, granularity=576)


ENTRIES = {"plan": Plan, "gather": Gather, "store": Store, "merge": Merge, "quantize": Quantize}
SPECS = {
    spec.name: (problem.op, archs, spec)
    for problems, archs in ((usual_problems(), ARCHS), (unusual_problems(), ("sm_80", "sm_90a")))
    for problem in problems
    for spec in ENTRIES[problem.op].specs(problem, "")
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture(autouse=True)
def _fresh_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CACHE_DIR", str(folder))
    monkeypatch.delenv("MLA_AOT_DIR", raising=False)
    monkeypatch.delenv("MLA_JIT", raising=False)


@pytest.mark.parametrize("name", SPECS)
def test_small_kernels_compile_within_their_budget(name: str) -> None:
    op, archs, spec = SPECS[name]
    for arch in archs:
        report = compiler.build(spec, arch).report
        assert (report["spill_store_bytes"], report["spill_load_bytes"], report["stack_bytes"]) == (0, 0, 0), arch
        assert 0 < int(str(report["registers"])) <= MOST_REGISTERS[op], arch
        assert report["shared_bytes"] == STATIC_SHARED_BYTES[op], arch


def sass(path: Path) -> list[str]:
    """Return the instructions of a cubin."""
    nvidia = pytest.importorskip("triton.backends.nvidia", reason="needs the disassembler that Triton brings")
    tool = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("Triton brings no cuobjdump here")
    text = subprocess.run([tool, "--dump-sass", path], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "loads", "stores"),
    [
        ("gather.bf16_bf16.p64.g0.a16", {"LDG.E.128": 16}, {"STG.E.128": 16}),
        ("gather.bf16_bf16.p1.g0.a4", {"LDG.E": 16}, {"STG.E": 16}),
        ("gather.fp8_bf16.p64.g128.a16", {"LDG.E.64": 8}, {"STG.E.128": 8}),
        ("store.bf16_bf16.p64.g0.a16", {"LDG.E.128": 12}, {"STG.E.128": 12}),
        ("merge.bf16_bf16.dv128.a16", {"LDG.E.128": 4}, {"STG.E.128": 2}),
        ("quantize.bf16_fp8.g0.a16", {"LDG.E.128": 8}, {"STG.E.64": 4}),
        ("quantize.bf16_fp8.g576.a16", {"LDG.E.128": 3}, {"STG.E.64": 3}),
    ],
)
def test_accesses_are_as_wide_as_the_alignment_allows(name: str, loads: dict[str, int], stores: dict[str, int]) -> None:
    path = compiler.build(SPECS[name][2], "sm_90a").path
    assert path is not None
    instructions = sass(path)
    plain = [re.sub(r"\.(CONSTANT|NA|STRONG|GPU|SYS)\b", "", one) for one in instructions]
    for wanted in (loads, stores):
        for instruction, count in wanted.items():
            assert plain.count(instruction) >= count, sorted({one for one in plain if one.startswith(("LDG", "STG"))})
    assert not [one for one in instructions if one.startswith(("LDL", "STL", "LD.", "ST."))], "local or generic"


def test_variants_are_named_once() -> None:
    for arch in ARCHS:
        names = [kernel_id for kernel_id, _ in variants(arch)]
        assert len(names) == len(set(names))
        assert {name.split(".")[2] for name in names} >= {"plan", "gather", "store", "merge", "quantize"}
        assert all(re.fullmatch(r"[\w.+-]+", name) for name in names)


def test_what_is_compiled_ahead_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, str]] = []
    folder = tmp_path / "ahead of time"
    paths = compile_ahead("cuda", "sm_90a", ("plan", "merge"), folder, lambda *state: seen.append(state))
    assert [done for done, _, _ in seen] == list(range(1, len(paths) + 1))
    assert {kernel_id for _, _, kernel_id in seen} == {path.stem for path in paths}
    assert "cuda.sm_90a.plan.scan" in {path.stem for path in paths}
    entry = json.loads(paths[0].with_suffix(".json").read_text())
    assert entry["report"]["registers"] > 0
    assert {"shared_bytes", "spill_store_bytes", "stack_bytes"} <= entry["report"].keys()
    assert "__global__" in paths[0].with_suffix(".cu").read_text()

    jit_cache.forget()
    monkeypatch.setenv("MLA_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("MLA_AOT_DIR", str(folder))
    monkeypatch.setenv("MLA_JIT", "0")
    (spec,) = Plan.specs(Problem("plan", "int32", "int32"), "sm_90a")
    assert compiler.build(spec, "sm_90a").path == folder / "cuda.sm_90a.plan.scan.cubin"
    with pytest.raises(CompileError, match=r"MLA_JIT=0"):
        compiler.build(spec, "sm_80")


def test_a_fresh_process_compiles_in_threads_without_a_toolkit(tmp_path: Path) -> None:
    """Whichever thread comes first imports the vendor library for all; headers and NVRTC are pip's alone."""
    script = "from mla.ahead import compile_ahead; print(len(compile_ahead('cuda', 'sm_90a', ('merge', 'store'))))"
    environment = {**os.environ, "MLA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": ""}
    for name in ("CUDA_HOME", "CUDA_PATH"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(list(tmp_path.glob("*.a16.cubin")))


def plan_spec(**changes: object) -> KernelSpec:
    (spec,) = Plan.specs(Problem("plan", "int32", "int32"), "sm_90a")
    return replace(spec, **changes)  # type: ignore[arg-type]


def test_an_error_tells_log_options_and_source() -> None:
    with pytest.raises(CompileError) as caught:
        compiler.build(plan_spec(name="plan.broken", defines=(("mla_plan", "1nonsense"),)), "sm_90a")
    message = str(caught.value)
    assert re.search(r"plan\.cu\(\d+\): error", message), "lines are those of the source file"
    assert "--std=c++17" in message
    assert "mla_plan 1nonsense" in Path(re.search(r"source: (.*)", message)[1]).read_text()  # type: ignore[index]


def test_a_parameter_block_that_differs_does_not_compile() -> None:
    fields = list(PlanParams._fields_)

    def build(changed: list[tuple[str, type]]) -> None:
        params = type("PlanParams", (ctypes.Structure,), {"_fields_": changed})
        compiler.build(plan_spec(name="plan.params", params=params), "sm_90a")

    with pytest.raises(CompileError, match=r"PlanParams\.lengths: offset differs from the host's"):
        build([fields[1], fields[0], *fields[2:]])
    with pytest.raises(CompileError, match="PlanParams: size differs from the host's"):
        build([*fields, ("more", ctypes.c_int)])
    with pytest.raises(CompileError, match="no_such_field"):
        build([*fields[:-1], ("no_such_field", ctypes.c_int)])
