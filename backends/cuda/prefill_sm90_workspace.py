"""The scratch memory of ``sm90/prefill.cu``: the order of work of a large batch, and results of parts of the keys."""

from __future__ import annotations

from dataclasses import dataclass

#: Sequences of a batch whose order each thread block works out by itself; more are ordered by a kernel of their own.
TABLE_SEQUENCES = 32
#: Multiprocessors that the parts of a sequence are made for; a device with fewer has less.
PROCESSORS_MAX = 132

ENTRY_BYTES = 48
_ALIGNMENT = 16
# As prefill_schedule.cuh has them.
_LEAST_PART = 2048
_SPLIT_WAVES = 4


@dataclass(frozen=True)
class Workspace:
    """How much a call may need of it and where what lies, from what the host knows.

    Attributes
    ----------
    slots : int
        At most so many parts of blocks of 64 rows have results.
    slot_bytes : int
    entries : int
        Of the table, 0 where each thread block makes its own.
    """

    slots: int
    slot_bytes: int
    entries: int

    @classmethod
    def of(cls, *, T: int, L: int, B: int, H: int, v_head_dim: int, row_groups: int) -> Workspace:
        """Bound the parts of a batch of B sequences with T rows of q and L of k together, and H heads."""
        # Parts of a sequence fill at most _SPLIT_WAVES waves of items of row_groups blocks; no part is shorter than
        # _LEAST_PART.
        by_waves = min(B, L // (2 * _LEAST_PART)) * row_groups * _SPLIT_WAVES * PROCESSORS_MAX
        by_length = (-(-T // 64) + row_groups * B) * H * (L // _LEAST_PART)
        slots = min(by_waves, by_length)
        return cls(slots, 128 * 4 * (v_head_dim // 2 + 4), B + 1 if B > TABLE_SEQUENCES else 0)

    @property
    def ordered(self) -> bool:
        """Whether a kernel before the other one orders the sequences."""
        return self.entries > 0

    @property
    def arrivals(self) -> int:
        """Words that count arrivals, among the counters of the stream: where a kernel goes ahead, it zeroes its own."""
        return 0 if self.ordered else self.slots

    @property
    def bytes(self) -> int:
        """Return how many bytes any address is good for."""
        if not (self.slots or self.entries):
            return 0
        return _ALIGNMENT - 1 + self._slots_at + self.slots * self.slot_bytes

    @property
    def _slots_at(self) -> int:
        arrivals = 4 * self.slots if self.ordered else 0
        return self.entries * ENTRY_BYTES + -(-arrivals // _ALIGNMENT) * _ALIGNMENT

    def places(self, address: int) -> tuple[int, int, int]:
        """Return the addresses of table (0: none), arrivals (of an ordered batch) and slots in memory at `address`."""
        base = -(-address // _ALIGNMENT) * _ALIGNMENT
        table = base if self.ordered else 0
        return table, base + self.entries * ENTRY_BYTES, base + self._slots_at
