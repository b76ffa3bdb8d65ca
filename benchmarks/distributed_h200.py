"""Prefill on several GPUs of one host: equality with one GPU, then times, overlap and scaling efficiency.

    NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 2 benchmarks/distributed_h200.py --json result.json

Every rank also holds the whole problem and computes the answer of one GPU itself. Times are medians over runs of the
slowest rank's time, by events, with the host ahead of the GPU; "idle" is with a GPU that waits for the host, "host"
what the host takes to make the call. "work" is the context-parallel call with its transfers left out (each rank then
takes its own queries for the others'), "transfers" is the call with its attention left out, "hidden" the share of the
shorter of the two that does not show in the whole. Without a GPU the same script runs small on gloo and checks itself;
its times then mean nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast is not needed here, and not every host allows it

import torch
import torch.distributed as dist
from environment import environment

import mla
from mla.cli.batches import Batch, make_batch
from mla.cli.steps import BENCH_STEPS, Step, find_steps
from mla.distributed import (
    ContiguousKeys,
    InterleavedKeys,
    KeyShard,
    context_parallel,
    context_parallel_prefill,
    exchange,
    head_parallel_prefill,
)
from mla.tolerance import lse_error, output_error

PAGE_SIZE, BUFFER_ROWS, SCALE = 64, 16384, 192**-0.5
STAGE_SECONDS = 60
#: (cached, new): a context of 128k, sequences shorter than a page, one without anything cached, one of a single token.
RAGGED = ((130560, 512), (1000, 777), (0, 2048), (3, 1), (40000, 1024), (0, 40))
MASKS: dict[str, mla.Mask] = {
    "causal": mla.CausalMask(),
    "sliding": mla.SlidingWindowCausalMask(4096),
    "sink window": mla.Mask.from_function(lambda b, h, q, k: (k <= q) & ((q - k < 4096) | (k < 64))),
}


@dataclass(frozen=True)
class Place:
    """This process among the others."""

    rank: int
    world: int
    device: torch.device
    target: str

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def worst(self, value: float) -> float:
        """Return the largest value of all ranks."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()


class Problem:
    """One step with all its heads and keys, and this rank's share of them."""

    def __init__(self, step: Step, shard: str, place: Place) -> None:
        device, target = place.device, place.target
        self.step, self.place = step, place
        self.batch = make_batch(step.cached, step.new, PAGE_SIZE, device=device, target=target, seed=0)
        random = torch.Generator(device).manual_seed(1)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, device=device, generator=random)

        self.q = normal(sum(step.new), step.heads, 192).bfloat16()
        self.weight = (normal(step.heads * 256, 512) / 512**0.5).bfloat16()
        self.sinks = normal(step.heads)
        self.offsets = self.batch.input_row_offsets
        self.plan = mla.prefill_plan(
            self.offsets.cpu(), self.batch.collection, 0, BUFFER_ROWS, seq_lens_cpu=step.lengths, target=target
        )
        totals = torch.tensor(step.lengths, device=device)
        self.keys: KeyShard = (
            InterleavedKeys(PAGE_SIZE, place.rank, place.world)
            if shard == "interleaved"
            else ContiguousKeys.even(totals, PAGE_SIZE, place.rank, place.world)
        )
        self.own = own_cache(self.batch, self.keys, device)
        own_lengths = self.keys.lengths(totals).tolist()
        self.own_plan = mla.prefill_plan(
            self.offsets.cpu(), self.own, 0, BUFFER_ROWS, seq_lens_cpu=own_lengths, target=target
        )
        self.starts = torch.tensor(step.cached, dtype=torch.int32, device=device)

    def heads_of(self, rank: int) -> slice:
        count = self.step.heads // self.place.world
        return slice(rank * count, (rank + 1) * count)

    def one_device(self, mask: mla.Mask, heads: slice = slice(None), sinks: bool = False) -> Any:
        """Return output and LSE of this device alone, which has all keys."""
        return mla.chunked_prefill(
            self.q[:, heads], self.batch.collection, 0, self.weight_of(heads), self.offsets, mask, SCALE,
            plan=self.plan, return_lse=True, sinks=self.sinks[heads] if sinks else None, target=self.place.target,
        )  # fmt: skip

    def head_parallel(self, mask: mla.Mask) -> Any:
        heads = self.heads_of(self.place.rank)
        return head_parallel_prefill(
            self.q[:, heads], self.batch.collection, 0, self.weight_of(heads), self.offsets, mask, SCALE,
            plan=self.plan, return_lse=True, target=self.place.target,
        )  # fmt: skip

    def context_parallel(self, mask: mla.Mask, sinks: bool = False) -> Any:
        heads = self.heads_of(self.place.rank)
        return context_parallel_prefill(
            self.q[:, heads], self.own, 0, self.weight_of(heads), self.offsets, mask, SCALE, keys=self.keys,
            start_positions=self.starts, plan=self.own_plan, return_lse=True,
            sinks=self.sinks[heads] if sinks else None, target=self.place.target,
        )  # fmt: skip

    def weight_of(self, heads: slice) -> torch.Tensor:
        return self.weight.view(self.step.heads, -1)[heads].reshape(-1, 512)


