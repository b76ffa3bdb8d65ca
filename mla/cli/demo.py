"""``mla demo``: the main job on real prefill steps, checked and drawn."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mla import reference
from mla.chunked import chunked_prefill
from mla.cli import clock, machine, plan_view
from mla.cli.batches import Batch, make_batch
from mla.cli.steps import DEMO_STEPS, Step, find_steps
from mla.plan import PrefillPlan, prefill_plan
from mla.problem import KV_LORA_RANK
from mla.target import Target
from mla.tolerance import FROBENIUS, output_error

NOPE, V_DIM, DEPTH = 128, 128, 192
SCALE = DEPTH**-0.5
#: What is compared with the oracle of each sequence: a block of rows, in some heads.
SAMPLE_ROWS, SAMPLE_HEADS = 8, 2
#: Keys are up-projected in bf16 here and in float64 there, so that a few of their elements round the other way.
LSE_BOUND = 1e-2


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one step."""

    step: str
    cached: tuple[int, ...]
    new: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    ms: float
    tokens_per_s: float
    tflops: float
    error: float  # relative Frobenius, of the sampled rows
    lse_error: float  # largest difference
    passed: bool

    def __str__(self) -> str:
        return (
            f"{len(self.chunk_rows)} chunks, {_duration(self.ms)}, {self.tokens_per_s:,.0f} new tokens/s, "
            f"{self.tflops:.3g} TFLOP/s, error {self.error:.1e} (bound {FROBENIUS['bf16']:.0e})"
        )


