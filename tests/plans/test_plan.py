"""The plan's numbers: the specification's examples, and a second statement of the plan on random batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla.plan import PrefillPlan, generic_flare_mla_prefill_ragged_paged_plan, prefill_plan
from tests.support.paged import offsets_of
from tests.support.plans import EXAMPLES, Tables, lengths_only, rows_by_hand


def tables_of(plan: PrefillPlan) -> Tables:
    return Tables(
        plan.buffer_row_offsets.tolist(),
        plan.cache_offsets.tolist(),
        plan.buffer_lengths.tolist(),
        int(plan.required_chunks),
    )


def make(cached: list[int], new: list[int], page_size: int, size: int, chunks: int, first: int = 0) -> Tables:
    longest = max((c + n for c, n in zip(cached, new, strict=True)), default=0)
    cache = lengths_only(cached, page_size, -(-longest // page_size))
    offsets = torch.tensor(offsets_of(new, first), dtype=torch.int32)
    return tables_of(prefill_plan(offsets, cache, 0, size, max_chunks=chunks, target="cpu"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    page_size, size, chunks, cached, new, tables = EXAMPLES[name]
    assert make(cached, new, page_size, size, chunks) == tables


@pytest.mark.parametrize("name", EXAMPLES)
def test_second_statement_gives_the_examples(name: str) -> None:
    page_size, size, chunks, cached, new, tables = EXAMPLES[name]
    assert rows_by_hand(cached, new, page_size, size, chunks) == tables


lengths = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129]), st.integers(0, 300))


@settings(max_examples=150, deadline=None)
@given(
    batch=st.lists(st.tuples(lengths, lengths), min_size=1, max_size=7),
    page_size=st.sampled_from([1, 2, 7, 16, 64, 128]),
    size=st.one_of(st.sampled_from([64, 128, 256]), st.integers(1, 700)),
    chunks=st.integers(1, 6),
    first=st.integers(0, 5),
)
def test_equals_second_statement(
    batch: list[tuple[int, int]], page_size: int, size: int, chunks: int, first: int
) -> None:
    cached, new = [c for c, _ in batch], [n for _, n in batch]
    assert make(cached, new, page_size, size, chunks, first) == rows_by_hand(cached, new, page_size, size, chunks)


@pytest.mark.parametrize("dtype", [torch.uint32, torch.int32])
def test_every_element_is_written(dtype: torch.dtype) -> None:
    cache = lengths_only([300, 128], 128, 3)
    rows = torch.full((3, 3), -5, dtype=torch.int32).view(dtype)
    offsets = torch.full((3, 2), -5, dtype=torch.int32).view(dtype)
    sizes = torch.full((3,), -5, dtype=torch.int32)
    required = torch.full((1,), -5, dtype=torch.int32)
    generic_flare_mla_prefill_ragged_paged_plan(
        torch.tensor([0, 0, 64]), cache, 0, 512, rows, offsets, sizes, required_chunks=required, target="cpu"
    )
    assert Tables(rows.tolist(), offsets.tolist(), sizes.tolist(), int(required)) == EXAMPLES["H"].tables


def test_empty_batch_writes_lengths_alone() -> None:
    cache = lengths_only([], 64, 1)
    rows, offsets = torch.full((4, 1), 7, dtype=torch.int32), torch.zeros(4, 0, dtype=torch.int32)
    sizes, required = torch.full((4,), 7, dtype=torch.int32), torch.full((1,), 7, dtype=torch.int32)
    generic_flare_mla_prefill_ragged_paged_plan(
        torch.tensor([0]), cache, 0, 512, rows, offsets, sizes, required_chunks=required, target="cpu"
    )
    assert (rows == 7).all()
    assert sizes.tolist() == [0] * 4
    assert required.item() == 0


def test_all_sequences_empty() -> None:
    assert make([0, 0], [0, 0], 64, 128, 2) == Tables([[0] * 3] * 2, [[0] * 2] * 2, [-1, -1], 0)


def test_sums_pass_32_bits() -> None:
    # 5 sequences of 2^30 tokens: S and c * N pass 2^32, while the tables stay within 32 bits.
    length, size = 2**30, 2**31 - 64
    pages = torch.empty(1, 2**20, 576, dtype=torch.bfloat16, device="meta")
    from mla.kv_cache import PagedKVCacheCollection

    cache = PagedKVCacheCollection.from_pages(
        pages, torch.zeros(5, 2**10, dtype=torch.int32), torch.full((5,), length, dtype=torch.int32)
    )
    offsets = torch.zeros(6, dtype=torch.int32)
    result = tables_of(prefill_plan(offsets, cache, 0, size, max_chunks=4, target="cpu"))
    starts = [s * length for s in range(6)]
    expected = Tables(
        [[min(max(start - c * size, 0), size) for start in starts] for c in range(4)],
        [[min(max(c * size - start, 0), length) for start in starts[:5]] for c in range(4)],
        [min(size, 5 * length - c * size) if c * size < 5 * length else -1 for c in range(4)],
        3,
    )
    assert result == expected


def test_large_batch_is_exact() -> None:
    batch = 65_536
    cached = torch.randint(0, 90, (batch,), dtype=torch.int32)
    new = torch.randint(0, 40, (batch,), dtype=torch.int32)
    cache = lengths_only(cached.tolist(), 64, 3)
    offsets = torch.nn.functional.pad(new.cumsum(0), (1, 0))
    plan = prefill_plan(offsets, cache, 0, 2**20, max_chunks=12, target="cpu")
    padded = (cached.long() + new + 63) // 64 * 64
    total = int(padded.sum())
    assert int(plan.required_chunks) == -(-total // 2**20)
    held = plan.buffer_row_offsets.long().diff(dim=1).sum(0)  # rows of each sequence over all chunks
    assert torch.equal(held, padded)
    # A sequence's next chunk goes on where the last one ended.
    assert torch.equal(plan.cache_offsets[1:].long(), plan.buffer_row_offsets.long().diff(dim=1).cumsum(0)[:-1])
