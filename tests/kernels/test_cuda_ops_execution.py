"""The small CUDA operations built as host C++ and run block by block over cases of the matrix.

Not a run on NVIDIA hardware: see tests/support/cuda_execution.hpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mla import dispatch, registry
from tests.kernels import test_matrix as matrix
from tests.support.cuda_execution import Executor, executed, needs_compiler
from tests.support.matrix_cases import GATHERS, MERGES, PLANS, STORES

pytestmark = needs_compiler
CPU = torch.device("cpu")
#: Few of the cases: each is a kernel to be built. All of them run on a GPU.
CASES = [
    *(("plan", case) for case in PLANS),
    *(("gather", GATHERS[i]) for i in (0, 1, 2, -1)),
    *(("store", STORES[i]) for i in (0, 2, -1)),
    *(("merge", MERGES[i]) for i in (1, 5)),
]
WRONG = {
    "plan": ("clamp(c * n - start, padded)", "clamp(c * n - start + 1, padded)"),
    "gather": ("t % kPageSize}", "(t + 1) % kPageSize}"),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


def implementation(op: str) -> Any:
    (one,) = (one for one in registry.default() if (one.backend, one.op) == ("cuda", op))
    return one


@pytest.fixture
def executor(op: str, monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> Iterator[Executor]:
    executor = executed(monkeypatch, "sm_80", implementation(op).load(), folder, seed=seed)
    monkeypatch.setattr(f"mla.{op}.resolve", dispatch.resolve)
    dispatch.forget()
    yield executor
    dispatch.forget()


def run(op: str, case: Any, executor: Executor, seed: int) -> None:
    test, where = getattr(matrix, f"test_{op}"), (implementation(op), CPU, case)
    for more in {"plan": [()], "gather": [(True,), (False,)]}.get(op, [()]):
        test(*where, *more, "cuda", *((seed,) if op in ("store", "merge") else ()))
    assert executor.launched, "nothing was executed"


@pytest.mark.parametrize(("op", "case"), CASES, ids=str)
def test_agrees_with_the_oracle(op: str, case: Any, executor: Executor, seed: int) -> None:
    run(op, case, executor, seed)


@pytest.mark.parametrize("op", WRONG)
def test_a_wrong_index_is_noticed(op: str, executor: Executor, seed: int) -> None:
    executor.mutate = lambda text: text.replace(*WRONG[op])
    with pytest.raises(AssertionError):
        run(op, next(case for of, case in CASES[2:] if of == op), executor, seed)
