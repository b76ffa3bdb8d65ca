"""``mla bench --tune``: measure the tiles of the Triton prefill on this device and print the table's new rows."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from mla.cli import clock, machine
from mla.cli.batches import make_batch
from mla.cli.steps import Step, find_shapes
from mla.errors import CompileError, TargetError
from mla.problem import QK_ROPE_HEAD_DIM, SUPPORTED_DIMS, PrefillArgs, Problem
from mla.target import Target, device_arch

PAGE_SIZE = 64
#: Of measuring a tile on a shape.
TUNE_SECONDS = 0.1


def tune_tiles(output: Path, as_json: bool, shapes: str | None, seconds: float) -> None:
    """Measure every tile on the GPU's shapes, for the usual problem of each head width; print and write what changes.

    ``tiles.json`` in `output` has for each head width the milliseconds by tile and shape, the row and the new one.
    Tiles are compiled side by side, then measured one after the other.

    Raises
    ------
    TargetError
        No GPU that the target triton can use.
    ArgumentError
        `shapes` names one that there is not.
    """
    _, device = machine.locate("triton")
    if device.type != "cuda":
        raise TargetError("--tune: measures tiles on a GPU; under TRITON_INTERPRET=1 there is none")
    runtime = importlib.import_module("mla.backends.triton.runtime")
    prefill = importlib.import_module("mla.backends.triton.prefill").Prefill
    arch, limit, report = device_arch(device), runtime.shared_bytes(device), {}
    console, progress_console = Console(quiet=as_json), Console(stderr=True)
    with Progress(console=progress_console, transient=True, disable=not progress_console.is_terminal) as progress:
        for dims in SUPPORTED_DIMS:
            problem = usual_problem(dims)
            calls = [_arguments(step, problem, device) for step in find_shapes("gpu", shapes)]
            prepare = functools.partial(prefill.prepare_tile, problem, device)

            def measure(tile: Any, prepare: Any = prepare, calls: list[PrefillArgs] = calls) -> list[float]:
                run = prepare(tile)
                return [clock.measure(functools.partial(run, args), device, seconds).median for args in calls]

            report[str(dims)] = tune_row(problem, arch, limit, prepare, measure, console, progress)
    text = json.dumps(report, indent=2)
    output.mkdir(parents=True, exist_ok=True)
    (output / "tiles.json").write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
    console.print(f"wrote {output / 'tiles.json'}", highlight=False)


def usual_problem(dims: tuple[int, int]) -> Problem:
    """Return what the tiles of a head width are tuned on: bf16, causal, pages of 64 tokens."""
    mask, features = Step("", (0,), (1,)).make_mask().program, frozenset({"lse", "batch_invariant"})
    return Problem("prefill", "bf16", "bf16", dims, PAGE_SIZE, rope="paged", mask=mask, features=features)


def tune_row(
    problem: Problem, arch: str, limit: int, prepare: Callable[[Any], object], measure: Callable[[Any], list[float]],
    console: Console, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Decide one row of the table: `prepare` compiles a tile, `measure` gives its milliseconds on each shape."""
    tuning, configs = (importlib.import_module(f"mla.backends.triton.{name}") for name in ("tune", "configs"))
    row = configs.tiles(arch, problem)
    current = configs.choose(arch, problem, limit)
    times: dict[Any, list[float]] = {}
    candidates = tuning.candidates(arch, problem, limit)

    def compile_tile(tile: Any) -> None:
        with contextlib.suppress(CompileError, RuntimeError):  # which measuring it tells
            prepare(tile)

    compile_tile(candidates[0])  # what all of them share
    with ThreadPoolExecutor() as pool:
        task = progress.add_task(f"compiling tiles of q_depth {problem.dims[0]}", total=len(candidates))
        list(progress.track(pool.map(compile_tile, candidates), task_id=task))
    task = progress.add_task(f"tiles of q_depth {problem.dims[0]}", total=len(candidates))
    for tile in progress.track(candidates, task_id=task):
        try:
            times[tile] = measure(tile)
        except (CompileError, RuntimeError) as error:
            console.print(f"{tile}: {str(error).splitlines()[0]}", style="dim", highlight=False)
    best = tuning.fastest(times, current)
    new = row if best == current else tuning.new_row(arch, problem, best)
    where = f"{arch}, q_depth {problem.dims[0]}"
    if new == row:
        console.print(f"{where}: {current} stays first", highlight=False, soft_wrap=True)
    else:
        console.print(f"{where}: {current} -> {best}; the row for backends/triton/configs.py:", highlight=False)
        console.print(f"    {problem.dims[0]}: ({', '.join(map(str, new))}),", highlight=False, soft_wrap=True)
    measured = {str(tile): milliseconds for tile, milliseconds in times.items()}
    return {"ms": measured, "row": [str(tile) for tile in row], "new_row": [str(tile) for tile in new]}


def _arguments(step: Step, problem: Problem, device: torch.device) -> PrefillArgs:
    depth, v_dim = problem.dims
    nope = depth - QK_ROPE_HEAD_DIM
    batch = make_batch(step.cached, step.new, PAGE_SIZE, device=device, target=Target("triton"), seed=0)
    q = torch.randn(sum(step.new), step.heads, depth, device=device, dtype=torch.bfloat16)
    kv = torch.randn(sum(step.lengths), step.heads, nope + v_dim, device=device, dtype=torch.bfloat16)
    rows = torch.tensor([0, *step.lengths], device=device).cumsum(0).int()
    return PrefillArgs(
        output=torch.empty(*q.shape[:2], v_dim, device=device, dtype=q.dtype), q=q, q_rope=None,
        k=kv[..., :nope], v=kv[..., nope:], rope_kind="paged", cache=batch.collection.layer(0), rope=None,
        rope_scales=None, rope_scale_base=0, cu_seqlens_q=batch.input_row_offsets, cu_seqlens_k=rows,
        cache_offsets=None, start_positions=None, kv_lengths=None, softmax_scale=depth**-0.5, mask=step.make_mask(),
        max_seqlen_q=max(step.new), q_scale=None, k_scales=None, v_scale=None, rope_prescaled=False,
        lse=torch.empty(q.shape[:2], device=device), sinks=None, softcap=0.0, workspace=None, batch_invariant=True,
    )  # fmt: skip
