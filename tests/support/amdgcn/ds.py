"""LDS instructions: reads, writes, atomics, lane permutes through the LDS crossbar, transpose reads of gfx950."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .operands import reader, vector
from .parser import Instruction
from .vmem import ATOMICS, register_writer
from .wave import Wave

Step = Callable[[Wave], None]

_READS = {
    "u8": (1, "zero"), "i8": (1, "sign8"), "u16": (2, "zero"), "i16": (2, "sign16"), "u8_d16": (1, "low"),
    "u8_d16_hi": (1, "high"), "u16_d16": (2, "low"), "u16_d16_hi": (2, "high"), "b32": (4, "zero"),
    "b64": (8, "zero"), "b96": (12, "zero"), "b128": (16, "zero"),
}  # fmt: skip
_WRITES = {
    "b8": (1, 0), "b8_d16_hi": (1, 16), "b16": (2, 0), "b16_d16_hi": (2, 16), "b32": (4, 0), "b64": (8, 0),
    "b96": (12, 0), "b128": (16, 0),
}  # fmt: skip
_PAIR = re.compile(r"ds_(read|write)2(st64)?_b(32|64)$")
_ATOMIC = re.compile(r"ds_(add|sub|and|or|xor|min|max)_(?:rtn_)?(u32|i32|b32|f32)$")


def decode(ins: Instruction) -> Step | None:
    """Closure of an LDS instruction, None when it is not one."""
    name = ins.name
    if not name.startswith("ds_"):
        return None
    pair = _PAIR.match(name)
    if pair:
        return _pair(ins, pair)
    if name in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"):
        return _permute(ins)
    if name.startswith("ds_read_b64_tr_b"):
        return _transposed(ins, int(name.rpartition("b")[2]))
    if name.startswith("ds_read_"):
        return _read(ins, *_READS[name[len("ds_read_") :]])
    if name.startswith("ds_write_"):
        return _write(ins, *_WRITES[name[len("ds_write_") :]])
    atomic = _ATOMIC.match(name)
    return _atomic(ins, atomic) if atomic else None


def _address(ins: Instruction, operand: str) -> Callable[[Wave], np.ndarray]:
    read, offset = reader(operand, "u32"), int(ins.modifiers.get("offset", "0"), 0)
    return lambda w: read(w).astype(np.int64) + offset


def _read(ins: Instruction, size: int, shape: str) -> Step:
    address, put = _address(ins, ins.operands[1]), register_writer(vector(ins.operands[0]), size, shape)

    def step(w: Wave) -> None:
        if w.full:
            put(w, w.lds.load(address(w), size))
            return
        data = np.zeros((max(1, size // 4), 64), np.uint32)
        data[:, w.mask] = w.lds.load(address(w)[w.mask], size)
        put(w, data)

    return step


def _write(ins: Instruction, size: int, shift: int) -> Step:
    address, row, words = _address(ins, ins.operands[0]), vector(ins.operands[1]), max(1, size // 4)
    moved = np.uint32(shift)

    def step(w: Wave) -> None:
        data = w.v[row : row + words]
        if shift:
            data = data >> moved
        if w.full:
            w.lds.store(address(w), size, data)
        else:
            w.lds.store(address(w)[w.mask], size, data[:, w.mask])

    return step


def _pair(ins: Instruction, match: re.Match[str]) -> Step:
    """Two accesses at offset0 and offset1, counted in elements (times 64 for st64)."""
    size = int(match[3]) // 8
    unit = size * (64 if match[2] else 1)
    steps = []
    for n in range(2):
        offset = unit * int(ins.modifiers.get(f"offset{n}", "0"), 0)
        single = Instruction(ins.name, list(ins.operands), {"offset": str(offset)}, ins.line, ins.text)
        if match[1] == "read":
            address, row = _address(single, ins.operands[1]), vector(ins.operands[0]) + n * size // 4
            steps.append((address, register_writer(row, size, "zero")))
        else:
            single.operands = [ins.operands[0], ins.operands[1 + n]]
            steps.append(_write(single, size, 0))
    first, second = steps
    if match[1] == "write":

        def write(w: Wave) -> None:
            first(w)
            second(w)

        return write

    def read(w: Wave) -> None:
        places = [address(w) for address, _ in steps]  # before the first result can overwrite the address register
        for place, (_, put) in zip(places, steps, strict=False):
            data = np.zeros((size // 4, 64), np.uint32)
            data[:, w.mask] = w.lds.load(place[w.mask], size)
            put(w, data)

    return read


def _permute(ins: Instruction) -> Step:
    row = vector(ins.operands[0])
    lane = np.arange(64)
    if ins.name == "ds_swizzle_b32":
        source = _swizzle_lanes(ins.modifiers["offset"])
        value = reader(ins.operands[1], "u32")
        return lambda w: w.put(row, np.where(w.mask[source], value(w)[source], np.uint32(0)))
    index, value = reader(ins.operands[1], "u32"), reader(ins.operands[2], "u32")
    offset = int(ins.modifiers.get("offset", "0"), 0)

    def pull(w: Wave) -> None:
        source = (index(w) + np.uint32(offset)) >> np.uint32(2) & np.uint32(63)
        w.put(row, np.where(w.mask[source], value(w)[source], np.uint32(0)))

    def push(w: Wave) -> None:
        target = ((index(w) + np.uint32(offset)) >> np.uint32(2) & np.uint32(63))[w.mask]
        out = np.zeros(64, np.uint32)
        out[target] = value(w)[lane[w.mask]]
        w.put(row, out)

    return pull if ins.name == "ds_bpermute_b32" else push


def _swizzle_lanes(offset: str) -> np.ndarray:
    lane = np.arange(64)
    match = re.match(r"swizzle\((\w+),(.*)\)$", offset.replace(" ", ""))
    if match:
        distance = {"SWAP": lambda n: n, "REVERSE": lambda n: n - 1}[match[1]](int(match[2]))
        return lane ^ distance
    bits = int(offset, 0)
    if bits & 0x8000:
        return (lane & ~3) + np.array([bits >> 2 * n & 3 for n in range(4)])[lane & 3]
    low = lane & 31
    return (lane & 32) + (((low & (bits & 31)) | (bits >> 5 & 31)) ^ (bits >> 10 & 31))


def _transposed(ins: Instruction, bits: int) -> Step:
    """Each 16 lanes read one row-major matrix of 64 / bits rows and 16 columns; lane i gets column i."""
    address, put = _address(ins, ins.operands[1]), register_writer(vector(ins.operands[0]), 8, "zero")
    if bits not in (8, 16):
        raise NotImplementedError(ins.text)
    dtype, per_lane = (np.uint16, 4) if bits == 16 else (np.uint8, 8)

    def step(w: Wave) -> None:
        if not w.full:
            raise NotImplementedError(f"transpose read with inactive lanes: {ins.text}")
        data = np.ascontiguousarray(w.lds.load(address(w), 8).T)  # [lane, 2 words]
        matrix = data.view(dtype).reshape(4, per_lane, 16).transpose(0, 2, 1)  # [group, column, row]
        put(w, np.ascontiguousarray(matrix).reshape(64, per_lane).view(np.uint32).T)

    return step


def _atomic(ins: Instruction, match: re.Match[str]) -> Step:
    op, kind = match.groups()
    returns = "_rtn_" in ins.name
    operands = ins.operands[1:] if returns else ins.operands
    address, row = _address(ins, operands[0]), vector(operands[1])
    key = {"min_u32": "umin", "max_u32": "umax", "min_i32": "smin", "max_i32": "smax", "add_f32": "add_f32"}
    combine = ATOMICS[key.get(f"{op}_{kind}", op)]
    old_row = vector(ins.operands[0]) if returns else 0

    def step(w: Wave) -> None:
        place, old = address(w), w.v[row].copy()
        for lane in np.flatnonzero(w.mask):
            here = place[lane : lane + 1]
            before = w.lds.load(here, 4)
            w.lds.store(here, 4, combine(before, w.v[row, lane : lane + 1])[:])
            old[lane] = before[0, 0]
        if returns:
            w.put(old_row, old)

    return step
