"""Time of a call, and of the matmul and the copy that it is compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 1 << 28  # more than any L2 cache holds
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one call: the median of ``runs``, and their 20th and 80th percentile."""

    median: float
    low: float
    high: float
    runs: int


def measure(call: Callable[[], object], device: torch.device, budget_s: float = 1.0, least: int = 3) -> Timing:
    """Time a call, after two that do not count; as often as the budget allows, from `least` to 100 times.

    On a GPU by events, with the L2 cache flushed before each call; synchronises.
    """
    clock = _events if device.type == "cuda" else _wall
    call()
    first = clock(call, device, 1)[0]
    return summarise(clock(call, device, max(least, min(100, int(budget_s * 1e3 / max(first, 1e-3))))))


def summarise(times: list[float]) -> Timing:
    """Return the median and the percentiles of some milliseconds."""
    low, high = (times[0],) * 2 if len(times) == 1 else statistics.quantiles(times, n=5, method="inclusive")[::3]
    return Timing(statistics.median(times), low, high, len(times))


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of a square matmul of torch's: 8192 wide on a GPU, 2048 on the CPU."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / measure(lambda: a @ b, device).median / 1e9


def copy_gbytes(device: torch.device) -> float:
    """Return the rate of a copy, bytes read and bytes written together."""
    source = torch.empty((1024 if device.type == "cuda" else 128) * _MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / measure(lambda: target.copy_(source), device).median / 1e6


def _wall(call: Callable[[], object], device: torch.device, runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _events(call: Callable[[], object], device: torch.device, runs: int) -> list[float]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for start, stop in pairs:
        flush.zero_()
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(stop) for start, stop in pairs]