def own_cache(batch: Batch, keys: KeyShard, device: torch.device) -> mla.PagedKVCacheCollection:
    """Put a rank's share of a batch into pages of its own, in random order, NaN in the slots of no token."""
    shares = [
        rows[keys.own(b, torch.arange(len(rows))).nonzero().squeeze(1).to(device)] for b, rows in enumerate(batch.rows)
    ]
    pages = [-(-len(share) // PAGE_SIZE) for share in shares]
    pool = torch.full((sum(pages) + 1, PAGE_SIZE, 576), torch.nan, dtype=torch.bfloat16, device=device)
    table = torch.full((len(pages), max(pages)), -1, dtype=torch.int32, device=device)
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(2)).to(device).split(pages)
    for row, ids, share in zip(table, order, shares, strict=True):
        row[: len(ids)] = ids
        position = torch.arange(len(share), device=device)
        pool[ids[position // PAGE_SIZE], position % PAGE_SIZE] = share
    lengths = torch.tensor([len(share) for share in shares], dtype=torch.int32, device=device)
    return mla.PagedKVCacheCollection.from_pages(pool, table, seq_lens=lengths)


def check(problem: Problem, name: str, shard: str, sinks: bool) -> dict[str, Any]:
    """Compare the context-parallel answer with that of one device; errors also as shares of the bound of one answer."""
    mask, heads = MASKS[name], problem.heads_of(problem.place.rank)
    expected, expected_lse = problem.one_device(mask, sinks=sinks)
    output, lse = problem.context_parallel(mask, sinks)
    again, again_lse = problem.context_parallel(mask, sinks)
    place = problem.place
    return {
        "heads": problem.step.heads, "mask": name, "shard": shard, "sinks": sinks,
        "output_share_of_bound": place.worst(output_error(output, expected[:, heads], "bf16")),
        "lse_share_of_bound": place.worst(lse_error(lse, expected_lse[:, heads], "bf16")),
        "lse_difference": place.worst((lse - expected_lse[:, heads]).abs().max().item()),
        "repeats_bitwise": place.worst(float(not (torch.equal(output, again) and torch.equal(lse, again_lse)))) == 0,
    }  # fmt: skip


def check_heads(problem: Problem, name: str) -> dict[str, Any]:
    """Compare the head-parallel answers of all ranks, bitwise, with what this rank computes for their heads."""
    place, mask = problem.place, MASKS[name]
    whole, whole_lse = problem.one_device(mask)
    output, lse = (x.contiguous() for x in problem.head_parallel(mask))
    same = same_as_whole = True
    for rank in range(place.world):
        heads = problem.heads_of(rank)
        theirs, their_lse = (x.clone() if rank == place.rank else torch.empty_like(x) for x in (output, lse))
        dist.broadcast(theirs, rank)
        dist.broadcast(their_lse, rank)
        mine, my_lse = problem.one_device(mask, heads)
        same &= torch.equal(theirs, mine) and torch.equal(their_lse, my_lse)
        same_as_whole &= torch.equal(theirs, whole[:, heads]) and torch.equal(their_lse, whole_lse[:, heads])
    return {
        "heads": problem.step.heads, "mask": name,
        "bitwise_same_heads": place.worst(float(not same)) == 0,
        "bitwise_all_heads_in_one_call": place.worst(float(not same_as_whole)) == 0,
    }  # fmt: skip


#: Cycles for which a GPU is kept busy so that the host is ahead of it: 4 ms at 2 GHz.
AHEAD_CYCLES = 8_000_000


def measure(call: Callable[[], Any], place: Place, runs: int, ahead: bool = True) -> float:
    """Return milliseconds: the median over runs of the slowest rank, after one run that does not count.

    With `ahead` the GPU is busy while the host makes the call, as it is in a model whose layers follow each other;
    otherwise it waits for the host.
    """
    call()
    times = []
    for _ in range(runs):
        gate = torch.zeros(1, device=place.device)
        dist.all_reduce(gate)  # on a GPU the stream waits for the other rank's, the host does not
        if place.device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if ahead:
                torch.cuda._sleep(AHEAD_CYCLES)
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e3)
    return _median_of_slowest(times, place)


def measure_host(call: Callable[[], Any], place: Place, runs: int) -> float:
    """Return the milliseconds that the host takes to make a call, the GPU being busy: as `measure`."""
    times = []
    for _ in range(runs):
        dist.barrier()
        if place.device.type == "cuda":
            torch.cuda._sleep(AHEAD_CYCLES)
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return _median_of_slowest(times, place)


def _median_of_slowest(times: list[float], place: Place) -> float:
    gathered = torch.tensor(times, dtype=torch.float64, device=place.device)
    dist.all_reduce(gathered, dist.ReduceOp.MAX)
    return statistics.median(gathered.tolist())


@contextmanager
def without_transfers() -> Iterator[None]:
    """Let every exchange return at once what it was given, as if it had come from another rank."""

    def at_once(tensors: Any, shift: int, group: Any) -> exchange.Arrival:
        return exchange.Arrival([], [tensor.contiguous() for tensor in tensors], [])

    with mock.patch.object(context_parallel, "exchange", at_once):
        yield


@contextmanager
def without_attention() -> Iterator[None]:
    """Let nothing be attended to."""

    def nothing(*arguments: Any) -> None:
        pass

    with mock.patch.object(context_parallel._Job, "attend", nothing):
        yield


def time_step(step: Step, place: Place, runs: int) -> dict[str, Any]:
    """Time one step on one device and on all of them, by heads and by keys."""
    problem, mask = Problem(step, "interleaved", place), MASKS["causal"]
    one = measure(lambda: problem.one_device(mask), place, runs)
    heads = measure(lambda: problem.head_parallel(mask), place, runs)
    keys = measure(lambda: problem.context_parallel(mask), place, runs)
    with without_transfers():
        work = measure(lambda: problem.context_parallel(mask), place, runs)
    with without_attention():
        transfers = measure(lambda: problem.context_parallel(mask), place, runs)
    calls = {"one": problem.one_device, "heads": problem.head_parallel, "keys": problem.context_parallel}
    more = {}
    for name, call in calls.items():
        more[f"{name}_idle_ms"] = measure(functools.partial(call, mask), place, runs, ahead=False)
        more[f"{name}_host_ms"] = measure_host(functools.partial(call, mask), place, runs)
    return {
        "step": step.name, "heads": step.heads, "cached": step.cached, "new": step.new,
        "one_ms": one, "heads_ms": heads, "keys_ms": keys, "work_ms": work, "transfers_ms": transfers,
        "hidden": (work + transfers - keys) / min(work, transfers),
        "heads_efficiency": one / heads / place.world, "keys_efficiency": one / keys / place.world,
        "one_tflops": step.flops / one / 1e9, **more,
    }  # fmt: skip


def time_link(place: Place, runs: int) -> list[dict[str, float]]:
    """Time exchanges in which every rank sends to the next and receives from the one before."""
    found = []
    for mebibytes in (1, 4, 16, 64, 256) if place.device.type == "cuda" else (1,):
        tensor = torch.empty(mebibytes << 18, dtype=torch.float32, device=place.device)
        call = functools.partial(_send, tensor)
        ms, idle = (measure(call, place, runs, ahead) for ahead in (True, False))
        found.append(
            {
                "mebibytes": mebibytes, "ms": ms, "gbytes_a_second_each_way": tensor.nbytes / ms / 1e6, "idle_ms": idle,
                "host_ms": measure_host(call, place, runs),
            }
        )  # fmt: skip
    return found


def _send(tensor: torch.Tensor) -> None:
    exchange.exchange([tensor], 1, dist.group.WORLD).wait()


class Report:
    """What was found so far, written after each stage; no stage starts late, and none lasts."""

    def __init__(self, place: Place, path: Path | None, seconds: float) -> None:
        self.place, self.path, self.seconds, self.begin = place, path, seconds, time.monotonic()
        self.found: dict[str, Any] = {"left_out": []}

    def add(self, kind: str, name: str, make: Callable[[], Any]) -> None:
        """Run a stage, unless the ranks are out of time; a stage that hangs ends the process with its stacks."""
        elapsed = self.place.worst(time.monotonic() - self.begin)
        if elapsed > self.seconds:
            self.found["left_out"].append(name)
            return
        faulthandler.dump_traceback_later(STAGE_SECONDS, exit=True)
        value = make()
        faulthandler.cancel_dump_traceback_later()
        self.found.setdefault(kind, []).append(value)
        self.found["seconds"] = time.monotonic() - self.begin
        if self.place.rank == 0 and self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        if kind != "times":
            self.place.say(f"{self.found['seconds']:6.1f} s  {name}: {json.dumps(value)}")


def describe(place: Place) -> dict[str, Any]:
    """Name what the numbers depend on."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if place.device.type == "cuda" else None
    ranks = {"ranks": place.world, "nccl": nccl, "NCCL_NVLS_ENABLE": os.environ["NCCL_NVLS_ENABLE"]}
    return environment(place.device) | ranks


def ragged(heads: int, shrink: int) -> Step:
    """Return the batch that answers are compared on."""
    return Step("ragged", tuple(c // shrink for c, _ in RAGGED), tuple(-(-n // shrink) for _, n in RAGGED), heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--seconds", type=float, default=70, help="no stage starts later than this")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    place = Place(rank, world, device, "gpu" if gpu else "cpu")
    faulthandler.dump_traceback_later(STAGE_SECONDS, exit=True)
    if gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timedelta(seconds=STAGE_SECONDS), device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=STAGE_SECONDS))
    shrink = 1 if gpu else 256
    report = Report(place, args.json, args.seconds)
    report.add("environment", "environment", lambda: describe(place))
    report.add("link", "link", lambda: time_link(place, args.runs))
    head_counts = (16, 128) if gpu else (2 * world,)

    def add_check(heads: int, name: str, shard: str, sinks: bool) -> None:
        step = ragged(heads, shrink)
        report.add(
            "keys", f"keys, H {heads}, {name}, {shard}", lambda: check(Problem(step, shard, place), name, shard, sinks)
        )

    for heads in head_counts:
        add_check(heads, "causal", "contiguous", True)
    add_check(head_counts[0], "sliding", "interleaved", False)
    add_check(head_counts[0], "sink window", "contiguous", False)
    for heads in head_counts:
        add_check(heads, "causal", "interleaved", False)
        step = ragged(heads, shrink)
        report.add(
            "heads", f"heads, H {heads}, causal",
            lambda step=step: check_heads(Problem(step, "interleaved", place), "causal"),
        )  # fmt: skip
    for heads in head_counts:
        steps = [
            Step(s.name, tuple(c // shrink for c in s.cached), tuple(-(-n // shrink) for n in s.new), heads)
            for s in [*find_steps(None, BENCH_STEPS, heads), Step("128k", (122880,), (8192,), heads)]
        ]
        for step in steps:
            report.add("times", f"step {step.name}, H {heads}", lambda step=step: time_step(step, place, args.runs))
    show(report)
    faulthandler.dump_traceback_later(STAGE_SECONDS, exit=True)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def show(report: Report) -> None:
    """Print the times as a table, and their sums."""
    say, times = report.place.say, report.found.get("times", [])
    columns = (
        "one_ms", "heads_ms", "keys_ms", "work_ms", "transfers_ms", "one_idle_ms", "keys_idle_ms",
        "one_host_ms", "keys_host_ms",
    )  # fmt: skip
    say(
        f"{'step':>6}{'H':>5}"
        + "".join(f"{c.removesuffix('_ms'):>10}" for c in columns)
        + "   hidden  eff heads  eff keys"
    )
    for heads in sorted({row["heads"] for row in times}):
        rows = [row for row in times if row["heads"] == heads]
        if len(rows) > 1:
            total = {c: sum(row[c] for row in rows) for c in columns}
            least = min(total["work_ms"], total["transfers_ms"])
            total |= {
                "step": "sum", "heads": heads,
                "hidden": (total["work_ms"] + total["transfers_ms"] - total["keys_ms"]) / least,
                "heads_efficiency": total["one_ms"] / total["heads_ms"] / report.place.world,
                "keys_efficiency": total["one_ms"] / total["keys_ms"] / report.place.world,
            }  # fmt: skip
            rows.append(total)
        for row in rows:
            say(
                f"{row['step']:>6}{heads:>5}" + "".join(f"{row[c]:>10.3f}" for c in columns)
                + f"{row['hidden']:>9.0%}{row['heads_efficiency']:>11.2f}{row['keys_efficiency']:>10.2f}"
            )  # fmt: skip
    say(f"left out: {report.found['left_out'] or 'nothing'}; {report.found['seconds']:.0f} s in all")


if __name__ == "__main__":
    main()
