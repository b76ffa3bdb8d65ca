"""The up-projection to fp8 of Hopper run on the host, block by block, and compared with the oracle.

Not a run on NVIDIA hardware: see tests/support/cuda_execution.hpp and cuda_execution_sm90.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla import dispatch
from mla.backends.cuda import compiler, runtime
from mla.backends.cuda.project import ROWS, ProjectSm90
from mla.gather import project_to_fp8
from mla.problem import Problem
from tests.support.cuda_execution import Executor, executed, needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> Iterator[Executor]:
    executor = executed(monkeypatch, "sm_90a", ProjectSm90, folder, None, seed)
    monkeypatch.setattr("mla.gather.resolve", dispatch.resolve)
    yield executor
    dispatch.forget()


def check(rows: int, columns: int, scales: int = 1) -> None:
    a, b = torch.randn(rows, 576)[:, 64:].bfloat16(), (torch.randn(columns, 512) / 512**0.5).bfloat16()
    output = torch.full((rows + 1, columns + 16), 1.0).to(torch.float8_e4m3fn)
    scale = torch.linspace(0.004, 0.02, scales)  # the first saturates
    project_to_fp8(output[:-1, 16:], a, b, scale, "cuda")
    expected = (a.float() @ b.float().T / scale.repeat_interleave(rows // scales)[:, None]).clamp(-448, 448)
    torch.testing.assert_close(output[:-1, 16:].float(), expected, rtol=2**-4, atol=2**-9)
    output[:-1, 16:] = 1.0
    assert (output.float() == 1.0).all(), "nothing else is written"


@pytest.mark.parametrize("processors", [1, 2, 3, 7])
@pytest.mark.parametrize(("rows", "columns", "scales"), [(1, 16, 1), (ROWS + 5, 304, 1), (2 * ROWS, 144, 3)])
def test_project(
    rows: int, columns: int, scales: int, processors: int, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thread blocks begin and end anywhere: in the middle of some rows' columns, and with a tile or several."""
    monkeypatch.setattr(runtime, "properties", lambda device: SimpleNamespace(multi_processor_count=processors))
    check(rows, columns, scales)
    assert executor.launched == ["project.bf16_fp8"]


def test_any_warp_may_be_late(executor: Executor) -> None:
    for _ in executor.each_late(512):
        check(2 * ROWS, 256)


def test_the_kernel_keeps_its_registers_and_the_tensor_cores_asynchronous() -> None:
    (spec,) = ProjectSm90.specs(Problem("project", "bf16", "fp8"), "sm_90a")
    report = compiler.compile_unit(compiler.unit(spec, "sm_90a")).report
    assert (report["registers"], report["spill_store_bytes"]) == (128, 0)
    assert spec.shared_bytes <= 227 * 1024
    assert "C75" not in str(report["log"]), "products wait for each other, or for what need not be waited for"
