"""The CUDA quantisation built as host C++ and run block by block, through the public functions, against torch.

Not a run on NVIDIA hardware: see tests/support/cuda_execution.hpp. Elements are encoded and decoded as
on sm_80.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mla
from mla import dispatch, registry
from mla.backends.cuda.gather import Gather
from mla.backends.cuda.quantize import Quantize
from mla.gather import gather_latent
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


def test_every_fp8_code_is_decoded(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(4, 3)[:, :576].view(torch.float8_e4m3fn)
    cache = mla.PagedKVCacheCollection.from_pages(
        codes[None], torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32),
        scales=torch.ones(1, 4, 1), quantization_granularity=576,
    )  # fmt: skip
    executed(monkeypatch, "sm_80", Gather, folder, seed=seed)
    monkeypatch.setattr("mla.gather.resolve", dispatch.resolve)
    dispatch.forget()
    tables = [torch.tensor(values, dtype=torch.int32) for values in ([0, 4], [0])]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.zeros(4, 512, dtype=dtype)
        gather_latent(*tables, 4, cache, 0, rows, target="cuda")
        torch.testing.assert_close(rows, codes[:, :512].to(dtype), rtol=0.0, atol=0.0, equal_nan=True)
    dispatch.forget()
