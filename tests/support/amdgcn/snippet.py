"""Run a few instructions on one wave: for tests of the interpreter itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .launch import decode
from .lds import Lds
from .memory import Memory
from .parser import parse
from .wave import Wave

_TEXT = """
\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
start:
{body}
\ts_endpgm
\t.amdgpu_metadata
amdhsa.kernels: []
\t.end_amdgpu_metadata
"""


def new_wave(lds_bytes: int = 4096, buffers: Sequence[np.ndarray] = ()) -> Wave:
    """A wave with its own LDS and the buffers as global memory."""
    memory = Memory()
    for buffer in buffers:
        memory.add(buffer)
    return Wave(0, memory, Lds(lds_bytes))


def execute(wave: Wave, body: str, arch: str = "gfx942") -> Wave:
    """Execute the lines of `body` (labels allowed) to their end."""
    lines = [line.strip() for line in body.strip().splitlines()]
    text = "\n".join(line if line.endswith(":") else "\t" + line for line in lines)
    program = parse(_TEXT.format(arch=arch, body=text))
    wave.pc, wave.ended = 0, False
    with np.errstate(all="ignore"):
        while not wave.ended:
            step = decode(program, wave.pc)
            wave.pc += 1
            step(wave)
    return wave


def set_pointer(wave: Wave, register: int, address: int) -> None:
    """Put a 64-bit address into a scalar register pair."""
    wave.s[register], wave.s[register + 1] = address & 0xFFFFFFFF, address >> 32
