"""Triton prefill on the six shapes of mla/data/shapes.yaml, beside FlashAttention-4's own kernel in the same run.

    python benchmarks/prefill_triton.py --json result.json [--shapes 8k,ragged] [--peers fa4]

``warps`` is the warp-specialised kernel of sm_90, ``tiles`` the one that runs everywhere. Inputs, clock, peers and the
order of rounds are those of prefill_h200.py: FlashAttention-4 gets its 192-wide K ready-made (``fa4``) or has to make
it (``fa4+concat``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from environment import environment
from prefill_h200 import SHAPES, Inputs, check, fa4, milliseconds

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--peers", default="", help="fa4, or nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.35, help="of measuring in a round")
    args = parser.parse_args()
    results: dict[str, dict[str, dict[str, object]]] = {}
    for shape in (shape for shape in SHAPES if shape.name in args.shapes.split(",")):
        inputs = Inputs(shape, 0)
        calls = {"warps": triton(inputs, PrefillHopper), "tiles": triton(inputs, Prefill)}
        if args.peers == "fa4":
            calls |= {"fa4": fa4(inputs, concat=False), "fa4+concat": fa4(inputs, concat=True)}
        errors = {name: check(inputs, call) for name, call in calls.items()}
        rounds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.rounds):
            for name, call in calls.items():
                rounds[name].append(statistics.median(milliseconds(call, args.seconds)))
        medians = {name: statistics.median(times) for name, times in rounds.items()}
        results[shape.name] = {}
        for name, ms in medians.items():
            tflops, spread = shape.flops / ms / 1e9, (max(rounds[name]) - min(rounds[name])) / ms
            found = {"ms": ms, "rounds": rounds[name], "tflops": tflops, "error": errors[name]}
            row = f"{shape.name:8}{name:12}{ms:9.4f} ms {tflops:6.0f} TFLOP/s  rounds {spread:5.1%}"
            if "fa4" in medians:
                found["of_fa4"] = medians["fa4"] / ms
                row += f"  {medians['fa4'] / ms:5.2f} of fa4"
            results[shape.name][name] = found
            print(f"{row}  error {errors[name]:.1e}")
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
