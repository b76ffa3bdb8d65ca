"""Global memory: the caller's own buffers at their real addresses, every access checked against their bounds."""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from typing import Any

import numpy as np


class MemoryFault(Exception):
    """A lane read or wrote outside every buffer."""


class Memory:
    """A set of disjoint buffers, addressed by the addresses they have on the host."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._buffers: dict[int, np.ndarray] = {}
        self._words: dict[int, np.ndarray | None] = {}

    def add(self, buffer: Any) -> int:
        """Make an array or CPU tensor (its whole storage) accessible; returns the address of its first element."""
        if isinstance(buffer, np.ndarray):
            address = buffer.ctypes.data
            whole = buffer
            while isinstance(whole.base, np.ndarray):
                whole = whole.base
            start, size = whole.ctypes.data, whole.nbytes
            owner: Any = whole
        else:
            address = buffer.data_ptr()
            owner = buffer.untyped_storage()
            start, size = owner.data_ptr(), owner.nbytes()
        if size:
            self.add_range(start, size, owner)
        return address

    def add_range(self, start: int, size: int, owner: Any = None) -> None:
        """Make `size` bytes at a host address accessible; `owner` is kept alive."""
        if start in self._buffers and len(self._buffers[start]) >= size:
            return
        raw = (ctypes.c_uint8 * size).from_address(start)
        raw.owner = owner
        view = np.frombuffer(raw, np.uint8)
        if start not in self._buffers:
            insort(self._starts, start)
        self._buffers[start] = view
        self._words[start] = view[: size & ~3].view(np.uint32) if start % 4 == 0 else None

    def _find(self, address: int) -> int:
        place = bisect_right(self._starts, address) - 1
        if place >= 0:
            start = self._starts[place]
            if address - start < len(self._buffers[start]):
                return start
        raise MemoryFault(f"address {address:#x} lies in no buffer")

    def _split(self, addresses: np.ndarray, size: int) -> list[tuple[int, np.ndarray]]:
        """Group lanes by the buffer they fall into; [(start, indices into addresses)]."""
        low, high = int(addresses.min()), int(addresses.max())
        start = self._find(low)
        if high + size - start <= len(self._buffers[start]):
            return [(start, slice(None))]  # type: ignore[list-item]
        groups: dict[int, list[int]] = {}
        for n, address in enumerate(addresses.tolist()):
            start = self._find(address)
            if address + size - start > len(self._buffers[start]):
                over = address + size - start - len(self._buffers[start])
                raise MemoryFault(f"lane access of {size} bytes at {address:#x} ends {over} bytes past its buffer")
            groups.setdefault(start, []).append(n)
        return [(start, np.array(lanes)) for start, lanes in groups.items()]

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Bytes at each address: uint32 [max(1, size // 4), n]; 1 and 2 bytes are zero-extended."""
        out = np.empty((max(1, size // 4), len(addresses)), np.uint32)
        if not len(addresses):
            return out
        for start, lanes in self._split(addresses, size):
            offset = (addresses[lanes] - np.uint64(start)).astype(np.int64)
            words = self._words[start]
            if size >= 4 and words is not None and not (offset & 3).any():
                index = offset >> 2
                for n in range(size // 4):
                    out[n, lanes] = words[index + n]
            else:
                data = self._buffers[start][offset[:, None] + np.arange(size)]
                wide = np.zeros((len(offset), 4 * len(out)), np.uint8)
                wide[:, :size] = data
                out[:, lanes] = wide.view(np.uint32).T
        return out

    def store(self, addresses: np.ndarray, size: int, data: np.ndarray) -> None:
        """Write uint32 data [max(1, size // 4), n] at each address; of equal addresses the last lane wins."""
        if not len(addresses):
            return
        for start, lanes in self._split(addresses, size):
            offset = (addresses[lanes] - np.uint64(start)).astype(np.int64)
            words = self._words[start]
            if size >= 4 and words is not None and not (offset & 3).any():
                index = offset >> 2
                for n in range(size // 4):
                    words[index + n] = data[n][lanes]
            else:
                raw = np.ascontiguousarray(data[:, lanes].T).view(np.uint8)[:, :size]
                self._buffers[start][offset[:, None] + np.arange(size)] = raw

    def scalar(self, address: int, words: int) -> list[int]:
        """`words` consecutive uint32 at an address (s_load)."""
        return self.load(np.array([address + 4 * n for n in range(words)], np.uint64), 4)[0].tolist()
