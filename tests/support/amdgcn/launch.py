"""Launch of a kernel: kernel arguments, initial registers, workgroups, and waves in a random order."""

from __future__ import annotations

import ctypes
import random
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from . import ds, float8, mfma, salu, valu, valu_special, vmem
from .lds import Lds
from .memory import Memory
from .parser import Kernel, Program, parse
from .wave import LANES, Wave

Step = Callable[[Wave], None]
LDS_BYTES = {"gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}


@dataclass(slots=True)
class Stats:
    """What ran.

    Attributes
    ----------
    counts : list of int
        Executions of each instruction of the program, over all waves.
    """

    program: Program
    counts: list[int] = field(default_factory=list)

    @property
    def instructions(self) -> int:
        """Wave-instructions executed."""
        return sum(self.counts)

    def mix(self) -> Counter[str]:
        """Executions by mnemonic."""
        found: Counter[str] = Counter()
        for instruction, count in zip(self.program.code, self.counts, strict=False):
            if count:
                found[instruction.name] += count
        return found


@lru_cache(maxsize=64)
def load(asm_text: str) -> tuple[Program, list[Step | None]]:
    """Parse assembly; steps are decoded when first reached, so code that never runs may hold anything."""
    program = parse(asm_text)
    return program, [None] * len(program.code)


def decode(program: Program, position: int) -> Step:
    """Closure of one instruction.

    Raises
    ------
    NotImplementedError
        The interpreter does not know the instruction, or a form of it; the message holds its text and line.
    """
    ins = program.code[position]
    try:
        step = (
            vmem.decode(ins)
            or ds.decode(ins)
            or mfma.decode(ins, program.arch)
            or float8.decode(ins, program.arch)
            or valu.decode(ins)
            or valu_special.decode(ins)
            or salu.decode(ins, program)
        )
    except (NotImplementedError, KeyError, ValueError, IndexError) as error:
        raise NotImplementedError(f"line {ins.line}: {ins.text!r} ({program.arch}): {error!r}") from error
    if step is None:
        raise NotImplementedError(f"line {ins.line}: unknown instruction {ins.text!r} ({program.arch})")
    return step


def launch(
    asm_text: str,
    name: str,
    grid: Sequence[int],
    block: Sequence[int],
    kernarg: bytes,
    memory: Memory,
    lds_bytes: int = 0,
    seed: int = 0,
) -> Stats:
    """Run a kernel whose argument block is given as bytes; see `run_kernel`."""
    program, steps = load(asm_text)
    kernel = program.kernels[name]
    grid, block = (tuple(x) + (1,) * (3 - len(x)) for x in (grid, block))
    lds_size = kernel.descriptor["group_segment_fixed_size"] + lds_bytes
    if lds_size > LDS_BYTES[program.arch]:
        raise ValueError(f"{name} needs {lds_size} bytes of LDS, {program.arch} has {LDS_BYTES[program.arch]}")
    limit = kernel.metadata[".max_flat_workgroup_size"]
    if block[0] * block[1] * block[2] > limit:
        raise ValueError(f"{name} was compiled for at most {limit} work-items a workgroup, got {block}")
    arguments = _kernarg(kernel, kernarg, grid, block, lds_bytes)
    packet = _dispatch_packet(grid, block, lds_size, arguments.ctypes.data)
    memory.add(arguments)
    memory.add(packet)
    rng = random.Random(seed)
    stats = Stats(program, [0] * len(program.code))
    workgroups = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    rng.shuffle(workgroups)
    with np.errstate(all="ignore"):
        for workgroup in workgroups:
            lds = Lds(lds_size)
            count = -(-block[0] * block[1] * block[2] // LANES)
            waves = [_wave(kernel, program, n, workgroup, block, arguments, packet, memory, lds) for n in range(count)]
            _run_workgroup(program, steps, waves, rng, stats.counts)
    return stats


def _run_workgroup(
    program: Program, steps: list[Step | None], waves: list[Wave], rng: random.Random, counts: list[int]
) -> None:
    """Interleave waves at random points; all must arrive at a barrier (or end) before any passes it."""
    running = list(waves)
    while running:
        wave = rng.choice(running)
        # Half of the time a wave runs as far as it can, which makes a race with a slow wave as wide as it gets.
        _run(program, steps, wave, 1 << 60 if rng.random() < 0.5 else rng.randint(1, 96), counts)
        if wave.stopped:
            running.remove(wave)
        if not running:
            running = [w for w in waves if not w.ended]
            for w in running:
                w.stopped = False


def _run(program: Program, steps: list[Step | None], wave: Wave, limit: int, counts: list[int]) -> None:
    while limit:
        limit -= 1
        pc = wave.pc
        step = steps[pc]
        if step is None:
            step = steps[pc] = decode(program, pc)
        counts[pc] += 1
        wave.pc = pc + 1
        try:
            step(wave)
        except Exception as error:
            ins = program.code[pc]
            raise type(error)(f"line {ins.line}: {ins.text!r}, wave {wave.index}: {error}") from error
        if wave.stopped:
            return


def _kernarg(kernel: Kernel, explicit: bytes, grid: Sequence[int], block: Sequence[int], lds_bytes: int) -> np.ndarray:
    """The kernel argument segment: the explicit bytes and the hidden arguments that the metadata asks for."""
    size = max(kernel.metadata[".kernarg_segment_size"], len(explicit), 8)
    segment = bytearray(size)
    segment[: len(explicit)] = explicit
    hidden = {
        "hidden_block_count_x": grid[0], "hidden_block_count_y": grid[1], "hidden_block_count_z": grid[2],
        "hidden_group_size_x": block[0], "hidden_group_size_y": block[1], "hidden_group_size_z": block[2],
        "hidden_grid_dims": 3, "hidden_dynamic_lds_size": lds_bytes,
    }  # fmt: skip
    for argument in kernel.metadata.get(".args", ()):
        kind, offset, width = argument[".value_kind"], argument[".offset"], argument[".size"]
        if kind in hidden:
            segment[offset : offset + width] = hidden[kind].to_bytes(width, "little")
    return np.frombuffer(segment, np.uint8).copy()


def _dispatch_packet(grid: Sequence[int], block: Sequence[int], lds_size: int, kernarg: int) -> np.ndarray:
    """The AQL packet that the dispatch pointer of a kernel points to."""
    items = [g * b for g, b in zip(grid, block, strict=False)]
    raw = struct.pack("<HHHHHHIIIIIQQQQ", 0, 3, *block, 0, *items, 0, lds_size, 0, kernarg, 0, 0)
    return np.frombuffer(raw, np.uint8).copy()


def _wave(
    kernel: Kernel,
    program: Program,
    index: int,
    workgroup: tuple[int, int, int],
    block: Sequence[int],
    arguments: np.ndarray,
    packet: np.ndarray,
    memory: Memory,
    lds: Lds,
) -> Wave:
    """Initial state: user registers in the order of the kernel descriptor, workgroup ids, packed work-item ids."""
    wave, get = Wave(index, memory, lds), kernel.descriptor.get
    place = 0
    for key, size, value in (
        ("user_sgpr_private_segment_buffer", 4, None),
        ("user_sgpr_dispatch_ptr", 2, packet.ctypes.data),
        ("user_sgpr_queue_ptr", 2, None),
        ("user_sgpr_kernarg_segment_ptr", 2, arguments.ctypes.data),
        ("user_sgpr_dispatch_id", 2, 0),
        ("user_sgpr_flat_scratch_init", 2, None),
        ("user_sgpr_private_segment_size", 1, None),
    ):
        if get(key, 0):
            if value is not None:
                wave.s[place], wave.s[place + 1] = value & 0xFFFFFFFF, value >> 32
            place += size
    length, offset = get("user_sgpr_kernarg_preload_length", 0), get("user_sgpr_kernarg_preload_offset", 0)
    if length:
        wave.s[place : place + length] = arguments[4 * offset : 4 * (offset + length)].view(np.uint32).tolist()
    place = get("user_sgpr_count", place)
    for axis, name in enumerate("xyz"):
        if get(f"system_sgpr_workgroup_id_{name}", 0):
            wave.s[place] = workgroup[axis]
            place += 1
    item = index * LANES + np.arange(LANES)
    x, y, z = item % block[0], item // block[0] % block[1], item // (block[0] * block[1])
    wave.v[0] = x | y << 10 | z << 20
    items = block[0] * block[1] * block[2]
    if (index + 1) * LANES > items:
        wave.set_exec((1 << (items - index * LANES)) - 1)
    wave.pc = program.labels[kernel.name]
    return wave


def pack_arguments(kernel: Kernel, args: Sequence[Any], memory: Memory) -> bytes:
    """Kernel arguments -> bytes, by the sizes and natural alignment in the metadata."""
    slots = [a for a in kernel.metadata.get(".args", ()) if not a[".value_kind"].startswith("hidden_")]
    if len(slots) < len(args):
        raise ValueError(f"{kernel.name} takes {len(slots)} arguments, got {len(args)}")
    args = [*args, *[None] * (len(slots) - len(args))]  # trailing pointers that a compiler added are null
    out = bytearray(max([a[".offset"] + a[".size"] for a in slots], default=0))
    for slot, arg in zip(slots, args, strict=False):
        offset, size = slot[".offset"], slot[".size"]
        out[offset : offset + size] = _argument_bytes(arg, size, memory)
    return bytes(out)


def _argument_bytes(arg: Any, size: int, memory: Memory) -> bytes:
    if arg is None:
        return bytes(size)
    if isinstance(arg, (bytes, bytearray)):
        raw = bytes(arg)
    elif isinstance(arg, (bool, int)):
        return int(arg).to_bytes(size, "little", signed=arg < 0)
    elif isinstance(arg, float):
        raw = struct.pack("<f" if size == 4 else "<d", arg)
    elif isinstance(arg, (ctypes.Structure, ctypes._SimpleCData)):
        raw = bytes(arg)
    elif isinstance(arg, np.generic):
        raw = arg.tobytes()
    elif isinstance(arg, np.ndarray) or hasattr(arg, "data_ptr"):
        raw = memory.add(arg).to_bytes(8, "little")
    else:
        raise TypeError(f"kernel argument of type {type(arg).__name__}")
    if len(raw) != size:
        raise ValueError(f"kernel argument {arg!r} has {len(raw)} bytes, the kernel takes {size}")
    return raw
