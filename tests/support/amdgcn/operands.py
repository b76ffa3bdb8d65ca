"""Operand texts -> closures that read or write them on a wave.

A reader of a kind returns lanes ([64], a view of the register where that is possible) or one scalar for uniform
operands. Kinds: ``u32 i32 f32 u16 i16 f16 u64 i64 f64``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from .wave import AGPR, EXEC, M0, VCC, Wave

Read = Callable[[Wave], Any]
WriteScalar = Callable[[Wave, int], None]

DTYPE = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32, "u16": np.uint16, "i16": np.int16, "f16": np.float16,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64,
}  # fmt: skip
_NAMED = {
    "vcc": VCC, "vcc_lo": VCC, "vcc_hi": VCC + 1, "m0": M0, "exec": EXEC, "exec_lo": EXEC, "exec_hi": EXEC + 1,
    "flat_scratch": 102, "flat_scratch_lo": 102, "flat_scratch_hi": 103,
}  # fmt: skip
_REGISTER = re.compile(r"([sva])(?:(\d+)|\[(\d+):(\d+)\]|\[(\d+)\])$")
_FLOAT = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?$")


def register(text: str) -> tuple[str, int] | None:
    """('v' or 's', first index) of a register operand, None for a constant."""
    match = _REGISTER.match(text)
    if match:
        index = int(next(group for group in match.groups()[1:] if group is not None))
        return ("s", index) if match[1] == "s" else ("v", index + AGPR * (match[1] == "a"))
    if text in _NAMED:
        return "s", _NAMED[text]
    return None


def vector(text: str) -> int:
    """Row of a vector register operand."""
    found = register(text)
    if found is None or found[0] != "v":
        raise NotImplementedError(f"operand {text!r} is not a vector register")
    return found[1]


def constant_bits(text: str, kind: str) -> int:
    """Bits of an inline constant or literal as an operand of the given kind."""
    wide = kind.endswith("64")
    if _FLOAT.match(text):
        value = float(text)
        if kind == "f64":
            return int.from_bytes(struct.pack("<d", value), "little")
        if kind.endswith("16"):
            return int.from_bytes(struct.pack("<e", value), "little")
        return int.from_bytes(struct.pack("<f", value), "little")
    try:
        value = int(text, 0)
    except ValueError:
        raise NotImplementedError(f"operand {text!r}") from None
    if kind == "f64" and not -16 <= value <= 64:
        return (value & 0xFFFFFFFF) << 32  # a 32-bit literal is the high half of a double
    if kind == "i64" and value > 0x7FFFFFFF:
        value -= 1 << 32
    return value & (0xFFFFFFFFFFFFFFFF if wide else 0xFFFFFFFF)


def _as_kind(raw: Any, kind: str) -> Any:
    """uint32 lanes or scalar -> the kind (32 and 16 bits)."""
    if kind.endswith("16"):
        return (raw & np.uint32(0xFFFF)).astype(np.uint16).view(DTYPE[kind])
    return raw.view(DTYPE[kind])


def _strip_sign(text: str) -> tuple[str, bool, bool]:
    """Operand without its -x, |x|, neg(), abs(), sext() wrappers, and whether it is negated / absolute."""
    negate = absolute = False
    if text.startswith("-") and not text[1:2].isdigit():
        negate, text = True, text[1:]
    if text.startswith("neg("):
        negate, text = True, text[4:-1]
    if text.startswith(("|", "abs(")):
        absolute, text = True, text.strip("|").removeprefix("abs(").removesuffix(")")
    return text, negate, absolute


def reader(text: str, kind: str, *, half: int = 0, select: str = "", dpp: Dpp | None = None) -> Read:
    """Closure that reads an operand.

    Parameters
    ----------
    text, kind : str
        The operand as printed, sign modifiers included, and what it is read as.
    half : int
        1 reads bits 31:16 of a 16-bit operand (op_sel).
    select : str
        An SDWA selection, BYTE_n, WORD_n or DWORD; ``sext(v1)`` sign-extends it.
    dpp : Dpp or None
        Lanes to permute before use.
    """
    signed = text.startswith("sext(")
    text = text[5:-1] if signed else text
    text, negate, absolute = _strip_sign(text)
    read = _plain(text, kind, half) if not select or select == "DWORD" else _selected(text, kind, select, signed)
    if dpp is not None:
        inner = read
        read = lambda w: dpp.permuted(w, inner(w))  # noqa: E731
    if absolute:
        without_abs = read
        read = lambda w: np.abs(without_abs(w))  # noqa: E731
    if negate:
        positive = read
        read = lambda w: -positive(w)  # noqa: E731
    return read


def _plain(text: str, kind: str, half: int) -> Read:
    found = register(text)
    dtype = DTYPE[kind]
    if found is None:
        bits = constant_bits(text, kind)
        if kind.endswith("64"):
            value = np.uint64(bits).view(dtype)
        elif kind.endswith("16"):
            value = np.uint16(bits >> 16 * half & 0xFFFF).view(dtype)
        else:
            value = np.uint32(bits).view(dtype)
        return lambda w: value
    bank, n = found
    if bank == "v":
        if kind == "u32":
            return lambda w: w.v[n]
        if kind == "i32":
            return lambda w: w.i[n]
        if kind == "f32":
            return lambda w: w.f[n]
        if kind.endswith("16"):
            return lambda w: w.v[n].view(dtype)[half::2]
        return lambda w: (w.v[n] | w.v[n + 1].astype(np.uint64) << np.uint64(32)).view(dtype)
    if kind.endswith("64"):
        return lambda w: np.uint64(w.pair(n)).view(dtype)
    if kind.endswith("16"):
        return lambda w: np.uint16(w.s[n] >> 16 * half & 0xFFFF).view(dtype)
    return lambda w: np.uint32(w.s[n]).view(dtype)


def _selected(text: str, kind: str, select: str, signed: bool) -> Read:
    raw = _plain(text, "u32", 0)
    unit, _, index = select.partition("_")
    bits = {"BYTE": 8, "WORD": 16}[unit]
    shift, low = np.uint32(bits * int(index)), np.uint32((1 << bits) - 1)
    sign = np.uint32(1 << (bits - 1))

    def read(w: Wave) -> Any:
        value = raw(w) >> shift & low
        if signed:
            value = (value ^ sign) - sign
        return _as_kind(value, kind)

    return read


def scalar_reader(text: str, *, wide: bool = False) -> Callable[[Wave], int]:
    """Closure that reads a scalar operand as an unsigned Python int of 32 (or 64) bits."""
    found = register(text)
    if found is not None:
        n = found[1]
        if found[0] == "v":
            raise NotImplementedError(f"vector register {text!r} as a scalar operand")
        return (lambda w: w.pair(n)) if wide else (lambda w: w.s[n])
    if text == "scc":
        return lambda w: w.scc
    if wide:
        value = constant_bits(text, "u64") if not text.startswith("-") else int(text, 0) & 0xFFFFFFFFFFFFFFFF
    else:
        value = constant_bits(text, "u32")
    return lambda w: value


def scalar_writer(text: str, *, wide: bool = False) -> WriteScalar:
    """Closure that writes a scalar register (or pair) from an unsigned int."""
    found = register(text)
    if found is None or found[0] != "s":
        raise NotImplementedError(f"scalar destination {text!r}")
    n = found[1]
    if n == EXEC and wide:
        return lambda w, value: w.set_exec(value)
    if n in (EXEC, EXEC + 1):

        def put_half(w: Wave, value: int) -> None:
            low, high = (value, w.s[EXEC + 1]) if n == EXEC else (w.s[EXEC], value)
            w.set_exec(low | high << 32)

        return put_half

    def put(w: Wave, value: int) -> None:
        w.s[n] = value & 0xFFFFFFFF
        if wide:
            w.s[n + 1] = value >> 32

    return put


class Dpp:
    """The data-parallel-primitive modifiers of one instruction: where each lane reads, and which lanes are written."""

    CONTROLS = (
        "quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast", "row_newbcast",
        "wave_shl", "wave_shr", "wave_rol", "wave_ror",
    )  # fmt: skip

    def __init__(self, modifiers: dict[str, str]) -> None:
        control = next(name for name in self.CONTROLS if name in modifiers)
        lane = np.arange(64)
        row, place = lane & ~15, lane & 15
        valid = np.ones(64, bool)
        if control == "quad_perm":
            order = np.array([int(x) for x in modifiers[control].strip("[]").split(",")])
            source = (lane & ~3) + order[lane & 3]
        elif control in ("row_mirror", "row_half_mirror"):
            source = lane ^ (15 if control == "row_mirror" else 7)
        else:
            n = int(modifiers[control])
            if control in ("row_shl", "row_shr"):
                moved = place + (n if control == "row_shl" else -n)
                valid = (moved >= 0) & (moved < 16)
                source = row + moved % 16
            elif control == "row_ror":
                source = row + (place - n) % 16
            elif control == "row_newbcast":
                source = row + n
            elif control == "row_bcast":
                source = (lane & ~n) - 1 if n == 31 else row - 1
                valid = lane >= 32 if n == 31 else lane >= 16
                source = np.where(valid, source, 0)
            else:
                moved = lane + (n if control in ("wave_shl", "wave_rol") else -n)
                valid = ((moved >= 0) & (moved < 64)) | (control in ("wave_rol", "wave_ror"))
                source = moved % 64
        self.lanes = source
        self.valid = valid
        self.zero_invalid = "bound_ctrl" in modifiers
        rows = int(modifiers.get("row_mask", "0xf"), 0)
        banks = int(modifiers.get("bank_mask", "0xf"), 0)
        self.written = ((rows >> (lane // 16)) & (banks >> (lane // 4 % 4)) & 1).astype(bool)

    def permuted(self, w: Wave, value: np.ndarray) -> np.ndarray:
        """Each lane's source; zero where there is no active source lane, if bound_ctrl asks for it."""
        value = value[self.lanes]
        return np.where(self.valid & w.mask[self.lanes], value, value.dtype.type(0)) if self.zero_invalid else value

    def write_mask(self, w: Wave) -> np.ndarray:
        """Lanes the instruction writes."""
        enabled = w.mask & self.written
        return enabled if self.zero_invalid else enabled & self.valid & w.mask[self.lanes]
