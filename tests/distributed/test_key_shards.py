"""Every token of every sequence is on exactly one rank, and the rank knows where it stands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla import ArgumentError
from mla.distributed import ContiguousKeys, InterleavedKeys, KeyShard, own_rows

TOTALS = st.lists(st.integers(0, 70), min_size=1, max_size=4)


def shards(kind: str, totals: torch.Tensor, unit: int, world: int) -> list[KeyShard]:
    if kind == "interleaved":
        return [InterleavedKeys(unit, rank, world) for rank in range(world)]
    return [ContiguousKeys.even(totals, unit, rank, world) for rank in range(world)]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["interleaved", "contiguous"]), totals=TOTALS, unit=st.integers(1, 9), world=st.integers(1, 5)
)
def test_lengths_positions_and_ownership_agree(kind: str, totals: list[int], unit: int, world: int) -> None:
    wanted = torch.tensor(totals)
    seen: list[list[int]] = [[] for _ in totals]
    for keys in shards(kind, wanted, unit, world):
        lengths = keys.lengths(wanted)
        firsts = keys.first_positions(len(totals), torch.device("cpu"))
        for b, total in enumerate(totals):
            mine = keys.own(b, torch.arange(total)).nonzero().squeeze(1)
            assert len(mine) == lengths[b]
            positions = keys.positions(torch.arange(len(mine))).expand(len(totals), -1)[b]
            assert torch.equal(positions, mine)
            assert len(mine) == 0 or firsts[b] == mine[0]
            seen[b] += mine.tolist()
    assert [sorted(positions) for positions in seen] == [list(range(total)) for total in totals]


def test_contiguous_shards_are_whole_pages_and_what_grows_is_the_last_ranks() -> None:
    totals = torch.tensor([100, 3])
    shares = [ContiguousKeys.even(totals, 16, rank, 3) for rank in range(3)]
    assert [keys.lengths(totals).tolist() for keys in shares] == [[48, 3], [48, 0], [4, 0]]
    assert shares[2].lengths(totals + 50).tolist() == [54, 21]


def test_rows_to_store_divide_the_step() -> None:
    cached, new = [30, 0, 5], [20, 40, 1]
    found = [own_rows(InterleavedKeys(8, rank, 3), cached, new) for rank in range(3)]
    assert sorted(torch.cat([rows for rows, _ in found]).tolist()) == list(range(61))
    rows, offsets = found[1]  # tokens 8..15 of every 24
    assert offsets.tolist() == [0, 8, 24, 24] and offsets.dtype == torch.int32
    assert rows[:8].tolist() == [*range(2, 10)] and rows[8:].tolist() == [*range(28, 36), *range(52, 60)]


@pytest.mark.parametrize(("block", "rank", "world"), [(0, 0, 1), (16, 2, 2), (16, -1, 2)])
def test_refusals(block: int, rank: int, world: int) -> None:
    with pytest.raises(ArgumentError):
        InterleavedKeys(block, rank, world)
