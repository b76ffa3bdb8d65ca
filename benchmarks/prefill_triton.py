"""Triton prefill on the six shapes of docs/perf-log.md, beside FlashAttention-4's own kernel in the same run.

    python benchmarks/prefill_triton.py [--json FILE] [--shapes 8k,ragged] [--peers fa4]

``warps`` is the warp-specialised kernel of sm_90, ``tiles`` the one that runs everywhere. Inputs, clock and peers are
those of prefill_h200.py; FlashAttention-4 gets its 192-wide K ready-made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from prefill_h200 import SHAPES, Inputs, environment, fa4, measure

from mla.backends.triton.ops import Prefill, PrefillHopper
from mla.problem import PrefillArgs, Problem


def triton(inputs: Inputs, entry: type[Prefill]) -> Callable[[], torch.Tensor]:
    """Return a call of one entry, without the public function before it."""
    problem = Problem(
        "prefill", "bf16", "bf16", page_size=inputs.cache.page_size, rope="paged", mask=inputs.mask.program,
        features=frozenset({"lse", "batch_invariant"}),
    )  # fmt: skip
    run = entry.prepare(problem, torch.device("cuda", 0))
    args = PrefillArgs(
        output=inputs.output, q=inputs.q, q_rope=None, k=inputs.k, v=inputs.v, rope_kind="paged", cache=inputs.cache,
        rope=None, rope_scales=None, rope_scale_base=0, cu_seqlens_q=inputs.offsets_q, cu_seqlens_k=inputs.offsets_k,
        cache_offsets=None, start_positions=None, kv_lengths=None, softmax_scale=inputs.scale, mask=inputs.mask,
        max_seqlen_q=inputs.longest[0], q_scale=None, k_scales=None, v_scale=None, rope_prescaled=False, lse=inputs.lse,
        sinks=None, softcap=0.0, workspace=None, batch_invariant=True,
    )  # fmt: skip

    def call() -> torch.Tensor:
        run(args)
        return inputs.output

    return call


def matmul(size: int = 8192) -> float:
    """Return the TFLOP/s of a bf16 matrix product of torch's, median of 20."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return 2 * size**3 / sorted(start.elapsed_time(end) for start, end in times[3:])[10] / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--peers", default="", help="fa4, or nothing")
    args = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    print(f"bf16 matmul of 8192: {matmul():.0f} TFLOP/s")
    for shape in (shape for shape in SHAPES if shape.name in args.shapes.split(",")):
        inputs = Inputs(shape, 0)
        calls = {"warps": triton(inputs, PrefillHopper), "tiles": triton(inputs, Prefill)}
        if args.peers == "fa4":
            calls["fa4"] = fa4(inputs, concat=False)
        calls["warps again"] = triton(inputs, PrefillHopper)
        results[shape.name] = {}
        for name, call in calls.items():
            found = results[shape.name][name] = measure(inputs, call)
            rate = f"{found['ms']:9.4f} ms {found['tflops']:6.0f} TFLOP/s"
            print(f"{shape.name:8}{name:12}{rate}  error {found['error']:.1e}")
            sys.stdout.flush()
    print(f"bf16 matmul of 8192: {matmul():.0f} TFLOP/s")
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
