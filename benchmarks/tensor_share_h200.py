"""What bounds the prefill: its share of the tensor cores' peak at the clock that the power limit leaves.

    python benchmarks/tensor_share_h200.py [--shapes 32k,ragged] [--peers fa4] [--seconds 3] [--json FILE]

Each kernel runs for some seconds without a pause while nvidia-smi is asked for clock and power. A multiprocessor of
Hopper does 4,096 operations of a 16-bit matrix product a cycle, so that share = TFLOP/s / (multiprocessors * 4,096 *
clock). Clocks are left as they are. A matrix product of 8,192 stands beside, for what this card sustains.

For the counters of one launch:

    ncu --clock-control none -k regex:mla_prefill -s 1 -c 1 --section SpeedOfLight --section ComputeWorkloadAnalysis \\
        --section SchedulerStats --section WarpStateStats python benchmarks/tensor_share_h200.py --launches 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from environment import environment
from prefill_h200 import SHAPES, Inputs, check, fa4, ours

FLOPS_A_CYCLE = 4096
_QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50"]


def matmul() -> tuple[Callable[[], object], float]:
    """Return the product of two matrices of 8,192 and its operations."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * 8192**3


def sustain(call: Callable[[], object], flops: float, seconds: float) -> dict[str, float]:
    """Run a kernel for some seconds and return its rate, with medians of clock and power over the second half."""
    device = str(torch.cuda.get_device_properties(0).uuid)
    ended: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    command = [*_QUERY, "-i", device if device.startswith("GPU-") else f"GPU-{device}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as monitor:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(20):
                call()
            end.record()
            ended.append((start, end))
            if len(ended) > 1:
                ended[-2][1].synchronize()  # one batch is always waiting behind
        torch.cuda.synchronize()
        monitor.terminate()
        lines = monitor.communicate()[0].splitlines()
    samples = [[float(value) for value in line.split(",")] for line in lines if line.count(",") == 1]
    clock, power = (statistics.median(column) for column in zip(*samples[len(samples) // 2 :], strict=True))
    milliseconds = [start.elapsed_time(end) / 20 for start, end in ended]
    rate = flops / statistics.median(milliseconds[len(milliseconds) // 2 :]) / 1e9
    peak = torch.cuda.get_device_properties(0).multi_processor_count * FLOPS_A_CYCLE * clock / 1e6
    return {"tflops": rate, "clock_mhz": clock, "power_w": power, "peak_tflops": peak, "share": rate / peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", default="32k,8k,ragged,chunk")
    parser.add_argument("--peers", choices=("fa4", "none"), default="none")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each kernel; the second half counts")
    parser.add_argument("--launches", type=int, help="launch the first shape so often and measure nothing")
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}

    def add(name: str, call: Callable[[], object], flops: float) -> None:
        results[name] = row = sustain(call, flops, args.seconds)
        print(
            f"{name:16}{row['tflops']:6.0f} TFLOP/s at {row['clock_mhz']:5.0f} MHz and {row['power_w']:4.0f} W: "
            f"{row['share']:.1%} of {row['peak_tflops']:.0f}",
            flush=True,
        )

    for shape in [next(one for one in SHAPES if one.name == name) for name in args.shapes.split(",")]:
        inputs = Inputs(shape, 0)
        if args.launches:
            for _ in range(args.launches):
                ours(inputs)()
            torch.cuda.synchronize()
            return
        calls = {"mla": ours(inputs)} | ({"fa4": fa4(inputs, concat=False)} if args.peers == "fa4" else {})
        for name, call in calls.items():
            check(inputs, call)
            add(f"{shape.name} {name}", call, shape.flops)
    add("matmul 8192", *matmul())
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
