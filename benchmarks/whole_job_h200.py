"""The whole job of a layer on ten real steps, beside the usual pipeline in the same run.

    python benchmarks/whole_job_h200.py --json result.json [--heads 16,128] [--peer fa4]

The job: from this step's queries and the latent cache in scattered pages of 64 tokens to the attention output.

    chunked   `mla.prefill_plan`, then one call of `mla.chunked_prefill` with a buffer that holds the step: it gathers,
              projects up and attends
    16k       the same with a buffer of 16,384 rows: bounded memory, parts merged
    fp8       as `chunked`, with q, k and v attended to in float8_e4m3fn; the rope stays bf16
    parts     the functions inside of `chunked_prefill` called one by one
    peer      cache rows by index, the up-projection by the same matmul, K 192 wide by concatenation, V a view, and
              FlashAttention-4's varlen kernel

All get their lengths from the host. Results are compared before anything is timed: the peer with a float64 answer of
some rows, ours with the peer's. Then the ten steps run one after the other, again and again, without a wait of the
host, as the layers of a model do, with the L2 cache flushed between steps and events between the parts. A plan is made
for each, though the layers of a step share one. The ways take turns of about a second, of which the second half counts:
the card's power limit is averaged over a time in which another way's work would still tell. A step's time is the median
over sweeps, a total the sum of its steps. FLOPs = 2 * (192 + 128) * heads * visible pairs: those of attention alone,
though the up-projection is timed too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from environment import environment

import mla
from mla.cli.batches import make_batch
from mla.cli.steps import BENCH_STEPS, Step, find_steps
from mla.gather import gather_latent, up_project
from mla.tolerance import output_error

DEVICE, TARGET = torch.device("cuda", 0), "cuda"
PAGE_SIZE, NOPE, V_DIM = 64, 128, 128
SCALE = 192**-0.5
BUFFER_ROWS = 16384
#: Seconds for which the steps of one way run before times count, and for which they do.
SETTLING, COUNTED = 0.5, 0.3
MASK = mla.CausalMask()
#: The parts of one way to do the job, in their order.
Stages = dict[str, Callable[[], object]]


class Inputs:
    """One step on the GPU; workspace and output are shared by all steps, as by the layers of a model."""

    def __init__(self, step: Step, weight: torch.Tensor, seed: int) -> None:
        self.step, self.weight = step, weight
        self.batch = make_batch(step.cached, step.new, PAGE_SIZE, device=DEVICE, target=TARGET, seed=seed)
        random = torch.Generator(DEVICE).manual_seed(seed)
        shape = (sum(step.new), step.heads, 192)
        self.q = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=random)
        self.offsets_cpu = self.batch.input_row_offsets.cpu()
        self.rows = sum(-(-length // PAGE_SIZE) * PAGE_SIZE for length in step.lengths)
        self.output = self.peer_output = self.q.new_empty(0)
        self.workspace = torch.empty(0, dtype=torch.uint8, device=DEVICE)

    def plan(self, buffer_rows: int) -> mla.PrefillPlan:
        return mla.prefill_plan(
            self.offsets_cpu, self.batch.collection, 0, buffer_rows, seq_lens_cpu=self.step.lengths, target=TARGET
        )

    def chunked(self, buffer_rows: int, attention_dtype: torch.dtype | None = None) -> Stages:
        """Return the job as two calls."""
        plans: list[mla.PrefillPlan] = []

        def plan() -> None:
            plans[:] = [self.plan(buffer_rows)]

        def rest() -> None:
            mla.chunked_prefill(
                self.q, self.batch.collection, 0, self.weight, self.batch.input_row_offsets, MASK, SCALE, plan=plans[0],
                output=self.output, workspace=self.workspace, attention_dtype=attention_dtype, target=TARGET,
            )  # fmt: skip

        return {"plan": plan, "rest": rest}

    def parts(self) -> Stages:
        """Return the job as single calls over one buffer."""
        width = self.step.heads * (NOPE + V_DIM)
        latent = self.workspace[: self.rows * 1024].view(torch.bfloat16).view(self.rows, 512)
        after = self.rows * 1024
        projected = self.workspace[after : after + self.rows * width * 2].view(torch.bfloat16).view(self.rows, width)
        heads = projected.view(self.rows, self.step.heads, NOPE + V_DIM)
        plans: list[mla.PrefillPlan] = []
        cache = self.batch.collection

        def plan() -> None:
            plans[:] = [self.plan(self.rows)]

        def gather() -> None:
            tables = plans[0].buffer_row_offsets[0], plans[0].cache_offsets[0]
            gather_latent(*tables, self.rows, cache, 0, latent, target=TARGET)

        def attend() -> None:
            mla.prefill(
                self.q, heads[..., :NOPE], heads[..., NOPE:], cache.layer(0), MASK, self.batch.input_row_offsets,
                plans[0].buffer_row_offsets[0], SCALE, cache_offsets=plans[0].cache_offsets[0], output=self.output,
                target=TARGET,
            )  # fmt: skip

        def project() -> None:
            up_project(latent, self.weight, projected)

        return {"plan": plan, "gather": gather, "project": project, "attend": attend}

    def peer(self) -> Stages:
        """Return the usual pipeline; its buffers come from torch's allocator, which keeps them from call to call."""
        from flash_attn.cute.interface import flash_attn_varlen_func

        positions = [torch.arange(length) for length in self.step.lengths]
        pages = [torch.tensor(own) for own in self.batch.pages]
        slots = torch.cat(
            [own[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for own, p in zip(pages, positions, strict=True)]
        ).to(DEVICE)
        layer = self.batch.collection.layer(0)
        size = layer.num_pages * PAGE_SIZE
        cache = torch.as_strided(layer.latent, (size, 576), (layer.latent.stride(1), 1))
        offsets_k = torch.tensor([0, *self.step.lengths], device=DEVICE).cumsum(0).int()
        made: dict[str, torch.Tensor] = {}

        def gather() -> None:
            made["rows"] = cache[slots]

        def project() -> None:
            made["kv"] = made["rows"][:, :512] @ self.weight.t()

        def concat() -> None:
            kv = made["kv"].view(-1, self.step.heads, NOPE + V_DIM)
            rope = made["rows"][:, None, 512:].expand(-1, self.step.heads, -1)
            made["k"], made["v"] = torch.cat([kv[..., :NOPE], rope], -1), kv[..., NOPE:]

        def attend() -> None:
            out = flash_attn_varlen_func(
                self.q, made["k"], made["v"], cu_seqlens_q=self.batch.input_row_offsets, cu_seqlens_k=offsets_k,
                max_seqlen_q=max(self.step.new), max_seqlen_k=max(self.step.lengths), softmax_scale=SCALE, causal=True,
            )  # fmt: skip
            made.clear()
            self.peer_output = out[0] if isinstance(out, tuple) else out

        return {"gather": gather, "project": project, "concat": concat, "attend": attend}

    def exact(self, rows: Sequence[int], head: int) -> torch.Tensor:
        """Return [len(rows), dv] of one head in float64 from keys and values rounded as every way rounds them."""
        weight = self.weight.view(self.step.heads, NOPE + V_DIM, 512)[head]
        answers = []
        offsets = self.offsets_cpu.tolist()
        for row in rows:
            b = next(b for b in range(len(self.step.new)) if row < offsets[b + 1])
            cache = self.batch.rows[b][: self.step.cached[b] + row - offsets[b] + 1]
            kv = (cache[:, :512].double() @ weight.double().t()).bfloat16().double()
            q = self.q[row, head].double()
            scores = (kv[:, :NOPE] @ q[:NOPE] + cache[:, 512:].double() @ q[NOPE:]) * SCALE
            answers.append(torch.softmax(scores, 0) @ kv[:, NOPE:])
        return torch.stack(answers)


def run(stages: Stages) -> None:
    for stage in stages.values():
        stage()


def check(inputs: Inputs, ways: dict[str, Stages]) -> dict[str, float]:
    """Return each way's error as a share of its bound; raise where one is beyond it."""
    shares = {}
    total = inputs.q.shape[0]
    rows, head, some = [*range(0, total, total // 12), total - 1], inputs.step.heads - 1, slice(None, None, 37)
    exact = inputs.exact(rows, head)
    reference: torch.Tensor | None = None
    if "peer" in ways:
        run(ways["peer"])
        reference = inputs.peer_output
        shares["peer"] = output_error(reference[rows, head], exact, "bf16")
    for name, stages in ways.items():
        if name != "peer":
            inputs.output.fill_(math.nan)
            inputs.workspace.fill_(0xFF)  # NaN in every dtype
            run(stages)
            precision = "fp8" if name == "fp8" else "bf16"
            shares[name] = output_error(inputs.output[rows, head], exact, precision)
            if reference is not None:  # both are a bound away from the truth at most
                shares[name] = max(shares[name], output_error(inputs.output[some], reference[some], precision) / 2)
            if bool(inputs.output.isnan().any()):
                shares[name] = math.inf
    if not max(shares.values()) <= 1:
        raise ArithmeticError(f"step {inputs.step.name}: errors as shares of their bounds {shares}")
    return shares


def sweep(ways: list[Stages], flush: torch.Tensor, count: int) -> list[list[list[float]]]:
    """Return milliseconds of each stage of each step of `count` sweeps; the host waits for nothing in between."""
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # 2 ms: the host is ahead from the first step on
    events = []
    for stages in ways * count:
        flush.zero_()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(stages) + 1)]
        marks[0].record()
        for stage, mark in zip(stages.values(), marks[1:], strict=True):
            stage()
            mark.record()
        events.append(marks)
    torch.cuda.synchronize()
    times = [[a.elapsed_time(b) for a, b in itertools.pairwise(marks)] for marks in events]
    return [times[first : first + len(ways)] for first in range(0, len(times), len(ways))]


def settled(ways: list[Stages], flush: torch.Tensor) -> list[list[list[float]]]:
    """Return the last sweeps of many, which the power of another way's work tells nothing of."""
    (first,) = sweep(ways, flush, 1)
    once = sum(map(sum, first)) / 1e3
    before, counted = (max(2, round(seconds / once)) for seconds in (SETTLING, COUNTED))
    return sweep(ways, flush, before + counted)[before:]


def host_microseconds(stages: Stages) -> float:
    """Return the host's time for one job, launches included, while the GPU has other work to do."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000)
        start = time.perf_counter()
        run(stages)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def measure(steps: list[Step], peer: bool, rounds: int) -> dict[str, Any]:
    """Check and time all steps of one head count."""
    heads = steps[0].heads
    random = torch.Generator(DEVICE).manual_seed(heads)
    weight = (torch.randn(heads * (NOPE + V_DIM), 512, device=DEVICE, generator=random) / 512**0.5).bfloat16()
    inputs = [Inputs(step, weight, seed) for seed, step in enumerate(steps)]
    tokens = max(one.q.shape[0] for one in inputs)
    size = max(
        mla.workspace_size(
            "chunked_prefill", one.q, one.batch.collection, 0, weight, buffer_token_size=one.rows, attention_dtype=dtype
        )
        for one in inputs
        for dtype in (None, torch.float8_e4m3fn)
    )
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    output = torch.empty(tokens, heads, V_DIM, dtype=torch.bfloat16, device=DEVICE)
    ways: dict[str, list[Stages]] = {"chunked": [], "16k": [], "fp8": [], "parts": []} | ({"peer": []} if peer else {})
    shares = []
    for one in inputs:
        one.workspace, one.output = workspace, output[: one.q.shape[0]]
        ways["chunked"].append(one.chunked(one.rows))
        ways["16k"].append(one.chunked(BUFFER_ROWS))
        ways["fp8"].append(one.chunked(one.rows, torch.float8_e4m3fn))
        ways["parts"].append(one.parts())
        if peer:
            ways["peer"].append(one.peer())
        shares.append(check(one, {name: stages[-1] for name, stages in ways.items()}))
    flush = torch.empty(1 << 29, dtype=torch.uint8, device=DEVICE)
    host = {name: host_microseconds(stages[0]) for name, stages in ways.items()}
    sweeps: dict[str, list[list[list[float]]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, stages in ways.items():
            sweeps[name] += settled(stages, flush)
    result: dict[str, Any] = {"heads": heads, "shares_of_bound": shares, "host_us": host, "ways": {}}
    for name, times in sweeps.items():
        totals = [[sum(one) for one in single] for single in times]
        names = list(ways[name][0])
        result["ways"][name] = {
            "steps_ms": [statistics.median(one) for one in zip(*totals, strict=True)],
            "sweeps_ms": [sum(single) for single in totals],
            "stages_ms": {
                stage: [statistics.median(single[i][s] for single in times) for i in range(len(steps))]
                for s, stage in enumerate(names)
            },
        }
    return result


def show(result: dict[str, Any], steps: list[Step]) -> None:
    """Print the steps and the sums as a table."""
    ways = result["ways"]
    print(
        f"H {result['heads']}: errors up to {max(max(s.values()) for s in result['shares_of_bound']):.2f} of the bound"
    )
    apart = {name: way["stages_ms"]["attend"] for name, way in ways.items() if "attend" in way["stages_ms"]}
    print(
        f"{'step':>6}{'new':>7}{'keys':>8}{'sequences':>11}" + "".join(f"{name:>10}" for name in ways)
        + f"  ms; attention alone, TFLOP/s: {', '.join(apart)}"
    )  # fmt: skip
    for i, step in enumerate(steps):
        row = f"{step.name:>6}{sum(step.new):>7}{sum(step.lengths):>8}{len(step.new):>11}"
        row += "".join(f"{way['steps_ms'][i]:>10.3f}" for way in ways.values())
        print(row + "  " + "".join(f"{step.flops / ms[i] / 1e9:>7.0f}" for ms in apart.values()))
    totals = {name: sum(way["steps_ms"]) for name, way in ways.items()}
    print(f"{'sum':>6}{'':26}" + "".join(f"{total:>10.3f}" for total in totals.values()))
    flops = sum(step.flops for step in steps)
    print(f"{'TFLOP/s':>10}{'':22}" + "".join(f"{flops / total / 1e9:>10.0f}" for total in totals.values()))
    if "peer" in totals:
        print(f"{'peer /':>8}{'':24}" + "".join(f"{totals['peer'] / total:>10.3f}" for total in totals.values()))
    print(f"{'host us':>10}{'':22}" + "".join(f"{us:>10.0f}" for us in result["host_us"].values()))
    for name, way in ways.items():
        stages = {stage: sum(ms) for stage, ms in way["stages_ms"].items()}
        line = f"  {name}: " + ", ".join(f"{stage} {ms:.2f}" for stage, ms in stages.items()) + " ms"
        if "attend" in stages:
            line += f", attention at {flops / stages['attend'] / 1e9:.0f} TFLOP/s"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--heads", default="16,128")
    parser.add_argument("--peer", choices=("fa4", "none"), default="fa4")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    results = []
    for heads in map(int, args.heads.split(",")):
        steps = find_steps(None, BENCH_STEPS, heads)
        results.append(measure(steps, args.peer == "fa4", args.rounds))
        show(results[-1], steps)
        if args.json:
            found = {"environment": environment(), "steps": [step.name for step in steps], "results": results}
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
