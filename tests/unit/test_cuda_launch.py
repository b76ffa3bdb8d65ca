"""Launches of the CUDA prefill without a GPU: what belongs to a stream, a workspace or a graph is theirs alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla import dispatch
from mla._prefill_call import Call, canonical, judge
from mla.backends.cuda import prefill_sm90_launch, runtime, tensor_map
from mla.backends.cuda.prefill_sm90 import PrefillSm90
from mla.kv_cache import PagedKVCacheCollection
from mla.masks import CausalMask
from tests.support.cuda_execution import Driver

HEADS, KEYS = 2, 8192  # as many keys as parts are made of, so that there is a workspace


class Gpu:
    """Stands for a device: keeps the parameters of what is launched anew, and counts what is launched again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.anew: list[Any] = []
        self.again, self.stream, self.capturing = 0, 7, False
        monkeypatch.setattr(runtime, "load", lambda spec, device: SimpleNamespace(launch=self._launch))
        monkeypatch.setattr(runtime, "properties", lambda device: SimpleNamespace(multi_processor_count=132))
        monkeypatch.setattr(tensor_map, "driver", lambda: Driver)
        monkeypatch.setattr(prefill_sm90_launch, "counters_of_stream", self._counters)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.stream, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(
            "mla.dispatch.resolve", lambda problem, target, device: PrefillSm90.prepare(problem, device)
        )
        dispatch.forget()

    def _launch(self, params: Any, *grid: int) -> Any:
        self.anew.append(params)
        return self._repeat

    def _repeat(self) -> None:
        self.again += 1

    def _counters(self, device: torch.device) -> Any:
        return SimpleNamespace(data_ptr=lambda: 1000 * self.stream)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield Gpu(monkeypatch)
    dispatch.forget()


def start(batch: int = 1, workspace: torch.Tensor | None = None) -> Any:
    """Launch a call of so many sequences; return what launches it again."""
    table, lengths = torch.zeros(batch, 128, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    cache = PagedKVCacheCollection.from_pages(torch.zeros(2, 64, 576).bfloat16(), table, lengths).layer(0)
    kv, q = torch.zeros(KEYS, HEADS, 256).bfloat16(), torch.zeros(batch, HEADS, 192).bfloat16()
    offsets = torch.arange(batch + 1, dtype=torch.int32)
    call = Call(
        torch.zeros(batch, HEADS, 128).bfloat16(), q, None, kv[..., :128], kv[..., 128:], cache, None, CausalMask(),
        offsets, offsets, 0.1, workspace=workspace, target="cpu",
    )  # fmt: skip
    form = judge(call)
    return form.run(canonical(call, form))


def test_a_launch_is_made_once_for_a_stream(gpu: Gpu) -> None:
    again = start(workspace=torch.zeros(1 << 24, dtype=torch.uint8))
    again()
    assert (len(gpu.anew), gpu.again) == (1, 1)
    gpu.stream = 8
    again()
    again()
    first, second = gpu.anew
    assert gpu.again == 2
    assert (first.counters, second.counters) == (7000, 8000), "streams that run at once must not share them"
    assert (first.arrivals, first.slots) == (7008, second.slots)
    second.counters, second.arrivals = first.counters, first.arrivals
    assert bytes(first) == bytes(second)


def test_a_workspace_is_handed_out_anew(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [torch.zeros(1 << 24, dtype=torch.uint8) for _ in range(2)]
    again = start()
    monkeypatch.setattr(torch, "empty", lambda *_, **__: memory[0])
    again()
    again()
    assert (len(gpu.anew), gpu.again) == (2, 1)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: memory[1])
    again()
    slots = [params.slots for params in gpu.anew[1:]]
    assert [memory[i].data_ptr() <= slots[i] < memory[i].data_ptr() + (1 << 24) for i in (0, 1)] == [True, True]


def test_a_large_batch_is_ordered_again_too(gpu: Gpu) -> None:
    again = start(batch=33, workspace=torch.zeros(1 << 25, dtype=torch.uint8))
    order, prefill = gpu.anew
    assert order.table == prefill.table and order.arrivals == prefill.arrivals
    again()
    assert (len(gpu.anew), gpu.again) == (2, 2)


def test_a_graph_has_counters_of_its_own(gpu: Gpu) -> None:
    gpu.capturing = True
    assert start() is None, "and nothing is kept of its memory"
    assert gpu.anew[0].counters not in (0, 7000)
