"""Bank conflicts of executed LDS instructions: 32 banks of 4 bytes, so many lanes at a time as fill 128 bytes.

Which lanes share a cycle is the vendor's: neighbours for writes and narrow accesses; for ds_read_b128 of CDNA3 groups
of four from both halves of 32 lanes (AMD's Composable Kernel notes, "LDS bank conflicts"). Reads of one word by several
lanes are one.
"""

from __future__ import annotations

import numpy as np

BANKS = 32


def _groups(size: int, *, interleaved: bool) -> np.ndarray:
    """Lanes of each cycle, [cycles, lanes]."""
    if not interleaved:
        return np.arange(64).reshape(-1, 128 // size)
    first = np.concatenate([np.r_[4 * g : 4 * g + 4, 16 + 4 * (g ^ 1) : 20 + 4 * (g ^ 1)] for g in range(4)])
    return np.concatenate([first, first + 32]).reshape(8, 8)


def extra_cycles(offsets: np.ndarray, size: int, *, interleaved: bool = False) -> int:
    """Cycles beyond the conflict-free ones of an access of `size` bytes at each of 64 byte offsets."""
    extra = 0
    for lanes in _groups(size, interleaved=interleaved):
        words = np.unique((offsets[lanes, None] + np.arange(0, size, 4)) // 4)
        extra += np.bincount(words % BANKS).max() - 1
    return int(extra)
