"""Prefill attention in fp8 beside bf16 on the six shapes of mla/data/shapes.yaml, in the same run.

    python benchmarks/prefill_fp8_h200.py --json result.json [--shapes 8k,ragged] [--target triton]

The inputs are those of prefill_h200.py; in fp8 they are rounded to e4m3 (rope: to bf16 where it stays bf16). Rows:

    bf16               q, k, v, rope in bf16, k and v views of one up-projection; ratios are to this row
    bf16 of e4m3       the same on the rounded values, whose empty mantissa bits draw less power: a higher clock
    fp8 V^T            q, k, v, rope in fp8 with scales of one, v as [H, dv, L]
    fp8 V^T, lse       the same with an LSE
    fp8                the same without LSE, v a view of the up-projection
    rope16 V^T         overload 5, rope in bf16, prescaled; a scale for each token of q and of k
    rope16             the same, v a view of the up-projection
    rope16 V^T, 1      one scale for all tokens

Medians of events with the L2 cache flushed between calls; all are checked first and then timed in turn, several rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import environment
from prefill_h200 import NOPE, ROPE, SHAPES, Inputs, milliseconds, ours

import mla
from mla.cli.steps import Step

FP8 = torch.float8_e4m3fn
BOUND = 3e-2
Call = Callable[[], torch.Tensor]


class Fp8Inputs:
    """The tensors of one shape: in bf16, in fp8, and in bf16 with the values of fp8 (`plain`)."""

    def __init__(self, shape: Step, seed: int, target: str = "cuda") -> None:
        self.target = target
        self.unrounded = Inputs(shape, seed)
        plain = Inputs(shape, seed)
        cache = plain.cache
        for tensor in (plain.q, plain.kv, cache.rope, plain.rope):
            for part in tensor.split(1 << 14):
                part.copy_(part.to(FP8))
        self.plain = plain
        self.q, kv = plain.q.to(FP8), plain.kv.to(FP8)
        self.k, self.v = kv[..., :NOPE], kv[..., NOPE:]
        pad = -len(self.v) % 16
        columns = torch.nn.functional.pad(self.v.view(torch.uint8), (0, 0, 0, 0, 0, pad)).permute(1, 2, 0).contiguous()
        self.v_columns = columns.view(FP8).permute(2, 0, 1)[: len(self.v)]
        pages = torch.zeros(*cache.rope.shape[:2], 512 + ROPE, device="cuda", dtype=FP8)
        pages[..., 512:] = cache.rope.to(FP8)
        self.cache = mla.PagedKVCacheCollection.from_pages(
            pages, cache.page_table, cache.lengths,
            scales=torch.ones(*pages.shape[:2], 5, device="cuda"), quantization_granularity=128,
        ).layer(0)  # fmt: skip
        generator = torch.Generator(device="cuda").manual_seed(seed)
        sizes = len(self.q), len(self.k)
        self.scales = [torch.rand(size, 1, device="cuda", generator=generator) + 0.5 for size in sizes]

    def call(self, *, transposed: bool, lse: bool = False) -> Call:
        """Return a call with everything in fp8."""
        x = self.plain
        v = self.v_columns if transposed else self.v
        return lambda: mla.prefill(
            self.q, self.k, v, self.cache, x.mask, x.offsets_q, x.offsets_k, x.scale, q_scale=1.0, k_scales=1.0,
            v_scale=1.0, output=x.output, lse=x.lse if lse else None, target=self.target,
        )  # fmt: skip

    def call_rope16(self, *, transposed: bool, per_token: bool) -> Call:
        """Return a call with the rope in bf16."""
        x = self.plain
        q_scale, k_scales = self.scales if per_token else (1.0, 1.0)
        v = self.v_columns if transposed else self.v
        return lambda: mla.prefill(
            self.q[..., :NOPE], self.k, v, x.cache, x.mask, x.offsets_q, x.offsets_k, x.scale,
            q_rope=x.q[..., NOPE:], q_scale=q_scale, k_scales=k_scales, output=x.output, target=self.target,
        )  # fmt: skip

    def scaled(self) -> Inputs:
        """Return what the per-token scales make of the inputs."""
        result = copy.copy(self.plain)
        result.q = self.plain.q * self.scales[0][:, None]
        result.k = self.plain.k * self.scales[1][:, None]
        result.rope = self.plain.rope * self.scales[1]
        return result


def calls_of(inputs: Fp8Inputs) -> dict[str, tuple[Call, Inputs]]:
    """Return the rows of the table, each with what it computes on."""
    unrounded, plain, scaled = inputs.unrounded, inputs.plain, inputs.scaled()
    return {
        "bf16": (ours(unrounded, inputs.target), unrounded),
        "bf16 of e4m3": (ours(plain, inputs.target), plain),
        "fp8 V^T": (inputs.call(transposed=True), plain),
        "fp8 V^T, lse": (inputs.call(transposed=True, lse=True), plain),
        "fp8": (inputs.call(transposed=False), plain),
        "rope16 V^T": (inputs.call_rope16(transposed=True, per_token=True), scaled),
        "rope16": (inputs.call_rope16(transposed=False, per_token=True), scaled),
        "rope16 V^T, 1": (inputs.call_rope16(transposed=True, per_token=False), plain),
    }


def check(inputs: Inputs, call: Call) -> float:
    """Return the relative error of a call; NaN or one beyond the bound raises."""
    inputs.output.fill_(math.nan)
    call()
    error = inputs.error(inputs.output)
    if not error <= BOUND:
        raise ArithmeticError(f"relative error {error:.1e}")
    return error


def measure(shape: Step, seed: int, rounds: int, seconds: float, target: str = "cuda") -> dict[str, dict[str, Any]]:
    """Check and time every row of one shape."""
    inputs = Fp8Inputs(shape, seed, target)
    references = calls_of(inputs)
    errors = {name: check(operands, call) for name, (call, operands) in references.items()}
    calls = {name: call for name, (call, _) in references.items()}
    del references
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(statistics.median(milliseconds(call, seconds)))
    results = {}
    for name, all_rounds in times.items():
        ms = statistics.median(all_rounds)
        ratio = statistics.median(times["bf16"]) / ms
        results[name] = {
            "ms": ms, "rounds": all_rounds, "tflops": shape.flops / ms / 1e9, "ratio": ratio, "error": errors[name]
        }  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.35, help="of each row in a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=("cuda", "triton"), default="cuda")
    args = parser.parse_args()
    results = {}
    for shape in (shape for shape in SHAPES if shape.name in args.shapes.split(",")):
        results[shape.name] = measure(shape, args.seed, args.rounds, args.seconds, args.target)
        for name, row in results[shape.name].items():
            spread = (max(row["rounds"]) - min(row["rounds"])) / row["ms"]
            print(
                f"{shape.name:8}{name:16}{row['ms']:9.4f} ms {row['tflops']:6.0f} TFLOP/s {row['ratio']:5.2f} x bf16"
                f"  rounds {spread:5.1%}  error {row['error']:.1e}"
            )
        sys.stdout.flush()
        if args.json:
            args.json.write_text(json.dumps({"environment": environment(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
