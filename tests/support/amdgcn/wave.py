"""State of one wave: registers, exec mask, program counter."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .lds import Lds
    from .memory import Memory

LANES = 64
ALL = (1 << LANES) - 1
VCC, M0, EXEC = 106, 124, 126
AGPR = 256  # accumulation registers are rows 256.. of the register file
#: What registers and LDS hold before anything is written: a NaN in f32 and in both 16-bit halves (bf16 and fp16).
GARBAGE = 0x7FC17FC1


@lru_cache(maxsize=8192)
def lanes_of(bits: int) -> np.ndarray:
    """Boolean [64] of a 64-bit lane mask (shared: do not write)."""
    flags = np.unpackbits(np.array([bits], np.uint64).view(np.uint8), bitorder="little").view(np.bool_)
    flags.flags.writeable = False
    return flags


def bits_of(flags: np.ndarray) -> int:
    """64-bit lane mask of a boolean [64]."""
    return int(np.packbits(flags, bitorder="little").view(np.uint64)[0])


class Wave:
    """Registers of 64 lanes that share a program counter.

    Attributes
    ----------
    s : list of int
        Scalar registers; vcc, m0 and exec at their encoded numbers (write exec with `set_exec` only).
    v, i, f : ndarray [512, 64]
        Vector registers as uint32, int32 and float32 views of one array; rows from 256 are the AGPRs.
    mask, full : ndarray of bool [64], bool
        The exec mask as lanes, and whether it is all ones.
    """

    def __init__(self, index: int, memory: Memory, lds: Lds) -> None:
        self.index = index
        self.memory = memory
        self.lds = lds
        self.s = [GARBAGE] * 132
        self.v = np.full((2 * AGPR, LANES), GARBAGE, np.uint32)
        self.i = self.v.view(np.int32)
        self.f = self.v.view(np.float32)
        self.scc = 0
        self.pc = 0
        self.stopped = False  # at a barrier or at the end
        self.ended = False
        self.set_exec(ALL)

    def set_exec(self, bits: int) -> None:
        self.s[EXEC] = bits & 0xFFFFFFFF
        self.s[EXEC + 1] = bits >> 32
        self.exec = bits
        self.full = bits == ALL
        self.mask = lanes_of(bits)

    def pair(self, register: int) -> int:
        """64-bit value of two consecutive scalar registers."""
        return self.s[register] | self.s[register + 1] << 32

    def put(self, row: int, value: np.ndarray) -> None:
        """Write uint32 lanes into a vector register under the exec mask."""
        if self.full:
            self.v[row] = value
        else:
            np.copyto(self.v[row], value, where=self.mask)
