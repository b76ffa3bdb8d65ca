"""What one process shows: each rank's part on any device, NCCL with one rank, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mla
from mla import ArgumentError, DTypeError, MlaError, ShapeError
from mla.chunked import find_extents, plan_job
from mla.distributed import InterleavedKeys, context_parallel_prefill, head_parallel_prefill
from mla.distributed.context_parallel import _Job, _Result
from mla.distributed.exchange import exchange
from tests.distributed.shards import (
    SCALE,
    Case,
    Problem,
    build,
    one_device,
    own_cache,
    run_context_parallel,
    run_head_parallel,
    shard_of,
)
from tests.support.tolerance import assert_lse, assert_output

TARGETS = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.cuda),
    pytest.param("rocm", marks=pytest.mark.rocm),
    pytest.param("triton", marks=pytest.mark.triton),
]


def part_of(problem: Problem, rank: int, world: int, target: str) -> _Result:
    """Return what one rank computes for all heads over its keys."""
    case = problem.case
    keys = shard_of(case, problem.totals, rank, world)
    cache, offsets = own_cache(problem, keys, target).layer(0), problem.data.input_row_offsets
    plan = plan_job(cache, offsets, case.buffer, None, None, target)
    extents = find_extents(problem.q, cache, problem.weight, case.buffer, plan)
    starts = problem.starts.to(torch.int32)
    job = _Job(cache, plan, offsets, starts, problem.mask, keys, SCALE, case.softcap, target, extents, 1)
    result = job.result_in(job.room().fill_(torch.nan))
    job.attend(problem.q, problem.weight, 0, result)
    return result


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case",
    [
        Case(dtype="bf16"),
        Case(dtype="bf16", mask="sliding", block=64, page_size=64),
        Case(dtype="bf16", mask="user", shard="contiguous"),
        Case(dtype="bf16", mask="none", block=1),
        Case(dtype="bf16", lengths=((700, 300), (0, 1), (5, 513)), block=64, page_size=64, buffer=256),
    ],
    ids=str,
)
def test_the_parts_of_four_ranks_are_the_whole(case: Case, target: str) -> None:
    problem = build(case, "cpu" if target == "cpu" else "cuda")
    parts = [part_of(problem, rank, 4, target) for rank in range(4)]

    def merged(one: _Result, other: _Result) -> _Result:
        one.become(one, other, target)
        return one

    whole = reduce(merged, parts)
    expected, expected_lse = one_device(problem, target)
    assert_output(whole.output.to(expected.dtype), expected, case.dtype, factor=2)
    assert_lse(whole.lse, expected_lse, case.dtype, factor=2)


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.cuda
def test_nccl_with_one_rank(tmp_path: Path) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        sent = [torch.randn(1 << 16, device="cuda"), torch.randn(7, 3, device="cuda").bfloat16()]
        received = exchange(sent, 1, dist.group.WORLD).wait()
        assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(sent, received, strict=True))
        problem = build(Case(dtype="bf16", sinks=True), "cuda")
        expected, expected_lse = one_device(problem, "cuda")
        for run in (run_context_parallel, run_head_parallel):
            output, lse = run(problem, 0, 1, "cuda")
            assert_output(output, expected, "bf16", factor=2)
            assert_lse(lse, expected_lse, "bf16", factor=2)
    finally:
        dist.destroy_process_group()


def arguments(**changes: Any) -> dict[str, Any]:
    """Return what a good call on one rank takes, but for `changes`."""
    problem = build(Case(heads=2, lengths=((5, 3), (0, 20))))
    keys = InterleavedKeys(16, 0, 1)
    given = {
        "q": problem.q, "kv_collection": own_cache(problem, keys), "layer_idx": 0, "weight": problem.weight,
        "input_row_offsets": problem.data.input_row_offsets, "mask": mla.CausalMask(), "scale": SCALE, "keys": keys,
        "start_positions": torch.tensor([5, 0]), "target": "cpu",
    }  # fmt: skip
    return {**given, **changes}


@pytest.mark.usefixtures("gloo")
def test_a_mesh_of_one_dimension_is_a_group() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("cp", "tp"))
    whole = context_parallel_prefill(**arguments())
    assert isinstance(whole, torch.Tensor)
    given = torch.full_like(whole, torch.nan)
    assert context_parallel_prefill(**arguments(group=mesh["cp"], output=given)) is given
    assert torch.equal(given, whole)
    with pytest.raises(ArgumentError, match=r"one of \('cp', 'tp'\); pass mesh\[name\]"):
        context_parallel_prefill(**arguments(group=mesh))


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"keys": InterleavedKeys(16, 1, 2)}, ArgumentError, "rank 1 of 2, but this is rank 0 of 1"),
        ({"keys": 64}, DTypeError, "keys must be InterleavedKeys or ContiguousKeys, got int"),
        ({"kv_collection": build(Case(lengths=((5, 3), (0, 20)))).data.cache}, ArgumentError, "seq_lens=keys.lengths"),
        ({"weight": lambda latent: latent}, DTypeError, "weight must be a torch.Tensor"),
        ({"sinks": torch.zeros(3)}, ShapeError, "sinks"),
        ({"mask": "causal"}, DTypeError, "CausalMask()"),
        ({"lse_layout": "T"}, ArgumentError, "lse_layout"),
        ({"start_positions": torch.zeros(3)}, MlaError, "start_positions"),
        ({"output": torch.empty(1)}, ShapeError, "output"),
        ({"group": 7}, DTypeError, "group must be a ProcessGroup, a DeviceMesh or None, got int"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        context_parallel_prefill(**arguments(**changes))
    assert words in str(caught.value)


def test_a_traced_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ArgumentError, match="call it outside"):
        context_parallel_prefill(**given)


def test_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    given = arguments()
    with pytest.raises(ArgumentError, match="init_process_group"):
        context_parallel_prefill(**given)
    with pytest.raises(ArgumentError, match="init_process_group"):
        head_parallel_prefill(**{name: given[name] for name in given if name not in ("keys", "start_positions")})
