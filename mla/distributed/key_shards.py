"""Which keys of a sequence a rank holds, and where in the sequence they stand.

A rank numbers its own tokens of each sequence 0, 1, 2, ... in the order of the sequence and keeps them in pages as any
cache does; its page size is its own affair. A shard turns such a number into the position in the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla.errors import ArgumentError

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class InterleavedKeys:
    """Blocks of tokens dealt out in turn: block n of every sequence lies on rank n % world.

    Attributes
    ----------
    block : int
        Tokens a block; the page size where whole pages are dealt out.
    rank, world : int
        This rank's place in the group, and how many there are.
    """

    block: int
    rank: int
    world: int

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ArgumentError(f"block must be at least 1 token, got {self.block}")
        if not 0 <= self.rank < self.world:
            raise ArgumentError(f"rank must be in [0, {self.world}), got {self.rank}")

    def lengths(self, totals: torch.Tensor) -> torch.Tensor:
        """Return how many of the first ``totals[b]`` tokens of each sequence are here: [B], as `totals` is."""
        cycle = self.block * self.world
        return totals // cycle * self.block + (totals % cycle - self.rank * self.block).clamp(0, self.block)

    def positions(self, index: torch.Tensor) -> torch.Tensor:
        """Return the positions of own tokens [n] by their numbers [n]: [1, n], the same in every sequence."""
        return ((index // self.block * self.world + self.rank) * self.block + index % self.block).unsqueeze(0)

    def own(self, sequence: int, positions: torch.Tensor) -> torch.Tensor:
        """Return which positions of a sequence are here: bool, of the same shape."""
        return positions // self.block % self.world == self.rank

    def first_positions(self, batch_size: int, device: torch.device) -> torch.Tensor:
        """Return the position of own token 0 of each sequence: int32 [B]."""
        return torch.full((batch_size,), self.rank * self.block, dtype=torch.int32, device=device)

    @property
    def strides(self) -> tuple[int, int] | None:
        """Tokens a block, and from one own block to the next; None where all of them follow each other."""
        return None if self.world == 1 else (self.block, self.block * self.world)


@dataclass(frozen=True, slots=True, eq=False)
class ContiguousKeys:
    """One stretch of each sequence: the positions [first[b], end[b]).

    Attributes
    ----------
    first, end : torch.Tensor
        int32 [B], on the device of the call. `end` may lie past what the sequence holds.
    """

    first: torch.Tensor
    end: torch.Tensor

    @classmethod
    def even(cls, totals: torch.Tensor, page_size: int, rank: int, world: int) -> ContiguousKeys:
        """Share out sequences of ``totals[b]`` tokens by whole pages, evenly; what they grow is the last rank's."""
        pages = (totals + page_size - 1) // page_size
        share = (pages + world - 1) // world * page_size
        first = (share * rank).to(torch.int32)
        return cls(first, first + share.to(torch.int32) if rank < world - 1 else torch.full_like(first, _INT32_MAX))

    def lengths(self, totals: torch.Tensor) -> torch.Tensor:
        """Return how many of the first ``totals[b]`` tokens of each sequence are here: [B], as `totals` is."""
        return (totals.minimum(self.end.to(totals)) - self.first.to(totals)).clamp(min=0)

    def positions(self, index: torch.Tensor) -> torch.Tensor:
        """Return the positions of own tokens by their numbers [n]: [B, n]."""
        return self.first.to(index).unsqueeze(1) + index

    def own(self, sequence: int, positions: torch.Tensor) -> torch.Tensor:
        """Return which positions of a sequence are here: bool, of the same shape."""
        return (positions >= int(self.first[sequence])) & (positions < int(self.end[sequence]))

    def first_positions(self, batch_size: int, device: torch.device) -> torch.Tensor:
        """Return the position of own token 0 of each sequence: int32 [B]."""
        return self.first

    @property
    def strides(self) -> None:
        """Return None: own tokens follow each other."""
        return None


KeyShard = InterleavedKeys | ContiguousKeys


def own_rows(keys: KeyShard, cached: Sequence[int], new: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of this step's rows the rank has to store.

    Parameters
    ----------
    keys : InterleavedKeys or ContiguousKeys
        The latter's tensors are read: that synchronises if they are on a device.
    cached, new : sequence of int
        [B] tokens of the whole sequences before this step, and of this step.

    Returns
    -------
    rows : torch.Tensor
        int64 [n] on the CPU: own rows among the step's ``sum(new)``, in their order.
    input_row_offsets : torch.Tensor
        int32 [B+1] on the CPU: how they divide among the sequences, as ``store`` takes it.
    """
    rows, counts, first = [torch.empty(0, dtype=torch.int64)], [0], 0
    for b, (before, count) in enumerate(zip(cached, new, strict=True)):
        mine = keys.own(b, torch.arange(before, before + count)).nonzero().squeeze(1)
        rows.append(mine + first)
        counts.append(mine.numel())
        first += count
    return torch.cat(rows), torch.tensor(counts).cumsum(0).to(torch.int32)
