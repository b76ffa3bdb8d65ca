"""What a DeepSeek-V3 step asks of a GPU is among what is compiled ahead for it."""

from __future__ import annotations

import functools

import pytest
import torch

import mla
from mla import dispatch, masks, registry
from mla.backends.cuda import ops as cuda
from mla.backends.rocm import ops as rocm
from mla.kv_cache import PagedKVCacheCollection
from mla.problem import Problem

NEW, PAGE, HEADS = 4, 64, 2
#: Cache and attention; "narrow" is the fp8 format of the hardware.
JOBS = {
    "bf16": ("bf16", "bf16"),
    "over a cache in fp8": ("narrow", "bf16"),
    "over a cache in fp8, its rope in bf16": ("narrow and bf16", "bf16"),
    "attended in fp8": ("bf16", "narrow"),
    "in fp8 alone": ("narrow", "narrow"),
    "attended in fp8, the cache's rope in bf16": ("narrow and bf16", "narrow"),
}
OPS = {"cuda": cuda, "rocm": rocm}


@functools.cache
def posed(job: str, narrow: torch.dtype) -> tuple[Problem, ...]:
    """Return the problems of a step, stored and attended to in one chunk and in three, on the CPU."""
    cache_dtype, attention = JOBS[job]
    rows = torch.zeros(3, PAGE, 576)
    if cache_dtype == "bf16":
        blocks, more = rows.bfloat16(), {}
    elif cache_dtype == "narrow":
        blocks, more = rows.to(narrow), {"scales": torch.ones(3, PAGE, 5)}
    else:
        blocks, more = rows[..., :512].to(narrow), {"scales": torch.ones(3, PAGE, 4)}
        more["kpe_cache"] = rows[..., 512:].bfloat16()
    table, lengths = torch.arange(3, dtype=torch.int32).view(1, 3), torch.tensor([3 * PAGE - NEW], dtype=torch.int32)
    cache = PagedKVCacheCollection.from_pages(blocks, table, lengths, **more)
    offsets = torch.tensor([0, NEW], dtype=torch.int32)
    q, weight = torch.zeros(NEW, HEADS, 192).bfloat16(), torch.zeros(HEADS * 256, 512).bfloat16()
    seen: list[Problem] = []

    def watch(implementation: object, problem: Problem, run: dispatch.Runner) -> dispatch.Runner:
        seen.append(problem)
        return run

    dispatch.watch(watch)
    try:
        with torch.no_grad():
            cache.store(0, offsets, rows[0, :NEW, :512].bfloat16(), rows[0, :NEW, 512:].bfloat16(), target="cpu")
            for size, chunks in ((3 * PAGE, 1), (PAGE, 3)):
                for return_lse in (False, True):
                    mla.chunked_prefill(
                        q, cache, 0, weight, offsets, masks.CausalMask(), 0.1, buffer_token_size=size,
                        max_chunks=chunks, return_lse=return_lse, target="cpu",
                        attention_dtype=narrow if attention == "narrow" else None,
                    )  # fmt: skip
    finally:
        dispatch.watch(None)
    return tuple(seen)


@pytest.mark.parametrize(
    "target", ["cuda:sm_80", "cuda:sm_89", "cuda:sm_90a", "cuda:sm_120", "rocm:gfx90a", "rocm:gfx942"]
)
@pytest.mark.parametrize("job", JOBS)
def test_a_step_is_compiled_ahead(job: str, target: str) -> None:
    backend, arch = target.split(":")
    if arch == "gfx90a" and "narrow" in JOBS[job][1]:
        pytest.skip("gfx90a multiplies no fp8 matrices")
    ahead = {kernel_id for kernel_id, _ in OPS[backend].variants(arch)}
    problems = posed(job, torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn)
    assert {problem.op for problem in problems} >= {"plan", "gather", "store", "prefill", "merge"}
    for problem in problems:
        explanation = mla.explain(problem.op, problem, target=target)
        assert explanation.chosen is not None, str(explanation)
        entry = registry.default()[explanation.chosen].load()
        missing = {spec.kernel_id(arch) for spec in entry.specs(problem, arch)} - ahead
        assert not missing
