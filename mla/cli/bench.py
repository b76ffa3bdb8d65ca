"""``mla bench``: this machine's targets on fixed shapes and real steps, beside its own matmul and copy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mla.chunked import chunked_prefill
from mla.cli import clock, machine, sdpa
from mla.cli.batches import make_batch
from mla.cli.bench_chart import draw
from mla.cli.steps import BENCH_STEPS, DEMO_STEPS, Step, find_shapes, find_steps
from mla.cli.tune import TUNE_SECONDS, tune_tiles
from mla.errors import UnsupportedError
from mla.plan import prefill_plan
from mla.prefill import prefill
from mla.problem import KV_LORA_RANK
from mla.target import Target

NOPE, V_DIM, DEPTH = 128, 128, 192
SCALE = DEPTH**-0.5
PAGE_SIZE, BUFFER_ROWS = 64, 16384
#: Heads of the real steps: one of eight ranks of DeepSeek-V3 on a GPU; what a CPU finishes in seconds.
GPU_HEADS, CPU_HEADS = 16, 1
#: Of measuring a line.
SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Roof:
    """What the device reached in this run in a plain bf16 matmul and a plain copy."""

    tflops: float
    gbytes: float

    def share(self, flops: int, moved: int, ms: float) -> float:
        """Return the time that the slower of the two would take at the roof, as a share of `ms`."""
        return max(flops / self.tflops / 1e9, moved / self.gbytes / 1e6) / ms


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of the table."""

    target: str
    job: str  # prefill: attention alone; whole job: gather, up-projection, attention, merge
    name: str
    heads: int
    cached: tuple[int, ...]
    new: tuple[int, ...]
    ms: float
    ms_20: float
    ms_80: float
    runs: int
    tflops: float
    roof: float


