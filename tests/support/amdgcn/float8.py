"""8-bit floating point: the value of each byte, and the conversion to it.

fp8 is e4m3, bf8 e5m2; gfx942 has the fnuz forms, gfx950 those of OCP. Source: V_CVT_PK_FP8_F32 of the CDNA3 and CDNA4
manuals, and the vendor's own reference of it in amd_hip_fp8.h: to nearest even, subnormal results kept; what lies
beyond the largest number is NaN (MODE.FP16_OVFL is clear, as a kernel starts).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from .operands import reader, vector
from .parser import Instruction
from .valu import U32, op_sel
from .wave import Wave


@lru_cache
def float8_table(kind: str, arch: str) -> np.ndarray:
    """float32 value of each byte."""
    fnuz = arch.startswith("gfx94")
    exponent_bits, mantissa_bits = (4, 3) if kind == "fp8" else (5, 2)
    bias = (1 << (exponent_bits - 1)) - (0 if fnuz else 1)
    byte = np.arange(256)
    sign = np.where(byte & 0x80, -1.0, 1.0)
    exponent = byte >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = byte & ((1 << mantissa_bits) - 1)
    unit = 1 << mantissa_bits
    fraction = mantissa / unit
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    value *= sign
    if fnuz:
        value[0x80] = np.nan
    elif kind == "fp8":
        value[[0x7F, 0xFF]] = np.nan
    else:
        value[(exponent == 31) & (mantissa != 0)] = np.nan
        value[[0x7C, 0xFC]] = [np.inf, -np.inf]
    return value.astype(np.float32)


@lru_cache
def _midpoints(arch: str) -> np.ndarray:
    """Between each magnitude of fp8 and the next; the last is where numbers end."""
    magnitudes = float8_table("fp8", arch)[:0x80].astype(np.float64)
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    beyond = 2 * magnitudes[-1] - magnitudes[-2]
    return (magnitudes + np.append(magnitudes[1:], beyond)) / 2


def fp8_bits(x: np.ndarray, arch: str) -> np.ndarray:
    """fp8 bytes (uint32) of float32 values."""
    middle, size = _midpoints(arch), np.abs(x.astype(np.float64))
    code = np.searchsorted(middle, size, side="left")  # a tie stays below ...
    tie = (code < len(middle)) & (middle[np.minimum(code, len(middle) - 1)] == size)
    code = np.where(tie & (code % 2 == 1), code + 1, code)  # ... unless it is odd there
    lost = np.isnan(x) | (code >= len(middle))
    negative = np.signbit(x)
    if arch.startswith("gfx94"):
        return np.where(lost, 0x80, np.where(negative & (code > 0), code | 0x80, code)).astype(U32)
    return (np.where(lost, 0x7F, code) | np.where(negative, 0x80, 0)).astype(U32)


def decode(ins: Instruction, arch: str) -> Callable[[Wave], Any] | None:
    """Closure of a conversion between two float32 and two bytes, None when it is another instruction."""
    if ins.name in ("v_cvt_pk_f32_fp8", "v_cvt_scalef32_pk_f32_fp8"):
        return _widen(ins, arch)
    return _narrow(ins, arch) if ins.name == "v_cvt_pk_fp8_f32" else None


def _widen(ins: Instruction, arch: str) -> Callable[[Wave], Any]:
    """op_sel[0] takes the upper half of the source; a scale, on gfx950, counts by its exponent, 2^(e - 127)."""
    row, table = vector(ins.operands[0]), float8_table("fp8", arch)
    read = reader(ins.operands[1], "u32", select=ins.modifiers.get("src0_sel", ""))
    read_scale = reader(ins.operands[2], "f32") if len(ins.operands) > 2 else None
    first = U32(16 * op_sel(ins, "op_sel", 0, 1)[0])

    def step(w: Wave) -> None:
        pair = np.broadcast_to(read(w), 64) >> first
        scale = np.float32(1) if read_scale is None else np.asarray(read_scale(w))
        power = (scale.view(U32) & U32(0x7F800000)).view(np.float32)
        for n in range(2):
            w.put(row + n, (table[pair >> U32(8 * n) & U32(0xFF)] * power).view(U32))

    return step


def _narrow(ins: Instruction, arch: str) -> Callable[[Wave], Any]:
    """op_sel[2] says which half of the register is written; the other stays."""
    row, reads = vector(ins.operands[0]), [reader(text, "f32") for text in ins.operands[1:3]]
    high = op_sel(ins, "op_sel", 0, 3)[2]
    shift, kept = U32(16 * high), U32(0xFFFF if high else 0xFFFF0000)

    def step(w: Wave) -> None:
        low_byte, high_byte = (fp8_bits(np.broadcast_to(read(w), 64), arch) for read in reads)
        w.put(row, w.v[row] & kept | (low_byte | high_byte << U32(8)) << shift)

    return step
