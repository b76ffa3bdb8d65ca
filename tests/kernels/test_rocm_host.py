"""The ROCm kernels built as host C++ against the oracle: every operation, divergent barriers and stray reads reported.

Not a run on AMD hardware: see tests/support/rocm_host.hpp. What the compiler makes of the kernels is executed in
test_rocm_execution.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mla import dispatch, registry
from tests.kernels import test_matrix as matrix
from tests.support import problems
from tests.support.matrix_cases import GATHERS, MERGES, PLANS, QUANTIZATIONS, STORES
from tests.support.problems import Case, build
from tests.support.rocm_host import ARCHS, HostFault, RocmHost, needs_compiler, on_host
from tests.support.tolerance import assert_lse, assert_output

pytestmark = needs_compiler
CPU = torch.device("cpu")
OnHost = Callable[..., RocmHost]

PREFILLS = [
    Case(lengths=((90, 70), (0, 0), (40, 3)), heads=1, page_size=16, scale=1.0),
    Case(lengths=((20, 30), (0, 33)), heads=1, dims=(256, 256), dtypes="fp16", mask="sink_window", sinks=True),
    Case(lengths=((37, 40), (5, 1)), heads=1, dtypes="bf16+fp8_rope", page_size=16, csr=True),
    Case(lengths=((10, 50), (3, 9)), heads=1, rope="batched", softcap=5.0, mask="causal_bias"),
]
FP8_PREFILLS = [
    Case(lengths=((90, 70), (0, 0), (40, 3)), heads=1, page_size=16, scale=1.0, dtypes="fp8", v_scale="row"),
    Case(lengths=((37, 40), (5, 1)), heads=1, dtypes="fp8+bf16_rope", rope="ragged", v_transposed=True),
]
#: A few of each: ragged and paged, indptr tables, fp8, aliased outputs.
FEW = {
    "plan": [case for case in PLANS if case.name in ("ragged", "many", "all_empty")],
    "gather": [GATHERS[2], GATHERS[-4]],
    "store": [STORES[2], STORES[-2]],
    "merge": [MERGES[3], MERGES[5]],
    "quantize": [QUANTIZATIONS[0], QUANTIZATIONS[6]],
}


def few(op: str) -> pytest.MarkDecorator:
    """Parametrise by architecture and case."""
    return pytest.mark.parametrize(("arch", "case"), [(arch, case) for arch in ARCHS for case in FEW[op]], ids=str)


def implementation(op: str) -> Any:
    (one,) = (one for one in registry.default() if (one.backend, one.op) == ("rocm", op))
    return one


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> Iterator[OnHost]:
    """Return what lets the public functions run the kernels of an architecture here."""

    def run(arch: str, old: str = "", new: str = "") -> RocmHost:
        fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
        for module in (matrix, problems):
            monkeypatch.setattr(module, "fp8_dtype", lambda device: fp8)
        mutate = (lambda text: text.replace(old, new)) if old else None
        return on_host(monkeypatch, arch, folder, mutate, seed)

    yield run
    dispatch.forget()


def check_prefill(case: Case, seed: int) -> None:
    problem = build(case, CPU, seed)
    output, lse = problem.run("rocm")
    expected, expected_lse = problem.expect()
    precision = matrix.precision_of(case.dtypes)
    assert_output(output, expected, precision)
    assert_lse(lse, expected_lse, precision)


@pytest.mark.parametrize(
    ("arch", "case"),
    [*((ARCHS[i % 2], case) for i, case in enumerate(PREFILLS)), *(("gfx942", case) for case in FP8_PREFILLS)],
    ids=str,
)
def test_prefill(arch: str, case: Case, host: OnHost, seed: int) -> None:
    executor = host(arch)
    check_prefill(case, seed)
    assert len(executor.launched) == 1


@few("plan")
def test_plan(arch: str, case: Any, host: OnHost) -> None:
    executor = host(arch)
    matrix.test_plan(implementation("plan"), CPU, case, "rocm")
    assert executor.launched


@few("gather")
def test_gather(arch: str, case: Any, host: OnHost) -> None:
    executor = host(arch)
    matrix.test_gather(implementation("gather"), CPU, case, False, "rocm")
    assert executor.launched


@pytest.mark.parametrize("op", ["store", "merge", "quantize"])
@pytest.mark.parametrize("arch", ARCHS)
def test_other_operations(op: str, arch: str, host: OnHost, seed: int) -> None:
    executor = host(arch)
    for case in FEW[op]:
        getattr(matrix, f"test_{op}")(implementation(op), CPU, case, "rocm", seed)
    assert executor.launched


LOOP_BARRIER = "    barrier();  // the stage"
DIVERGENT = {
    "a_wave_skips_it": (
        f"    if (wave_id() != 1)\n  {LOOP_BARRIER}",
        r"448 at a barrier \(prefill\.hip:\d+\), 64 have left",
    ),
    "a_lane_skips_it": (
        f"    if (thread_id() != 7 || tile >= 0)\n  {LOOP_BARRIER}",
        r"511 at a barrier \(prefill\.hip:\d+\), 1 at ",
    ),
    "two_barriers_for_one": (
        f"    if (thread_id() % 2 == 0) barrier();\n    else\n  {LOOP_BARRIER}",
        r"256 at a barrier \(prefill\.hip:\d+\), 256 at a barrier \(prefill\.hip:\d+\), 0 have left",
    ),
    "some_leave": (f"    if (tile >= 0 && lane_id() == 3) return;\n{LOOP_BARRIER}", r", 8 have left"),
}


@pytest.mark.parametrize(("planted", "report"), DIVERGENT.values(), ids=DIVERGENT)
def test_a_divergent_barrier_is_reported(planted: str, report: str, host: OnHost, seed: int) -> None:
    host("gfx942", LOOP_BARRIER, planted)
    with pytest.raises(HostFault, match=report):
        check_prefill(PREFILLS[0], seed)


FAULTS = {
    "barrier_dropped": (LOOP_BARRIER, "    // the stage"),
    "page_index_wrong": ("source.offset + key) / kPageSize]", "source.offset + key) / kPageSize ^ 1]"),
    "diagonal_shifted": ("mask_visible(mask, b, h, first + ahead,", "mask_visible(mask, b, h, first + ahead + 1,"),
    "read_behind_the_rows": ("int64_t(first) * stride;", "(int64_t(first) << 30) * stride;"),
}


@pytest.mark.parametrize(("old", "new"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(old: str, new: str, host: OnHost, seed: int) -> None:
    host("gfx90a", old, new)
    with pytest.raises((AssertionError, HostFault)):
        check_prefill(Case(lengths=((90, 70), (40, 3)), heads=1, page_size=16), seed)