def bench(
    target: Annotated[
        list[str] | None, typer.Option(help="cpu, cuda, rocm, triton; repeatable. Default: the GPU's, else cpu.")
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads of the real steps; 16 on a GPU, 1 on a CPU.")] = None,
    steps: Annotated[
        str | None,
        typer.Option(help="Numbers of shipped steps or a JSON-lines file. Default: ten on a GPU, one on a CPU."),
    ] = None,
    shapes: Annotated[str | None, typer.Option(help="Names of fixed shapes, such as 8k,1k. Default: all.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.01, help="Of measuring a line, with --tune a tile on a shape: 1, 0.1.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for bench.json and bench.png.")] = Path("mla-bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure the tiles of the Triton prefill instead; print what should change.")
    ] = False,
) -> None:
    """Measure attention on fixed shapes and the whole job on real prefill steps.

    Medians after warm-up; on a GPU by events, with the L2 cache flushed before each run. The roof is a matmul and a
    copy of torch's in the same run. TFLOP/s counts attention alone: 2 * (192 + 128) * heads * visible pairs. On the
    CPU also: our attention beside torch's scaled_dot_product_attention on the same sequence.

    Examples:

    - `mla bench`
    - `mla bench --target cuda --target triton`
    - `mla bench --target cpu --steps 976 --heads 4`
    - `mla bench --tune`
    - `mla bench --tune --shapes 8k,1k --seconds 0.05`
    """
    if tune:
        tune_tiles(output, as_json, shapes, seconds or TUNE_SECONDS)
        return
    names = target or _default_targets()
    places = {name: machine.locate(name) for name in names}
    output.mkdir(parents=True, exist_ok=True)
    console, progress_console = Console(quiet=as_json), Console(stderr=True)
    found: list[Measurement] = []
    refused: list[str] = []
    report: dict[str, Any] = {"targets": {}, "roofs": {}}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=progress_console, transient=True, disable=not progress_console.is_terminal
    ) as progress:
        for name, (where, device) in places.items():
            gpu = device.type == "cuda"
            fixed = find_shapes("gpu" if gpu else "cpu", shapes)
            count = heads or (GPU_HEADS if gpu else CPU_HEADS)
            real = find_steps(steps, BENCH_STEPS if gpu else DEMO_STEPS[:1], count)
            task = progress.add_task(f"{name}: roof", total=len(fixed) + len(real))
            roof = Roof(clock.matmul_tflops(device, torch.bfloat16), clock.copy_gbytes(device))
            report["targets"][name], report["roofs"][name] = machine.describe(device), asdict(roof)
            jobs = [(step, "prefill", _attention) for step in fixed] + [
                (step, "whole job", _whole_job) for step in real
            ]
            for step, job, make in jobs:
                progress.update(task, description=f"{name}: {job} {step.name}")
                try:
                    call, moved = make(step, where, device)
                    timing = clock.measure(call, device, seconds or SECONDS)
                except UnsupportedError as error:
                    refused.append(f"{name} refuses {job} {step.name}: {str(error).splitlines()[0]}")
                    continue
                finally:
                    progress.advance(task)
                found.append(_measurement(name, job, step, timing, roof, moved))
    comparison = sdpa.compare() if any(device.type == "cpu" for _, device in places.values()) else []
    report |= {
        "measurements": [asdict(one) for one in found],
        "refused": refused,
        "sdpa": [asdict(one) for one in comparison],
    }
    (output / "bench.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    draw(report, output / "bench.png")
    if as_json:
        print(json.dumps(report, indent=2))
    _show(console, report, found)
    for one in comparison:
        console.print(str(one), highlight=False, soft_wrap=True)
    console.print(f"wrote {output / 'bench.json'} and {output / 'bench.png'}", highlight=False)


def _default_targets() -> list[str]:
    available = machine.available_targets()
    return [name for name in available if name in ("cuda", "rocm", "triton")] or ["cpu"]


def _attention(step: Step, target: Target, device: torch.device) -> tuple[Callable[[], Any], int]:
    """Return attention over up-projected keys, and the bytes that it reads and writes once."""
    batch = make_batch(step.cached, step.new, PAGE_SIZE, device=device, target=target, seed=0)
    q = torch.randn(sum(step.new), step.heads, DEPTH, device=device).bfloat16()
    kv = torch.randn(sum(step.lengths), step.heads, NOPE + V_DIM, device=device).bfloat16()
    rows = torch.tensor([0, *step.lengths], device=device).cumsum(0).int()
    output = torch.empty(*q.shape[:2], V_DIM, dtype=q.dtype, device=device)
    lse = torch.empty(q.shape[:2], device=device)
    cache, mask = batch.collection.layer(0), step.make_mask()
    moved = sum(t.numel() * t.element_size() for t in (q, kv, output, lse)) + 2 * 64 * sum(step.lengths)
    k, v = kv[..., :NOPE], kv[..., NOPE:]

    def call() -> Any:
        return prefill(
            q, k, v, cache, mask, batch.input_row_offsets, rows, SCALE, output=output, lse=lse, target=target
        )  # fmt: skip

    return call, moved


def _whole_job(step: Step, target: Target, device: torch.device) -> tuple[Callable[[], Any], int]:
    """Return one layer's job from the paged latents, and the bytes of its inputs and outputs."""
    batch = make_batch(step.cached, step.new, PAGE_SIZE, device=device, target=target, seed=0)
    q = torch.randn(sum(step.new), step.heads, DEPTH, device=device).bfloat16()
    weight = torch.randn(step.heads * (NOPE + V_DIM), KV_LORA_RANK, device=device).bfloat16()
    output, mask = torch.empty(*q.shape[:2], V_DIM, dtype=q.dtype, device=device), step.make_mask()
    collection, offsets = batch.collection, batch.input_row_offsets
    plan = prefill_plan(offsets, collection, 0, BUFFER_ROWS, seq_lens_cpu=step.lengths, target=target)
    moved = sum(t.numel() * t.element_size() for t in (q, weight, output)) + 2 * 576 * sum(step.lengths)

    def call() -> Any:
        return chunked_prefill(
            q, collection, 0, weight, offsets, mask, SCALE, plan=plan, output=output, target=target
        )  # fmt: skip

    return call, moved


def _measurement(target: str, job: str, step: Step, timing: clock.Timing, roof: Roof, moved: int) -> Measurement:
    return Measurement(
        target, job, step.name, step.heads, step.cached, step.new, timing.median, timing.low, timing.high, timing.runs,
        step.flops / timing.median / 1e9, roof.share(step.flops, moved, timing.median),
    )  # fmt: skip


def _show(console: Console, report: dict[str, Any], found: list[Measurement]) -> None:
    for name, about in report["targets"].items():
        roof = report["roofs"][name]
        console.print(
            f"[bold]{name}[/]: {about['device']}; roof: bf16 matmul {roof['tflops']:.3g} TFLOP/s, "
            f"copy {roof['gbytes']:.4g} GB/s; commit {about['commit']}",
            highlight=False,
            soft_wrap=True,
        )
    table = Table()
    for column in ("target", "job", "name", "heads", "ms (20-80 %)", "TFLOP/s", "of roof"):
        table.add_column(column, justify="left" if column in ("target", "job", "name") else "right", no_wrap=True)
    for one in found:
        ms = f"{one.ms:.4g} ({one.ms_20:.3g}-{one.ms_80:.3g})"
        table.add_row(one.target, one.job, one.name, str(one.heads), ms, f"{one.tflops:.3g}", f"{one.roof:.0%}")
    console.print(table)
    for line in report["refused"]:
        console.print(line, style="dim", highlight=False, soft_wrap=True)
