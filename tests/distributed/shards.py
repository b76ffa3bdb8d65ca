"""Problems for several ranks: what one of them holds, its run, and the answer of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mla
from mla import Mask, masks
from mla.distributed import (
    ContiguousKeys,
    InterleavedKeys,
    KeyShard,
    context_parallel_prefill,
    head_parallel_prefill,
    own_rows,
)
from tests.support.paged import PagedData, make_paged

SCALE = 192**-0.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _bias(batch: int, heads: int) -> Mask:
    random = torch.Generator().manual_seed(5)
    bias = torch.randn(batch, heads, 80, 200, generator=random)
    return masks.CausalMask() & masks.MaterializedMask(bias.masked_fill(bias < -1, -torch.inf))


def _windows(batch: int, heads: int) -> Mask:
    window = torch.arange(1, heads + 1, dtype=torch.int32) * 9
    return Mask.from_function(lambda b, h, q, k: (k <= q) & ((q - k < window[h]) | ((k + h) % 5 == 0)))


#: By name: a mask for so many sequences and heads.
MASKS: dict[str, Callable[[int, int], Mask]] = {
    "none": lambda batch, heads: masks.NullMask(),
    "causal": lambda batch, heads: masks.CausalMask(),
    "sliding": lambda batch, heads: masks.SlidingWindowCausalMask(20),
    "chunked": lambda batch, heads: masks.ChunkedCausalMask(24),
    "padding": lambda batch, heads: masks.CausalPaddingMask(torch.arange(batch, dtype=torch.int32) * 20 + 3),
    "user": lambda batch, heads: Mask.from_function(lambda b, h, q, k: (k <= q) & ((q - k < 16) | (k < 4))),
    "heads": _windows,
    "bias": _bias,
    "nothing": lambda batch, heads: Mask.from_function(lambda b, h, q, k: k < 0),
}


@dataclass(frozen=True)
class Case:
    """One step in words; the defaults leave some shards of two and of four ranks empty or shorter than a page."""

    lengths: tuple[tuple[int, int], ...] = ((70, 21), (0, 64), (3, 1), (0, 5), (33, 40))  # (cached, new)
    shard: str = "interleaved"  # or contiguous
    block: int = 16  # tokens dealt out at once
    page_size: int = 16
    mask: str = "causal"
    heads: int = 8
    dtype: str = "fp32"
    sinks: bool = False
    softcap: float = 0.0
    buffer: int = 64
    plan: str = "lengths"  # where the number of chunks comes from: lengths, chunks or nothing
    lse_layout: str = "TH"
    fp8: bool = False  # attended to in fp8

    @property
    def attention_dtype(self) -> torch.dtype | None:
        return torch.float8_e4m3fn if self.fp8 else None

    @property
    def precision(self) -> str:
        """Of the tolerance between one device and several."""
        return "fp8" if self.fp8 else self.dtype

    @property
    def lse_factor(self) -> float:
        """How many bounds lie between them: in fp8 other heads share a scale, so that q is rounded otherwise."""
        return 10 if self.fp8 else 2

    def __str__(self) -> str:
        default = Case()
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return ",".join(f"{name}={value}".replace(" ", "") for name, value in changed.items()) or "default"


CASES = (
    Case(),
    Case(sinks=True, lse_layout="HT"),
    Case(shard="contiguous", sinks=True),
    Case(shard="contiguous", mask="sliding", plan="nothing"),
    Case(block=1, page_size=8),
    Case(block=5, page_size=16, mask="sliding"),
    Case(mask="none", plan="chunks", sinks=True),
    Case(mask="chunked", block=8, softcap=20.0),
    Case(mask="padding"),
    Case(mask="user", shard="contiguous"),
    Case(mask="user", plan="nothing"),
    Case(mask="heads"),
    Case(mask="bias", shard="contiguous"),
    Case(mask="bias", block=3, page_size=4),
    Case(mask="nothing"),
    Case(mask="nothing", sinks=True),
    Case(lengths=((0, 1),), sinks=True),
    Case(lengths=((0, 0), (0, 3)), buffer=7),
    Case(heads=4, dtype="bf16"),
    Case(heads=4, dtype="fp16", mask="sliding", buffer=1000),
    Case(heads=4, dtype="bf16", sinks=True, fp8=True),
)
#: The case that runs on a mesh of two by two as well.
MESH_CASE = next(i for i, case in enumerate(CASES) if case.shard == "contiguous" and case.sinks)


@dataclass
class Problem:
    """The whole problem, the same in every process that builds it."""

    case: Case
    device: torch.device
    data: PagedData
    q: torch.Tensor  # [T, H, 192]
    weight: torch.Tensor  # [H * 256, 512]
    sinks: torch.Tensor | None
    mask: Mask

    @property
    def totals(self) -> torch.Tensor:
        return torch.tensor([cached + new for cached, new in self.case.lengths], device=self.device)

    @property
    def starts(self) -> torch.Tensor:
        return torch.tensor(self.data.cached, device=self.device)


def build(case: Case, device: torch.device | str = "cpu") -> Problem:
    """Make the whole problem."""
    random, dtype = torch.Generator().manual_seed(7), DTYPES[case.dtype]
    cached, new = ([pair[i] for pair in case.lengths] for i in (0, 1))
    data = make_paged(cached, new, case.page_size, dtype=dtype, device=device, seed=3)
    q = torch.randn(sum(new), case.heads, 192, generator=random).to(dtype).to(device)
    weight = (torch.randn(case.heads * 256, 512, generator=random) / 512**0.5).to(dtype).to(device)
    sinks = torch.randn(case.heads, generator=random).to(device) if case.sinks else None
    return Problem(case, torch.device(device), data, q, weight, sinks, MASKS[case.mask](len(new), case.heads))


def one_device(problem: Problem, target: str = "cpu", **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE [T, H] of one device that has everything."""
    case = problem.case
    arguments = {"q": problem.q, "weight": problem.weight, "mask": problem.mask, "sinks": problem.sinks, **changes}
    result = mla.chunked_prefill(
        kv_collection=problem.data.cache, layer_idx=0, input_row_offsets=problem.data.input_row_offsets, scale=SCALE,
        buffer_token_size=case.buffer, softcap=case.softcap, return_lse=True, attention_dtype=case.attention_dtype,
        target=target, **arguments,
    )  # fmt: skip
    assert isinstance(result, tuple)
    return result


