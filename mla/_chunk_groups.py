"""Which rows of q each chunk of a plan concerns, where the host knows the batch.

Rows whose keys all lie in one chunk are attended straight into the output; others are attended in parts, one for each
chunk that has keys they see, which alone have to be merged. A sequence may have both: under a causal mask its rows
before a border between chunks see nothing behind it. In the order of the batch, a chunk therefore has up to three
groups of rows: what began in chunks before, what is whole, what goes on behind. Other rows are touched by nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla.mask_expr import postorder, variable
from mla.mask_interval import TILE_HIDDEN

if TYPE_CHECKING:
    from mla.masks import Mask
    from mla.plan import PrefillPlan

#: Whether all keys of positions [k_lo, k_hi] are hidden from the queries [q_lo, q_hi] of a sequence: (b, q_lo, q_hi,
#: k_lo, k_hi).
Hidden = Callable[[int, int, int, int, int], bool]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [first, last) of q, which have keys in one chunk; those before `through` have their last ones there."""

    chunk: int
    first: int
    last: int
    starts: bool  # and their first ones too
    through: int

    @property
    def whole(self) -> bool:
        """Whether all keys of these rows are in the chunk."""
        return self.starts and self.through == self.last


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a plan in the order of their work, and what prefill takes for each.

    Attributes
    ----------
    groups : tuple of Group
    row_offsets : torch.Tensor
        int32 [G, B+1] on the device: the offsets of the group's own rows, where other sequences have none. A whole
        group is attended among all rows of q, another one by itself.
    start_positions, kv_lengths : torch.Tensor or None
        int32 [G, B] and [B] where a group begins or ends inside a sequence: positions do not follow from its rows then.
    rows : int
        Rows of q that there are at least.
    most_parted_rows : int
        Rows of the longest group that is not whole.
    """

    groups: tuple[Group, ...]
    row_offsets: torch.Tensor
    start_positions: torch.Tensor | None
    kv_lengths: torch.Tensor | None
    rows: int
    most_parted_rows: int

    @staticmethod
    def of(plan: PrefillPlan, mask: Mask | None, heads: int) -> Groups | None:
        """Return the groups of a plan, worked out once for a mask; None where the host does not know the batch.

        Parameters
        ----------
        mask : Mask or None
            None where positions are not those of the plan's sequences.
        heads : int
        """
        if plan.seq_lens_cpu is None or plan.row_offsets_cpu is None:
            return None
        if mask is not None and (mask.program.captures or mask.program.has_bias):
            mask = None  # data of the device, and rows of a bias that count from the sequence's first query
        key = None if mask is None else (mask.program, heads)
        found = plan.groups.get(key)
        if found is None:
            hidden = None if mask is None else _hidden_by(mask, heads)
            seq_lens, offsets = plan.seq_lens_cpu.long(), plan.row_offsets_cpu.long()
            groups = tuple(split(seq_lens.tolist(), offsets.tolist(), plan.page_size, plan.buffer_token_size, hidden))
            found = plan.groups[key] = _make(groups, seq_lens, offsets, plan.buffer_lengths.device)
        return found


def _make(groups: tuple[Group, ...], seq_lens: torch.Tensor, offsets: torch.Tensor, device: torch.device) -> Groups:
    """Put the tables of groups together, in one copy to the device."""
    bounds = torch.tensor([(g.first, g.last) for g in groups], dtype=torch.int64, device="cpu").view(-1, 2, 1)
    first, last = bounds.unbind(1)
    parted = torch.tensor([not g.whole for g in groups], device="cpu").view(-1, 1)
    rows = offsets.clamp(first, last) - first * parted
    starts = seq_lens - offsets.diff() + (first - offsets[:-1]).clamp(min=0)
    tables = [rows.flatten(), starts.flatten(), seq_lens]
    sizes = [len(table) for table in tables]
    row_offsets, start_positions, kv_lengths = (
        torch.cat(tables).to(torch.int32).to(device, non_blocking=True).split(sizes)
    )
    inside = not set(bounds.flatten().tolist()) <= set(offsets.tolist())
    return Groups(
        groups,
        row_offsets.view(rows.shape),
        start_positions.view(starts.shape) if inside else None,
        kv_lengths if inside else None,
        max((g.last for g in groups), default=0),
        max((g.last - g.first for g in groups if not g.whole), default=0),
    )


def _hidden_by(mask: Mask, heads: int) -> Hidden:
    asked = range(heads if variable("h") in postorder(mask.program.expression) else 1)

    def hidden(b: int, q_lo: int, q_hi: int, k_lo: int, k_hi: int) -> bool:
        return all(mask.tile_class(b, h, q_lo, q_hi, k_lo, k_hi) == TILE_HIDDEN for h in asked)

    return hidden


def split(
    seq_lens: list[int],
    row_offsets: list[int],
    page_size: int,
    buffer_token_size: int,
    hidden: Hidden | None = None,
) -> list[Group]:
    """Return the groups chunk by chunk; every sequence that has rows is in some.

    Parameters
    ----------
    seq_lens : list of int
        [B] cached + new tokens.
    row_offsets : list of int
        [B+1] cumulative new tokens.
    hidden : callable, optional
        What the mask hides; nothing when missing.
    """
    groups: list[Group] = []
    whole: dict[int, int] = {}  # place of the whole group of a chunk
    start = 0
    last_chunk = max(-(-sum(-(-length // page_size) * page_size for length in seq_lens) // buffer_token_size) - 1, 0)
    for s, length in enumerate(seq_lens):
        first, last = row_offsets[s], row_offsets[s + 1]
        position = length - last  # of a row, less the row
        chunk = begin = min(start // buffer_token_size, last_chunk)  # one that has no keys still has a result
        end = max((start + length - 1) // buffer_token_size, begin)
        while first < last:
            through = last
            if chunk < end:
                border = (chunk + 1) * buffer_token_size - start  # the first key behind the chunk
                through = min(max(border - position, first), last)
                if first < through and not (hidden and hidden(s, first + position, border - 1, border, length - 1)):
                    through = first
            if chunk > begin:
                groups.append(Group(chunk, first, last, False, through))
            else:
                if first < through:
                    place = whole.setdefault(chunk, len(groups))
                    before = groups[place].first if place < len(groups) else first
                    groups[place : place + 1] = [Group(chunk, before, through, True, through)]
                if through < last:
                    groups.append(Group(chunk, through, last, True, through))
            first, chunk = through, chunk + 1
        start += -(-length // page_size) * page_size
    # In the batch's order: what goes on from before, what is whole, what goes on behind.
    return sorted(groups, key=lambda group: (group.chunk, group.first))
