"""Execute compiled amdgcn assembly on a CPU.

The text that clang or Triton prints for gfx90a, gfx942 or gfx950 is run as it stands: every lane of every wave, with
the exec mask, LDS, MFMA lane layouts and barriers, on the caller's own buffers. Waves of a workgroup are interleaved at
random points (`seed`), so a missing barrier gives wrong numbers for some seed. Registers and LDS start as NaN patterns;
a global access outside the given buffers raises `MemoryFault`; an instruction that is not known raises
`NotImplementedError` with its text. Not modelled: time, s_waitcnt, hazards, caches, scratch memory.

    from tests.support.amdgcn import run_kernel

    stats = run_kernel(compiled.asm["amdgcn"], "kernel_name", grid=(4, 2), block=(256,), args=(x, out, n, 0.5),
                       lds_bytes=compiled.metadata.shared)

`args`: torch CPU tensors and numpy arrays are pointers (any view: the whole storage behind it becomes accessible, and
is written in place); None is a null pointer; Python ints and floats take the width of the kernel's metadata; numpy
scalars, ctypes values, structures and bytes are copied as they are. Arguments missing at the end are zero (pointers
that a compiler appends). `block` is in work-items: num_warps * 64 for Triton. `lds_bytes` is the dynamic LDS, beside
what the kernel declares itself (Triton declares none: pass metadata.shared).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .launch import Stats, launch, load, pack_arguments
from .memory import Memory, MemoryFault
from .parser import parse

__all__ = ["Memory", "MemoryFault", "Stats", "launch", "parse", "run_kernel"]


def run_kernel(
    asm_text: str,
    kernel_name: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    lds_bytes: int = 0,
    seed: int = 0,
    memory: Sequence[Any] = (),
) -> Stats:
    """Run one kernel to its end.

    Parameters
    ----------
    asm_text : str
        Assembly with its metadata, as ``-S`` prints it.
    kernel_name : str
        The kernel's symbol.
    grid, block : sequence of int
        Workgroups, and work-items a workgroup; 1 to 3 numbers.
    args : sequence
        Kernel arguments, see the module's text.
    lds_bytes : int
        Dynamic LDS.
    seed : int
        Order of workgroups and interleaving of waves.
    memory : sequence
        Further buffers that pointers inside structures lead to.

    Returns
    -------
    Stats
        Counts of what ran.

    Raises
    ------
    NotImplementedError
        An instruction is not known.
    MemoryFault
        A lane touched memory outside every buffer, or outside LDS.
    """
    space = Memory()
    for buffer in memory:
        space.add(buffer)
    kernel = load(asm_text)[0].kernels[kernel_name]
    return launch(asm_text, kernel_name, grid, block, pack_arguments(kernel, args, space), space, lds_bytes, seed)
