"""Capture, replay, tracing and syncs of the whole job on an NVIDIA GPU, for each target that runs there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import mla
from mla import ArgumentError, DeviceError, UnsupportedError, masks
from mla.kv_cache import PagedKVCacheCollection
from mla.plan import prefill_plan
from tests.support.replay_step import Step

pytestmark = pytest.mark.cuda

SIZE, CHUNKS, STEPS = 256, 12, 50
TARGETS = ("gpu", "cuda", "triton")


@contextmanager
def no_sync() -> Iterator[None]:
    """Make a wait for the device an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make_step(target: str, **more: Any) -> Step:
    """Return a step of up to 8 sequences and 200 rows; skip where the target serves no such problem."""
    step = Step("cuda", torch.bfloat16, batch=8, rows=200, heads=4, page_size=64, columns=6)
    try:
        mla.chunked_prefill(
            step.q, step.cache, 0, step.weight, step.offsets, masks.CausalMask(), 0.1, max_chunks=1, target=target,
            **more,
        )  # fmt: skip
    except UnsupportedError as error:
        pytest.skip(str(error).splitlines()[0])
    return step


def capture(
    step: Step, target: str, mask: Any = None, size: int = SIZE, chunks: int = CHUNKS, **more: Any
) -> tuple[Any, Any]:
    """Warm up and capture a step; return the graph and the LSE that it writes."""
    mask = mask or masks.CausalMask()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.run(mask, target, size, max_chunks=chunks, **more)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lse = step.run(mask, target, size, max_chunks=chunks, **more)
    return graph, lse


