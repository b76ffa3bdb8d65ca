"""Kernels over a cache of more than 2^31 elements, without a GPU: a sparse file stands in for the memory.

CUDA kernels run as host C++ and ROCm's compiled code in the interpreter, both on the addresses of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mla import dispatch
from mla.backends.cuda.gather import Gather
from mla.backends.cuda.prefill_sm80 import PrefillSm80
from mla.backends.cuda.prefill_sm90 import PrefillSm90
from mla.backends.cuda.store import Store
from mla.gather import gather_latent
from mla.kv_cache import PagedKVCacheCollection
from mla.store import store
from tests.support import cuda_execution, rocm
from tests.support.amdgcn import MemoryFault
from tests.support.cuda_execution import HostFault, Mutation, needs_compiler
from tests.support.hip import needs_clang
from tests.support.problems import Case, build
from tests.support.tolerance import assert_output

TOKENS = 131_072 * 64
#: Live pages by page size; rows of tokens from 3,728,271 on lie behind 2^31 elements.
LIVE = {1: [0, 3_728_270, 3_728_271, TOKENS - 1], 64: [0, 58_254, 58_255, TOKENS // 64 - 1]}

Use = Callable[..., Any]


@pytest.fixture(params=[pytest.param("cuda", marks=needs_compiler), pytest.param("rocm", marks=needs_clang)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def use(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int) -> Iterator[Use]:
    """Return what lets the public functions run an entry of the CUDA backend here, or those of ROCm's."""

    def of_cuda(arch: str, entry: Any, mutate: Mutation | None = None) -> None:
        cuda_execution.executed(monkeypatch, arch, entry, tmp_path, mutate, seed)
        for op in ("gather", "store"):
            monkeypatch.setattr(f"mla.{op}.resolve", dispatch.resolve)

    def of_rocm(arch: str, entry: Any, mutate: Mutation | None = None) -> None:
        rocm.through_public_functions(monkeypatch, rocm.executed(monkeypatch, "gfx942", mutate, seed))

    yield of_cuda if backend == "cuda" else of_rocm
    dispatch.forget()


def far_cache(page_size: int, folder: Path) -> tuple[PagedKVCacheCollection, torch.Tensor]:
    """Return a cache of one sequence of four pages, and a copy of their rows."""
    try:
        flat = torch.from_file(str(folder / "pages"), shared=True, size=TOKENS * 576, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no sparse file of {TOKENS * 1152} bytes here: {error}")
    pages = flat.view(-1, page_size, 576)
    live = torch.tensor(LIVE[page_size])
    pages[live] = torch.randn(4, page_size, 576).bfloat16()
    table, cached = live[None].to(torch.int32), torch.zeros(1, dtype=torch.int32)
    return PagedKVCacheCollection.from_pages(pages, table, cached), pages[live].reshape(-1, 576)


def overflow(text: str) -> str:
    """Compute the offset of a row in 32 bits."""
    for name in ("place.page", "page"):
        text = text.replace(f"rows.data + {name} * rows.page_stride", f"rows.data + int({name} * rows.page_stride)")
    return text


def gathered(cache: PagedKVCacheCollection, count: int, backend: str) -> torch.Tensor:
    output = torch.zeros(count, 512, dtype=torch.bfloat16)
    tables = [torch.tensor(values, dtype=torch.int32) for values in ([0, count], [0])]
    gather_latent(*tables, count, cache, 0, output, target=backend)
    return output


@pytest.mark.parametrize("page_size", [1, 64])
def test_gather(page_size: int, use: Use, backend: str, tmp_path: Path) -> None:
    cache, rows = far_cache(page_size, tmp_path)
    use("sm_80", Gather)
    assert torch.equal(gathered(cache, len(rows), backend), rows[:, :512])


def test_store(use: Use, backend: str, tmp_path: Path) -> None:
    cache, rows = far_cache(64, tmp_path)
    use("sm_80", Store)
    new = torch.randn(len(rows), 576).bfloat16()
    store(cache, 0, torch.tensor([0, len(rows)], dtype=torch.int32), new[:, :512], new[:, 512:], target=backend)
    layer = cache.layer(0)
    live = layer.page_table[0].long()
    assert torch.equal(torch.cat([layer.latent[live], layer.rope[live]], 2).view(-1, 576), new)


@pytest.mark.parametrize(
    ("backend", "arch", "entry", "page_size"),
    [
        pytest.param("cuda", "sm_90a", PrefillSm90, 64, marks=needs_compiler),  # by tensor maps
        pytest.param("cuda", "sm_80", PrefillSm80, 1, marks=needs_compiler),  # row by row
        pytest.param("rocm", "", None, 64, marks=needs_clang),
        pytest.param("rocm", "", None, 1, marks=needs_clang),
    ],
)
def test_prefill(arch: str, entry: Any, page_size: int, use: Use, backend: str, tmp_path: Path) -> None:
    cache, rows = far_cache(page_size, tmp_path)
    use(arch, entry)
    problem = build(Case(lengths=((0, len(rows)),), heads=1, page_size=page_size, spare_rows=(0, 0)), "cpu")
    problem.operands["k_rope"] = cache.layer(0)
    assert_output(problem.run(backend)[0], problem.expect()[0], "bf16")


def test_an_offset_of_32_bits_is_noticed(use: Use, backend: str, tmp_path: Path) -> None:
    cache, rows = far_cache(64, tmp_path)
    use("sm_80", Gather, overflow)
    with pytest.raises((HostFault, AssertionError, MemoryFault)):
        assert torch.equal(gathered(cache, len(rows), backend), rows[:, :512])
