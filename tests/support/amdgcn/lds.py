"""Local data share of one workgroup, and a count of the bank conflicts of what ran."""

from __future__ import annotations

import numpy as np

from .memory import MemoryFault
from .wave import GARBAGE

BANKS = 32


class Lds:
    """`size` bytes, filled with garbage."""

    def __init__(self, size: int) -> None:
        self.words = np.full((size + 3) // 4, GARBAGE, np.uint32)
        self.bytes = self.words.view(np.uint8)
        self.size = size

    def _check(self, offset: np.ndarray, size: int) -> None:
        if len(offset) and (int(offset.max()) + size > self.size or int(offset.min()) < 0):
            raise MemoryFault(f"LDS access of {size} bytes at offset {int(offset.max())} of {self.size}")

    def load(self, offset: np.ndarray, size: int) -> np.ndarray:
        """Bytes at int64 offsets: uint32 [max(1, size // 4), n]; 1 and 2 bytes are zero-extended."""
        self._check(offset, size)
        if size >= 4 and not (offset & 3).any():
            index = offset >> 2
            if size == 4:
                return self.words[index][None]
            return self.words[index + np.arange(size // 4)[:, None]]
        out = np.zeros((len(offset), 4 * max(1, size // 4)), np.uint8)
        out[:, :size] = self.bytes[offset[:, None] + np.arange(size)]
        return out.view(np.uint32).T

    def store(self, offset: np.ndarray, size: int, data: np.ndarray) -> None:
        """Write uint32 data [max(1, size // 4), n]; of equal offsets the last lane wins."""
        self._check(offset, size)
        if size >= 4 and not (offset & 3).any():
            index = offset >> 2
            for n in range(size // 4):
                self.words[index + n] = data[n]
        else:
            raw = np.ascontiguousarray(data.T).view(np.uint8)[:, :size]
            self.bytes[offset[:, None] + np.arange(size)] = raw