def shard_of(case: Case, totals: torch.Tensor, rank: int, world: int) -> KeyShard:
    if case.shard == "interleaved":
        return InterleavedKeys(case.block, rank, world)
    return ContiguousKeys.even(totals, case.page_size, rank, world)


def own_cache(problem: Problem, keys: KeyShard, target: str = "cpu") -> mla.PagedKVCacheCollection:
    """Store a rank's rows into pages of its own as an engine would: the cached tokens in one step, the new in another.

    Slots of no token hold NaN, unused entries of the page table garbage.
    """
    case, device, totals = problem.case, problem.device, problem.totals
    cached, new = ([pair[i] for pair in case.lengths] for i in (0, 1))
    lengths = keys.lengths(totals).cpu()
    pages = (-(-lengths // case.page_size)).tolist()
    table = torch.full((len(new), max(pages) + 1), 2**31 - 1, dtype=torch.int32)
    ids = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).to(torch.int32).split(pages)
    for row, own in zip(table, ids, strict=True):
        row[: len(own)] = own
    pool = torch.full((sum(pages) + 1, case.page_size, 576), torch.nan, dtype=problem.q.dtype, device=device)
    for before, count in (([0] * len(new), cached), (cached, new)):
        here = keys.lengths(torch.tensor(before, device=device)).to(torch.int32)
        step = mla.PagedKVCacheCollection.from_pages(pool, table.to(device), here)
        rows, offsets = own_rows(keys, before, count)
        parts = zip(problem.data.latent, problem.data.rope, before, count, strict=True)
        together = torch.cat([torch.cat((latent[a : a + n], rope[a : a + n]), 1) for latent, rope, a, n in parts])
        mine = together[rows].to(pool.dtype).to(device)
        step.store(0, offsets.to(device), mine[:, :512], mine[:, 512:], target=target)
    return mla.PagedKVCacheCollection.from_pages(pool, table.to(device), seq_lens=lengths.to(device, torch.int32))


def share_of_heads(problem: Problem, rank: int, world: int) -> tuple[slice, torch.Tensor, torch.Tensor | None]:
    """Return a rank's heads, and weight and sinks of them."""
    count = problem.case.heads // world
    heads = slice(rank * count, (rank + 1) * count)
    weight = problem.weight.view(problem.case.heads, -1)[heads].reshape(-1, 512)
    return heads, weight, None if problem.sinks is None else problem.sinks[heads]


def run_context_parallel(
    problem: Problem, rank: int, world: int, target: str = "cpu", group: DeviceMesh | None = None
) -> tuple[torch.Tensor, ...]:
    """Return a rank's output and LSE as the function gives them."""
    case, totals = problem.case, problem.totals
    keys = shard_of(case, totals, rank, world)
    heads, weight, sinks = share_of_heads(problem, rank, world)
    more: dict[str, Any] = {
        "lengths": {"seq_lens_cpu": keys.lengths(totals).tolist()},
        "chunks": {"max_chunks": 9},
        "nothing": {},
    }[case.plan]
    result = context_parallel_prefill(
        problem.q[:, heads], own_cache(problem, keys, target), 0, weight, problem.data.input_row_offsets, problem.mask,
        SCALE, keys=keys, start_positions=problem.starts, buffer_token_size=case.buffer, return_lse=True,
        lse_layout=case.lse_layout, sinks=sinks, group=group, softcap=case.softcap,
        attention_dtype=case.attention_dtype, target=target, **more,
    )  # fmt: skip
    assert isinstance(result, tuple)
    return result


def run_head_parallel(problem: Problem, rank: int, world: int, target: str = "cpu") -> tuple[torch.Tensor, ...]:
    case = problem.case
    heads, weight, sinks = share_of_heads(problem, rank, world)
    result = head_parallel_prefill(
        problem.q[:, heads], problem.data.cache, 0, weight, problem.data.input_row_offsets, problem.mask, SCALE,
        buffer_token_size=case.buffer, return_lse=True, sinks=sinks, softcap=case.softcap,
        attention_dtype=case.attention_dtype, target=target,
    )  # fmt: skip
    assert isinstance(result, tuple)
    return result


def run_mesh(problem: Problem, mesh: DeviceMesh) -> tuple[torch.Tensor, ...]:
    """Divide the heads over the first dimension of a mesh, and heads and keys over the second."""
    heads, weight, sinks = share_of_heads(problem, mesh.get_local_rank(0), mesh.size(0))
    case = replace(problem.case, heads=heads.stop - heads.start)
    part = replace(problem, case=case, q=problem.q[:, heads], weight=weight, sinks=sinks)
    return run_context_parallel(part, mesh.get_local_rank(1), mesh.size(1), group=mesh["cp"])


def work(rank: int, world: int, folder: str) -> None:
    """Be one rank: run every case and save what came out."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # what ranks draw for themselves differs
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    results = {}
    for i, case in enumerate(CASES):
        problem = build(case)
        results[i] = {
            "context": run_context_parallel(problem, rank, world),
            "heads": run_head_parallel(problem, rank, world),
        }
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
        results[MESH_CASE]["mesh"] = run_mesh(build(CASES[MESH_CASE]), mesh)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def run_ranks(world: int, folder: Path) -> list[dict[int, dict[str, tuple[torch.Tensor, ...]]]]:
    """Run every case in `world` processes; return what each rank saved."""
    torch.multiprocessing.spawn(work, (world, str(folder)), nprocs=world)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]
