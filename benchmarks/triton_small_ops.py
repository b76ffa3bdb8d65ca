"""Time plan, gather, store and merge of the Triton backend, and the host cost of a call.

    python benchmarks/triton_small_ops.py [--json FILE]

GPU times are the durations of the kernels by the profiler, medians; bandwidth counts bytes read and written once,
beside a device copy of as many bytes in the same run. Host times, launches in them, come first, because the profiler
slows the launches of its process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from environment import environment
from host_clock import microseconds
from torch.profiler import ProfilerActivity, profile

import mla
from mla.gather import gather_latent
from mla.kv_cache import PagedKVCacheCollection
from mla.plan import generic_flare_mla_prefill_ragged_paged_plan, prefill_plan
from mla.store import store

TARGET = "triton"
#: Name, call, bytes moved, and a copy of as many bytes.
Measured = tuple[str, Callable[[], object], int, "Callable[[], object] | None"]


def kernel_microseconds(run: Callable[[], object]) -> float:
    """Return the median duration of the longest kernel of a call."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(15):
            run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.device_time)
    return max(statistics.median(found) for found in times.values())


def host_microseconds(run: Callable[[], object]) -> float:
    """Return the host's time of one call."""
    run()  # compiles
    run()  # an implementation may remember what comes again
    return microseconds(run, 100, 5)


def plan(batch: int, chunks: int = 16) -> Measured:
    new = torch.randint(0, 9, (batch,))
    cached = torch.randint(0, 50, (batch,))
    offsets = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int().cuda()
    pages, table = torch.zeros(1, 16, 576, dtype=torch.bfloat16), torch.zeros(batch, 4, dtype=torch.int32)
    cache = PagedKVCacheCollection.from_pages(pages.cuda(), table.cuda(), cached.int().cuda())
    size = int(((cached + new + 15) // 16 * 16).sum()) // (chunks - 1) + 1
    made = prefill_plan(offsets, cache, 0, size, max_chunks=chunks, target=TARGET)

    def run() -> None:
        generic_flare_mla_prefill_ragged_paged_plan(
            offsets, cache, 0, size, made.buffer_row_offsets, made.cache_offsets, made.buffer_lengths,
            required_chunks=made.required_chunks, target=TARGET,
        )  # fmt: skip

    return f"plan B {batch}", run, 0, None


def paged(tokens: int, page_size: int, granularity: int, new: int) -> PagedKVCacheCollection:
    """Return a cache of one sequence, its last `new` tokens new in this step, in scattered pages."""
    pages = torch.randn(tokens // page_size, page_size, 576, device="cuda")
    table = torch.randperm(tokens // page_size).int().cuda()[None]
    lengths = torch.tensor([tokens - new]).int().cuda()
    if not granularity:
        return PagedKVCacheCollection.from_pages(pages.bfloat16(), table, lengths)
    scales = torch.rand(*pages.shape[:2], -(-576 // granularity), device="cuda")
    return PagedKVCacheCollection.from_pages(
        pages.to(torch.float8_e4m3fn), table, lengths, scales=scales, quantization_granularity=granularity
    )


def copy_of(moved: int) -> Callable[[], object]:
    """Return a copy that reads and writes as many bytes in all."""
    source = torch.empty(moved // 4, device="cuda", dtype=torch.int16)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def gather(page_size: int, granularity: int = 0, tokens: int = 262144) -> Measured:
    cache = paged(tokens, page_size, granularity, 8)
    made = prefill_plan(torch.tensor([0, 8]).int().cuda(), cache, 0, tokens, max_chunks=1, target=TARGET)
    buffer = torch.empty(tokens, 512, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        gather_latent(made.buffer_row_offsets[0], made.cache_offsets[0], tokens, cache, 0, buffer, target=TARGET)

    read = 512 + 4 * -(-512 // granularity) if granularity else 1024
    moved = tokens * (read + 1024)
    return f"gather P {page_size}{f' fp8 {granularity}' if granularity else ''}", run, moved, copy_of(moved)


def stored(page_size: int, granularity: int = 0, tokens: int = 65536) -> Measured:
    cache = paged(tokens, page_size, granularity, tokens)
    latent, rope = (torch.randn(tokens, width, device="cuda").bfloat16() for width in (512, 64))
    offsets = torch.tensor([0, tokens]).int().cuda()

    def run() -> None:
        store(cache, 0, offsets, latent, rope, target=TARGET)

    written = 576 + 4 * -(-576 // granularity) if granularity else 1152
    moved = tokens * (1152 + written)
    return f"store P {page_size}{f' fp8 {granularity}' if granularity else ''}", run, moved, copy_of(moved)


def merge(dtype: torch.dtype, tokens: int = 16384, heads: int = 64) -> Measured:
    prefix, suffix, output = (torch.randn(tokens, heads, 128, device="cuda", dtype=dtype) for _ in range(3))
    a, b, lse = (torch.randn(tokens, heads, device="cuda") for _ in range(3))

    def run() -> None:
        mla.merge_attn_states(output, prefix, a, suffix, b, lse, target=TARGET)

    moved = 3 * (output.nbytes + lse.nbytes)
    return f"merge {str(dtype)[6:]}", run, moved, copy_of(moved)


def prefill(batch: int) -> Measured:
    """Return a prefill of 24 rows in sequences of 1,024 tokens; of several sequences a kernel orders them before."""
    pages, table = torch.randn(16, 64, 576, device="cuda").bfloat16(), torch.arange(16).int().cuda().repeat(batch, 1)
    new, tokens = 24 // batch, 1024
    cache = PagedKVCacheCollection.from_pages(pages, table, torch.full((batch,), tokens - new).int().cuda())
    q = torch.randn(24, 16, 192, device="cuda").bfloat16()
    kv = torch.randn(tokens * batch, 16, 256, device="cuda").bfloat16()
    k, v, output = kv[..., :128], kv[..., 128:], torch.empty(24, 16, 128, device="cuda", dtype=torch.bfloat16)
    offsets, rows = torch.arange(0, 25, new).int().cuda(), torch.arange(0, tokens * batch + 1, tokens).int().cuda()
    layer, mask = cache.layer(0), mla.CausalMask()

    def run() -> None:
        mla.flare_mla_prefill(output, q, k, v, layer, mask, offsets, rows, 192**-0.5, target=TARGET)

    return f"prefill of 24 rows, B {batch}", run, 0, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    everything = [plan(batch) for batch in (1, 64, 1024, 65536)]
    everything += [gather(page_size) for page_size in (1, 16, 64)]
    everything += [gather(64, granularity) for granularity in (64, 128, 576)]
    everything += [stored(64), stored(64, 128)]
    everything += [merge(dtype) for dtype in (torch.bfloat16, torch.float32)]
    everything += [prefill(1), prefill(4)]
    results: dict[str, dict[str, float]] = {}
    for name, run, _, _ in everything:
        results[name] = {"host_us": host_microseconds(run)}
    for name, run, moved, copy in everything:
        found = results[name]
        ours = found["kernel_us"] = kernel_microseconds(run)
        line = f"{name:24} host {found['host_us']:5.1f} us, kernel {ours:6.1f} us"
        if copy is not None:
            theirs = kernel_microseconds(copy)
            found |= {"gbytes": moved / ours / 1e3, "of_copy": theirs / ours}
            line += f", {moved / ours / 1e3:5.0f} GB/s, copy {moved / theirs / 1e3:5.0f}, ratio {theirs / ours:.2f}"
        print(line, flush=True)
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
