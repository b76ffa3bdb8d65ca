"""Vector and scalar memory instructions: s_load, global, flat, buffer, and loads straight into LDS."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .operands import reader, register, scalar_reader, vector
from .parser import Instruction
from .wave import M0, Wave

Step = Callable[[Wave], None]
Address = Callable[[Wave], np.ndarray]

#: suffix -> (bytes, how the register is made of them)
_LOADS = {
    "ubyte": (1, "zero"), "sbyte": (1, "sign8"), "ushort": (2, "zero"), "sshort": (2, "sign16"),
    "ubyte_d16": (1, "low"), "ubyte_d16_hi": (1, "high"), "short_d16": (2, "low"), "short_d16_hi": (2, "high"),
    "dword": (4, "zero"), "dwordx2": (8, "zero"), "dwordx3": (12, "zero"), "dwordx4": (16, "zero"),
}  # fmt: skip
_STORES = {
    "byte": (1, 0), "byte_d16_hi": (1, 16), "short": (2, 0), "short_d16_hi": (2, 16),
    "dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0), "dwordx4": (16, 0),
}  # fmt: skip
_LOAD = re.compile(r"(global|flat|buffer)_load_(lds_)?(\w+)$")
_STORE = re.compile(r"(global|flat|buffer)_store_(\w+)$")
_ATOMIC = re.compile(r"(global|flat|buffer)_atomic_(\w+)$")
_FENCES = ("buffer_wbl2", "buffer_inv", "buffer_wbinvl1", "buffer_wbinvl1_vol", "buffer_invl2", "s_memtime")

_i32, _f32 = (lambda a: a.view(np.int32)), (lambda a: a.view(np.float32))
ATOMICS = {  # new value of the memory word, as uint32
    "add": lambda m, d: m + d,
    "sub": lambda m, d: m - d,
    "and": lambda m, d: m & d,
    "or": lambda m, d: m | d,
    "xor": lambda m, d: m ^ d,
    "umin": np.minimum,
    "umax": np.maximum,
    "smin": lambda m, d: np.minimum(_i32(m), _i32(d)).view(np.uint32),
    "smax": lambda m, d: np.maximum(_i32(m), _i32(d)).view(np.uint32),
    "swap": lambda m, d: d,
    "add_f32": lambda m, d: (_f32(m) + _f32(d)).view(np.uint32),
}


def decode(ins: Instruction) -> Step | None:
    """Closure of a memory instruction, None when it is not one."""
    name = ins.name
    if name in _FENCES:
        return lambda w: None
    if name.startswith("s_load_"):
        return _scalar_load(ins)
    for pattern, build in ((_LOAD, _load), (_STORE, _store), (_ATOMIC, _atomic)):
        match = pattern.match(name)
        if match:
            return build(ins, match)
    return None


def _scalar_load(ins: Instruction) -> Step:
    words = {"s_load_dword": 1}.get(ins.name) or int(ins.name.rpartition("x")[2])
    found = register(ins.operands[0])
    assert found is not None
    first = found[1]
    base, offset = scalar_reader(ins.operands[1], wide=True), scalar_reader(ins.operands[2])

    def step(w: Wave) -> None:
        w.s[first : first + words] = w.memory.scalar(base(w) + offset(w), words)

    return step


def _offset(ins: Instruction) -> int:
    return int(ins.modifiers.get("offset", "0"), 0)


def _flat_address(address: str, scalar: str, offset: int) -> Address:
    extra = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
    if scalar == "off":
        wide = reader(address, "u64")
        return lambda w: wide(w) + extra
    base = scalar_reader(scalar, wide=True)
    if address == "off":
        return lambda w: np.full(64, (base(w) + offset) & 0xFFFFFFFFFFFFFFFF, np.uint64)
    lane = reader(address, "u32")
    return lambda w: lane(w).astype(np.uint64) + np.uint64((base(w) + offset) & 0xFFFFFFFFFFFFFFFF)


def _buffer_address(ins: Instruction, rest: list[str]) -> Callable[[Wave, int], tuple[np.ndarray, np.ndarray]]:
    """(addresses, in range) of a raw buffer access: rest = [vaddr,] resource, scalar offset."""
    if "idxen" in ins.modifiers:
        raise NotImplementedError(f"structured buffer access: {ins.text}")
    found = register(rest[-2])
    assert found is not None
    resource, soffset, offset = found[1], scalar_reader(rest[-1]), _offset(ins)
    lane = reader(rest[0], "u32") if "offen" in ins.modifiers else None

    def address(w: Wave, size: int) -> tuple[np.ndarray, np.ndarray]:
        base = w.pair(resource) & 0xFFFFFFFFFFFF
        if w.s[resource + 1] >> 16 & 0x3FFF:
            raise NotImplementedError(f"buffer resource with a stride: {ins.text}")
        start = np.full(64, offset, np.int64) if lane is None else lane(w).astype(np.int64) + offset
        fits = start + soffset(w) + size <= w.s[resource + 2]
        return (start + base + soffset(w)).astype(np.uint64), fits

    return address


def _access(ins: Instruction, kind: str, rest: list[str], size: int) -> Callable[[Wave], tuple[np.ndarray, np.ndarray]]:
    """(addresses, lanes that access memory) for any of the three families."""
    if kind == "buffer":
        buffer = _buffer_address(ins, rest)

        def access(w: Wave) -> tuple[np.ndarray, np.ndarray]:
            address, fits = buffer(w, size)
            return address, fits & w.mask

        return access
    flat = _flat_address(rest[0], rest[1] if len(rest) > 1 else "off", _offset(ins))
    return lambda w: (flat(w), w.mask)


def _load(ins: Instruction, match: re.Match[str]) -> Step:
    kind, to_lds, suffix = match.groups()
    size, shape = _LOADS[suffix]
    if to_lds or "lds" in ins.modifiers:
        return _load_to_lds(ins, kind, size)
    row = vector(ins.operands[0])
    access = _access(ins, kind, ins.operands[1:], size)
    put = register_writer(row, size, shape)

    def step(w: Wave) -> None:
        address, lanes = access(w)
        if lanes.all():
            put(w, w.memory.load(address, size))
            return
        data = np.zeros((max(1, size // 4), 64), np.uint32)  # a buffer access out of range gives zero
        data[:, lanes] = w.memory.load(address[lanes], size)
        put(w, data)

    return step


def register_writer(row: int, size: int, shape: str) -> Callable[[Wave, np.ndarray], None]:
    """Closure that puts loaded data (uint32 [words, 64]) into registers from `row` under the exec mask."""
    words = max(1, size // 4)
    if shape == "zero":

        def put(w: Wave, data: np.ndarray) -> None:
            if w.full:
                w.v[row : row + words] = data
            else:
                np.copyto(w.v[row : row + words], data, where=w.mask)

        return put
    if shape.startswith("sign"):
        sign = np.uint32(0x80 if shape == "sign8" else 0x8000)
        return lambda w, data: w.put(row, (data[0] ^ sign) - sign)
    if shape == "low":
        return lambda w, data: w.put(row, w.v[row] & np.uint32(0xFFFF0000) | data[0])
    return lambda w, data: w.put(row, w.v[row] & np.uint32(0xFFFF) | data[0] << np.uint32(16))


def _load_to_lds(ins: Instruction, kind: str, size: int) -> Step:
    """LDS[M0 + offset + lane * size] = memory (CDNA3 manual, "Memory Buffer Load to LDS").

    The data lands when s_waitcnt says so, but a kernel may only rely on that order; here it lands at once.
    """
    access = _access(ins, kind, ins.operands, size)
    offset, place = _offset(ins), np.arange(64) * size

    def step(w: Wave) -> None:
        address, lanes = access(w)
        data = np.zeros((size // 4, 64), np.uint32)
        data[:, lanes] = w.memory.load(address[lanes], size)
        w.lds.store((w.s[M0] + offset + place)[w.mask], size, data[:, w.mask])

    return step


def _store(ins: Instruction, match: re.Match[str]) -> Step:
    kind, suffix = match.groups()
    size, shift = _STORES[suffix]
    if kind == "buffer":
        data, rest = ins.operands[0], ins.operands[1:]
    else:
        data, rest = ins.operands[1], [ins.operands[0], *ins.operands[2:]]
    row, words = vector(data), max(1, size // 4)
    access = _access(ins, kind, rest, size)
    moved = np.uint32(shift)

    def step(w: Wave) -> None:
        address, lanes = access(w)
        value = w.v[row : row + words]
        if shift:
            value = value >> moved
        w.memory.store(address[lanes], size, value[:, lanes])

    return step


def _atomic(ins: Instruction, match: re.Match[str]) -> Step:
    kind, op = match.groups()
    returns = "glc" in ins.modifiers or "sc0" in ins.modifiers
    operands = list(ins.operands)
    old_row = vector(operands.pop(0)) if returns and kind != "buffer" else -1
    if kind == "buffer":
        data, rest = operands[0], operands[1:]
        old_row = vector(data)
    else:
        data, rest = operands[1], [operands[0], *operands[2:]]
    row = vector(data)
    access = _access(ins, kind, rest, 4)
    combine = None if op == "cmpswap" else ATOMICS.get(op)
    if combine is None and op != "cmpswap":
        raise NotImplementedError(f"atomic {ins.text}")

    def step(w: Wave) -> None:
        address, lanes = access(w)
        old = w.v[row].copy()
        new = w.v[row].copy()
        for lane in np.flatnonzero(lanes):
            here = address[lane : lane + 1]
            before = w.memory.load(here, 4)
            if combine is None:  # registers: new value, then the value to compare with
                after = np.where(before == w.v[row + 1, lane], new[lane], before)
            else:
                after = combine(before, new[lane : lane + 1])
            w.memory.store(here, 4, after)
            old[lane] = before[0, 0]
        if returns:
            w.put(old_row, old)

    return step
