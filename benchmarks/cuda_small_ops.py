"""Time plan, gather, store and merge of the CUDA backend, and the host cost of a call.

    python benchmarks/cuda_small_ops.py [--json FILE]

GPU times are medians of events around one call, L2 flushed before each; ``kernel`` is the duration of the kernel alone,
by the profiler. Bandwidth counts bytes read and written once, beside a device copy of as many bytes in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import environment
from host_clock import microseconds

from mla.backends.cuda import runtime
from mla.gather import gather_latent
from mla.kv_cache import PagedKVCacheCollection
from mla.merge import merge_attn_states
from mla.plan import generic_flare_mla_prefill_ragged_paged_plan
from mla.store import store

DEVICE = torch.device("cuda", 0)
REPEATS = 30


def gpu_microseconds(run: Callable[[], object], flush: torch.Tensor) -> dict[str, float]:
    """Return median and spread of one call by events, and the median duration of its kernel."""
    for _ in range(3):
        run()
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPEATS):
            flush.zero_()
            run()
        torch.cuda.synchronize()
    kernels = [event.device_time for event in profile.events() if event.name.startswith("mla_")]
    quartiles = statistics.quantiles(times, n=4)
    return {
        "events_us": statistics.median(times),
        "spread_us": quartiles[2] - quartiles[0],
        "kernel_us": statistics.median(kernels) if kernels else float("nan"),
    }


def plan_call(batch: int, chunks: int, size: int) -> Callable[[], object]:
    pages = torch.empty(1, 64, 576, dtype=torch.bfloat16, device=DEVICE)
    table = torch.zeros(batch, 1, dtype=torch.int32, device=DEVICE)
    cached = torch.randint(0, 4096, (batch,), dtype=torch.int32, device=DEVICE)
    new = torch.randint(0, 64, (batch,), device=DEVICE)
    offsets = torch.cat([torch.zeros(1, device=DEVICE), new.cumsum(0)]).to(torch.int32)
    cache = PagedKVCacheCollection.from_pages(pages, table, cached)
    shapes = ((chunks, batch + 1), (chunks, batch), (chunks,), (1,))
    rows, held, lengths, required = (torch.empty(shape, dtype=torch.int32, device=DEVICE) for shape in shapes)
    return lambda: generic_flare_mla_prefill_ragged_paged_plan(
        offsets, cache, 0, size, rows, held, lengths, required_chunks=required, target="cuda"
    )


def paged(rows: int, page_size: int, dtype: torch.dtype, granularity: int | None = None) -> PagedKVCacheCollection:
    """Return a cache of sequences of 1,024 tokens that are new in this step, in scattered pages."""
    batch = rows // 1024
    count = rows // page_size
    options: dict[str, Any] = {}
    if granularity is not None:
        scales = torch.rand(count, page_size, -(-576 // granularity), device=DEVICE)
        options = {"scales": scales, "quantization_granularity": granularity}
    pages = torch.randn(count, page_size, 576, device=DEVICE).to(dtype)
    table = torch.randperm(count, device=DEVICE).to(torch.int32).view(batch, 1024 // page_size)
    lengths = torch.full((batch,), 0, dtype=torch.int32, device=DEVICE)
    return PagedKVCacheCollection.from_pages(pages, table, lengths, **options)


def steps(rows: int) -> torch.Tensor:
    return torch.arange(0, rows + 1, 1024, dtype=torch.int32, device=DEVICE)


def gather_call(rows: int, page_size: int, granularity: int | None) -> tuple[Callable[[], object], int]:
    dtype = torch.bfloat16 if granularity is None else torch.float8_e4m3fn
    cache = paged(rows, page_size, dtype, granularity)
    offsets, held = steps(rows), torch.zeros(rows // 1024, dtype=torch.int32, device=DEVICE)
    output = torch.empty(rows, 512, dtype=torch.bfloat16, device=DEVICE)
    read = 1024 if granularity is None else 512 + 4 * -(-512 // granularity)
    return lambda: gather_latent(offsets, held, rows, cache, 0, output, target="cuda"), rows * (read + 1024)


def store_call(rows: int, page_size: int, granularity: int | None) -> tuple[Callable[[], object], int]:
    dtype = torch.bfloat16 if granularity is None else torch.float8_e4m3fn
    cache = paged(rows, page_size, dtype, granularity)
    latent, rope = (torch.randn(rows, width, device=DEVICE).bfloat16() for width in (512, 64))
    offsets = steps(rows)
    written = 1152 if granularity is None else 576 + 4 * -(-576 // granularity)
    return lambda: store(cache, 0, offsets, latent, rope, target="cuda"), rows * (1152 + written)


def merge_call(tokens: int, heads: int, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    parts = [torch.randn(tokens, heads, 128, device=DEVICE).to(dtype) for _ in range(2)]
    lse = [torch.randn(tokens, heads, device=DEVICE) for _ in range(3)]
    output = torch.empty(tokens, heads, 128, dtype=dtype, device=DEVICE)
    run = lambda: merge_attn_states(output, parts[0], lse[0], parts[1], lse[1], lse[2], target="cuda")  # noqa: E731
    return run, tokens * heads * (3 * 128 * dtype.itemsize + 12)


def copy_call(total: int) -> Callable[[], object]:
    source = torch.randn(total // 8, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    results: dict[str, Any] = {"environment": environment(), "versions": runtime.probe().versions, "rows": []}

    def add(name: str, run: Callable[[], object], moved: int | None = None) -> None:
        row: dict[str, Any] = {"name": name, **gpu_microseconds(run, flush)}
        text = f"{name:34s} events {row['events_us']:8.2f} us  kernel {row['kernel_us']:8.2f} us"
        if moved is not None:
            copy = gpu_microseconds(copy_call(moved), flush)["events_us"]
            row.update(bytes=moved, tb_s=moved / row["events_us"] / 1e6, copy_tb_s=moved / copy / 1e6)
            text += f"  {row['tb_s']:5.2f} TB/s, copy {row['copy_tb_s']:5.2f}: {100 * copy / row['events_us']:4.0f} %"
        results["rows"].append(row)
        print(text, flush=True)

    # Before the profiler is first used: once attached it slows every launch.
    results["host_us"] = {
        name: microseconds(run, 500, 5)
        for name, run in {
            "torch add of 16 elements": functools.partial(torch.zeros(16, device=DEVICE).add_, 1),
            "plan": plan_call(64, 16, 16384),
            "gather": gather_call(1024, 64, None)[0],
            "store": store_call(1024, 64, None)[0],
            "merge": merge_call(16, 16, torch.bfloat16)[0],
            "merge of no tokens, which launches nothing": merge_call(0, 16, torch.bfloat16)[0],
        }.items()
    }
    print("host us a call, launch included:", {name: round(us, 2) for name, us in results["host_us"].items()})
    add("nothing (sleep 0)", lambda: torch.cuda._sleep(0))
    for batch, chunks in ((1, 16), (64, 16), (1024, 16), (1024, 300), (65536, 16)):
        add(f"plan B {batch} C {chunks}", plan_call(batch, chunks, 16384))
    for rows in (16384, 262144):
        for page_size, granularity in ((64, None), (1, None), (64, 128), (64, 576)):
            kind = "bf16" if granularity is None else f"fp8 g{granularity}"
            add(f"gather {rows} P {page_size} {kind}", *gather_call(rows, page_size, granularity))
        for granularity in (None, 128):
            kind = "bf16" if granularity is None else f"fp8 g{granularity}"
            add(f"store {rows} P 64 {kind}", *store_call(rows, 64, granularity))
    for tokens, heads, dtype in (
        (8192, 16, torch.bfloat16), (8192, 128, torch.bfloat16), (8192, 128, torch.float32)
    ):  # fmt: skip
        add(f"merge {tokens} x {heads} {str(dtype)[6:]}", *merge_call(tokens, heads, dtype))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
