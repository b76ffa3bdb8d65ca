"""Calls of the Triton prefill on a GPU that are launched again: new data, other streams, a workspace."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import mla
from mla.backends.triton import prefill, prefill_hopper
from tests.support.problems import Case, build

pytestmark = pytest.mark.triton

CASES = [
    Case(lengths=((37, 70),), heads=2),
    Case(lengths=((100, 2000),), heads=16),  # more items than an H200 has multiprocessors: they are counted
    Case(),  # several sequences are ordered by a kernel before
    Case(dtypes="fp8", v_transposed=True),
    Case(dtypes="fp32"),
]


@pytest.mark.parametrize("given", [False, True], ids=["own memory", "workspace"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_that_is_launched_again(case: Case, given: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    problem, made = build(case, "cuda", seed), 0
    for module in (prefill, prefill_hopper):

        def count(*arguments: Any, values_of: Any = module.values_of) -> Any:
            nonlocal made
            made += 1
            return values_of(*arguments)

        monkeypatch.setattr(module, "values_of", count)
    more = {"workspace": torch.empty(1 << 20, dtype=torch.uint8, device="cuda")} if given else {}
    kept, streams = problem.outputs(), itertools.cycle([None, torch.cuda.Stream(), torch.cuda.Stream()])

    def attend(outputs: dict[str, Any], stream: torch.cuda.Stream | None) -> None:
        torch.cuda.synchronize()
        mla.prefill(**problem.operands, **problem.keywords, **outputs, **more, target="triton", stream=stream)
        torch.cuda.synchronize()

    others = [problem.outputs() for _ in range(6)]  # at addresses of their own: their calls are made anew
    with torch.no_grad():
        for turn, new in enumerate(others):
            q = problem.operands["q"]
            q.copy_(q.float().roll(1, 0))
            for name in ("output", "lse"):
                kept[name].fill_(float("nan"))
            attend(kept, next(streams))
            attend(new, None)
            for name in ("output", "lse"):
                assert torch.equal(kept[name].nan_to_num(7.0), new[name].nan_to_num(7.0)), (name, turn)
    assert made == 8, "the first two of the same and all others"
