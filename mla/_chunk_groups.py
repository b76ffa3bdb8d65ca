"""Which rows of q each chunk of a plan concerns, where the host knows the batch.

A sequence whose keys all lie in one chunk is attended straight into the output; one that crosses a border between
chunks is attended in parts, which alone have to be merged. A chunk therefore has up to three groups of rows, in the
order of the batch: the rest of a sequence that began before, the sequences that are whole, the start of one that goes
on. Other rows are touched by nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mla.plan import PrefillPlan


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [first, last) of q, whose sequences have keys in one chunk."""

    chunk: int
    first: int
    last: int
    starts: bool  # the chunk has the first keys of these sequences
    ends: bool  # and the last


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a plan in the order of their work, and what prefill takes for each."""

    groups: tuple[Group, ...]
    row_offsets: torch.Tensor  # int32 [G, B+1] on the device; other sequences have no rows. Of the group's own rows
    most_parted_rows: int  # rows of the longest group that is merged

    @staticmethod
    def of(plan: PrefillPlan) -> Groups | None:
        """Return the groups of a plan, worked out once; None where the host does not know the batch."""
        if plan.groups is None and plan.seq_lens_cpu is not None and plan.row_offsets_cpu is not None:
            seq_lens, offsets = plan.seq_lens_cpu.tolist(), plan.row_offsets_cpu.tolist()
            groups = tuple(split(seq_lens, offsets, plan.page_size, plan.buffer_token_size))
            bounds = torch.tensor([(g.first, g.last) for g in groups], dtype=torch.int64, device="cpu").view(-1, 2, 1)
            low, high = bounds.unbind(1)
            # A whole group is attended among all rows of q, a parted one by itself.
            parted = torch.tensor([not (g.starts and g.ends) for g in groups], device="cpu").view(-1, 1)
            rows = torch.tensor(offsets, dtype=torch.int64, device="cpu").clamp(low, high) - low * parted
            most = max((g.last - g.first for g in groups if not (g.starts and g.ends)), default=0)
            device = plan.buffer_lengths.device
            plan.groups = Groups(groups, rows.to(torch.int32).to(device, non_blocking=True), most)
        return plan.groups


def split(seq_lens: list[int], row_offsets: list[int], page_size: int, buffer_token_size: int) -> list[Group]:
    """Return the groups chunk by chunk; every sequence that has rows is in some.

    Parameters
    ----------
    seq_lens : list of int
        [B] cached + new tokens.
    row_offsets : list of int
        [B+1] cumulative new tokens.
    """
    groups: dict[tuple[int, bool, bool], Group] = {}
    start = 0
    last_chunk = max(-(-sum(-(-length // page_size) * page_size for length in seq_lens) // buffer_token_size) - 1, 0)
    for s, length in enumerate(seq_lens):
        first, last = row_offsets[s], row_offsets[s + 1]
        if first < last:
            begin = min(start // buffer_token_size, last_chunk)  # one that has no keys still has a result
            end = max((start + length - 1) // buffer_token_size, begin)
            for chunk in range(begin, end + 1):
                key = chunk, chunk == begin, chunk == end
                known = groups.get(key)
                groups[key] = Group(chunk, first if known is None else known.first, last, *key[1:])
        start += -(-length // page_size) * page_size
    # In the batch's order: what goes on from before, what is whole, what goes on behind.
    return sorted(groups.values(), key=lambda group: (group.chunk, group.first))