def demo(
    target: Annotated[
        str | None, typer.Option(help="gpu, cuda, rocm, triton or cpu. Default: a GPU if there is one.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads; 16 is one of eight ranks of DeepSeek-V3.")] = 16,
    steps: Annotated[str | None, typer.Option(help="Numbers of shipped steps, 976,605, or a JSON-lines file.")] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 64,
    buffer: Annotated[int, typer.Option(min=1, help="Rows of the K/V buffer, N.")] = 4096,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Of the random rows and of the order of the pages.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for plan.png and demo.json.")] = Path("mla-demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Run one attention layer over real prefill steps of a serving trace, and show what happened.

    A paged cache of DeepSeek-V3's shape on scattered pages is filled, then for each step: plan, and chunk by chunk
    gather, up-projection and attention. Rows are compared with a float64 oracle that knows nothing of pages and chunks.
    Exit status 1 when they disagree.

    Examples:

    - `mla demo`
    - `mla demo --target cpu --steps 976 --heads 4`
    - `mla demo --page-size 16 --buffer 8192`
    """
    where, device = machine.locate(target or machine.default_target())
    chosen = find_steps(steps, DEMO_STEPS, heads)
    output.mkdir(parents=True, exist_ok=True)
    console, progress_console = Console(quiet=as_json), Console(stderr=True)
    console.print(f"[bold]mla demo[/] on {where}: {machine.name_of(device)}", highlight=False)
    console.print(
        f"{heads} heads, bf16, pages of {page_size} tokens, K/V buffer of {buffer:,} rows, seed {seed}", highlight=False
    )
    torch.manual_seed(seed)
    weight = torch.randn(heads * (NOPE + V_DIM), KV_LORA_RANK, device=device).mul_(KV_LORA_RANK**-0.5).bfloat16()
    results, panels = [], []
    for step in chosen:
        with _progress(progress_console) as progress:
            batch, plan, result = _run(step, weight, page_size, buffer, where, device, seed, progress)
        chunks = plan_view.find_segments(plan, step)
        results.append(result)
        panels.append(plan_view.Panel(step, batch, chunks, str(result)))
        _show(console, step, result, plan_view.as_text(chunks, buffer))
    picture = output / "plan.png"
    title = f"mla prefill plan: {heads} head{'s' * (heads > 1)} on {where} ({machine.name_of(device)})"
    plan_view.draw(panels, buffer, page_size, title, picture)
    report = {
        "machine": machine.describe(device), "target": str(where), "heads": heads, "page_size": page_size,
        "buffer_token_size": buffer, "seed": seed, "steps": [asdict(one) for one in results], "picture": str(picture),
        "passed": all(one.passed for one in results),
    }  # fmt: skip
    (output / "demo.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(report, indent=2))
    console.print(f"\nwrote {picture} and {output / 'demo.json'}", highlight=False)
    raise typer.Exit(0 if report["passed"] else 1)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("chunks"))
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)


def _run(
    step: Step,
    weight: torch.Tensor,
    page_size: int,
    buffer: int,
    target: Target,
    device: torch.device,
    seed: int,
    progress: Progress,
) -> tuple[Batch, PrefillPlan, Result]:
    """Do the whole job of one step and compare a sample."""
    task = progress.add_task(f"step {step.name}: filling the cache", total=None)
    batch = make_batch(step.cached, step.new, page_size, device=device, target=target, seed=seed)
    plan = prefill_plan(batch.input_row_offsets, batch.collection, 0, buffer, seq_lens_cpu=step.lengths, target=target)
    lengths = plan.host_lengths or ()
    q = torch.randn(sum(step.new), step.heads, DEPTH, device=device).bfloat16()
    progress.update(task, description=f"step {step.name}", total=len(lengths))

    def project(latent: torch.Tensor) -> torch.Tensor:
        """Up-project a chunk; it is the one part of the job that the caller has a hand in, so it moves the bar."""
        progress.advance(task)
        return latent @ weight.T

    def attend(weight_or_callable: Any) -> Any:
        return chunked_prefill(
            q, batch.collection, 0, weight_or_callable, batch.input_row_offsets, step.make_mask(), SCALE, plan=plan,
            return_lse=True, target=target,
        )  # fmt: skip

    start = time.perf_counter()
    result, lse = attend(project)
    ms = (time.perf_counter() - start) * 1e3
    if device.type == "cuda":  # that call compiled the kernels; now what a serving engine has
        ms = clock.measure(lambda: attend(weight), device).median
    progress.update(task, description=f"step {step.name}: comparing with float64")
    error, lse_difference, passed = _compare(step, batch, weight, q, result, lse, seed)
    figures = sum(step.new) / ms * 1e3, step.flops / ms / 1e9
    return batch, plan, Result(step.name, step.cached, step.new, lengths, ms, *figures, error, lse_difference, passed)


def _compare(
    step: Step, batch: Batch, weight: torch.Tensor, q: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, seed: int
) -> tuple[float, float, bool]:
    """Compare sampled rows and heads with the oracle, which gets keys made of the rows that were stored."""
    random = torch.Generator().manual_seed(seed)
    difference = norm = largest = 0.0
    passed, first = True, 0
    for cached, new, rows in zip(step.cached, step.new, batch.rows, strict=True):
        if new == 0:
            continue
        count, heads = min(new, SAMPLE_ROWS), torch.randperm(step.heads, generator=random)[:SAMPLE_HEADS]
        start = int(torch.randint(new - count + 1, (), generator=random))
        own = weight.view(step.heads, NOPE + V_DIM, KV_LORA_RANK)[heads.to(weight.device)].double()
        kv = torch.einsum("nr,hdr->nhd", rows[:, :KV_LORA_RANK].double(), own).to(q.dtype)
        sample = (slice(first + start, first + start + count), heads.to(q.device))
        expected, expected_lse = reference.prefill(
            q[sample], kv[..., :NOPE], kv[..., NOPE:], rows[:, None, KV_LORA_RANK:], step.make_mask(),
            torch.tensor([0, count]), torch.tensor([0, len(rows)]), SCALE,
            kv_lengths=torch.tensor([len(rows)]), start_positions=torch.tensor([cached + start]),
        )  # fmt: skip
        actual, lse_difference = output[sample], (lse[sample].double() - expected_lse).abs().max().item()
        difference += (actual.double() - expected).square().sum().item()
        norm += expected.square().sum().item()
        largest = max(largest, lse_difference)
        passed &= output_error(actual, expected, "bf16") <= 1 and lse_difference <= LSE_BOUND
        first += new
    return (difference / norm) ** 0.5, largest, passed


def _show(console: Console, step: Step, result: Result, picture: Any) -> None:
    pairs = enumerate(zip(step.cached, step.new, strict=True))
    sequences = ", ".join(f"{plan_view.letter_of(i)} {cached:,}+{new:,}" for i, (cached, new) in pairs)
    console.print(
        f"\n[bold]step {step.name}[/], cached+new tokens of each sequence: {sequences}", highlight=False, soft_wrap=True
    )
    console.print(picture, soft_wrap=True)
    state = "[green]agrees with float64[/]" if result.passed else "[bold red]DISAGREES with float64[/]"
    console.print(f"{result}; {state}", highlight=False, soft_wrap=True)


def _duration(ms: float) -> str:
    return f"{ms / 1e3:.1f} s" if ms >= 1e3 else f"{ms:.2f} ms"
