"""The CUDA quantisation built as host C++ and run block by block, through the public functions, against torch.

Not a run on NVIDIA hardware: see tests/support/cuda_execution.hpp. Elements are encoded by the integer code of sm_80.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mla import dispatch, registry
from mla.backends.cuda.quantize import Quantize
from tests.kernels import test_matrix as matrix
from tests.support.cuda_execution import Executor, executed, needs_compiler
from tests.support.matrix_cases import QUANTIZATIONS

pytestmark = needs_compiler
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> Iterator[Executor]:
    executor = executed(monkeypatch, "sm_80", Quantize, folder, seed=seed)
    monkeypatch.setattr("mla.quantize.resolve", dispatch.resolve)
    dispatch.forget()
    yield executor
    dispatch.forget()


def implementation() -> Any:
    (one,) = (one for one in registry.default() if (one.backend, one.op) == ("cuda", "quantize"))
    return one


@pytest.mark.parametrize("case", [*QUANTIZATIONS[::2], QUANTIZATIONS[5]], ids=str)
def test_quantize(case: Any, executor: Executor, seed: int) -> None:
    matrix.test_quantize(implementation(), CPU, case, "cuda", seed)
    assert executor.launched, "nothing was executed"


def test_a_wrong_scale_is_noticed(executor: Executor, seed: int) -> None:
    executor.mutate = lambda text: text.replace("Divisor(kE4m3Max, amax)", "Divisor(kE4m3Max / 2, amax)")
    with pytest.raises(AssertionError):
        matrix.test_quantize(implementation(), CPU, QUANTIZATIONS[0], "cuda", seed)