def compare(
    step: Step, lse: torch.Tensor, target: str, mask: Any, rows: torch.Tensor, size: int = SIZE, **more: Any
) -> None:
    """Compare the rows of a replay with an eager call that knows the lengths."""
    expected, expected_lse = step.expect(mask, target, size, **more)
    torch.testing.assert_close(step.output[: len(rows)][rows], expected[rows], rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(lse[: len(rows)][rows], expected_lse[rows], rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("target", TARGETS)
def test_fifty_replays_equal_eager(target: str, seed: int) -> None:
    source, step, mask = random.Random(seed), make_step(target), masks.CausalMask()
    step.draw(source)
    graph, lse = capture(step, target)
    for _ in range(STEPS):
        step.draw(source)
        step.output.fill_(3.0)
        graph.replay()
        rows = sum(step.new)
        compare(step, lse, target, mask, torch.ones(rows, dtype=torch.bool))
        assert bool((step.output[rows:] == 3.0).all()), "rows of no sequence stay"


@pytest.mark.parametrize("target", TARGETS)
def test_replays_in_fp8(target: str, seed: int) -> None:
    more = {"attention_dtype": torch.float8_e4m3fn}
    source, step, mask = random.Random(seed), make_step(target, **more), masks.CausalMask()
    step.draw(source)
    graph, lse = capture(step, target, **more)
    for _ in range(8):
        step.draw(source)
        graph.replay()
        compare(step, lse, target, mask, torch.ones(sum(step.new), dtype=torch.bool), **more)


@pytest.mark.parametrize("target", TARGETS)
def test_a_replay_follows_a_captured_tensor_of_the_mask(target: str, seed: int) -> None:
    source, step = random.Random(seed), make_step(target)
    ends = torch.zeros(8, dtype=torch.int32, device="cuda")
    mask = masks.CausalPaddingMask(ends)
    step.draw(source)
    graph, lse = capture(step, target, mask)
    for _ in range(4):
        step.draw(source)
        ends.copy_(torch.tensor([total * 2 // 3 for total in step.totals]))
        graph.replay()
        compare(step, lse, target, mask, torch.ones(sum(step.new), dtype=torch.bool))


@pytest.mark.parametrize("target", TARGETS)
def test_a_replay_that_overflows_says_so(target: str, seed: int) -> None:
    source, step, mask = random.Random(seed), make_step(target), masks.NullMask()
    step.set([0] * 8, [1] * 8)
    graph, lse = capture(step, target, mask, chunks=3)
    seen = set()
    for number in range(400):
        if number >= 20 and len(seen) == 2:
            break
        step.draw(source)
        step.output.fill_(3.0)
        graph.replay()
        cut = torch.tensor(step.cut(SIZE, 3), dtype=torch.bool)
        assert bool((step.output[sum(step.new) :] == 3.0).all()), "rows of no sequence stay"
        assert bool(step.output[: len(cut)][cut].isnan().all()) and bool(lse[: len(cut)][cut].isnan().all())
        compare(step, lse, target, mask, ~cut)
        seen |= set(cut.tolist())
    assert seen == {False, True}


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_synchronises(target: str, seed: int) -> None:
    step = make_step(target)
    step.draw(random.Random(seed))
    offsets = step.offsets.cpu()
    for _ in range(2):  # the second time everything is compiled and remembered
        plan = prefill_plan(step.offsets, step.cache, 0, SIZE, max_chunks=CHUNKS, target=target)
        with no_sync():
            step.run(masks.CausalMask(), target, SIZE, max_chunks=CHUNKS)
            step.run(masks.CausalMask(), target, SIZE, plan=plan)
            step.run(masks.CausalMask(), target, SIZE, seq_lens_cpu=step.totals)
            latent, rope = torch.zeros(200, 512, **_like(step)), torch.zeros(200, 64, **_like(step))
            step.cache.store(0, step.offsets, latent, rope, target=target)
    with no_sync(), pytest.raises(RuntimeError, match="synchroniz"):
        step.run(masks.CausalMask(), target, SIZE)
    host = prefill_plan(offsets, step.cache, 0, SIZE, seq_lens_cpu=step.totals, target=target)
    with no_sync():
        step.run(masks.CausalMask(), target, SIZE, plan=host)


def _like(step: Step) -> dict[str, Any]:
    return {"dtype": step.q.dtype, "device": step.q.device}


def test_what_cannot_be_captured_raises() -> None:
    step = make_step("gpu")
    step.set([0] * 8, [1] * 8)
    wide = PagedKVCacheCollection.from_pages(step.pages, step.table, step.lengths.long())
    host = prefill_plan(step.offsets, step.cache, 0, SIZE, seq_lens_cpu=step.totals)
    captured = masks.CausalPaddingMask(torch.zeros(8, dtype=torch.int64, device="cuda"))
    causal, offsets = masks.CausalMask(), step.offsets
    for cache, rows, mask, more, error in (
        (step.cache, offsets, causal, {}, ArgumentError),
        (step.cache, offsets, causal, {"seq_lens_cpu": step.totals}, ArgumentError),
        (step.cache, offsets, causal, {"plan": host}, ArgumentError),
        (step.cache, offsets.cpu(), causal, {"max_chunks": 4}, DeviceError),
        (wide, offsets, causal, {"max_chunks": 4}, DeviceError),
        (step.cache, offsets, captured, {"max_chunks": 4}, DeviceError),
    ):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(error):
            mla.chunked_prefill(step.q, cache, 0, step.weight, rows, mask, 0.1, buffer_token_size=SIZE, **more)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_whole(target: str, mode: str, seed: int) -> None:
    """torch.compile with fullgraph, alone and with its own graphs, over changing lengths."""
    source, step, mask = random.Random(seed), make_step(target), masks.CausalMask()

    def run(q: Any, cache: Any, offsets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return mla.chunked_prefill(
            q * 1.0, cache, 0, step.weight, offsets, mask, 192**-0.5, buffer_token_size=SIZE, max_chunks=CHUNKS,
            return_lse=True, target=target,
        )  # fmt: skip

    torch._dynamo.reset()
    with torch.no_grad():
        traced = torch.compile(run, fullgraph=True, mode=mode)
        for _ in range(6):
            step.draw(source)
            output, lse = traced(step.q, step.cache, step.offsets)
            step.output.copy_(output)
            compare(step, lse.clone(), target, mask, torch.ones(sum(step.new), dtype=torch.bool))
