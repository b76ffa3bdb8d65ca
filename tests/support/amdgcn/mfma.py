"""Matrix instructions: D[M, N] = A[M, K] B[K, N] + C, by the lane maps of AMD's CDNA2, CDNA3 and CDNA4 manuals.

For one-block instructions of tile M = N: lane l holds row (column of B) l % M and, with E = K * M / 64 elements a lane,
k = (l // M) * E + e. A 32 x 32 result has row (reg // 4) * 8 + (lane // 32) * 4 + reg % 4 and column lane % 32; a
16 x 16 result row (lane // 16) * 4 + reg and column lane % 16. The exec mask is ignored, as on the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .float8 import float8_table
from .operands import constant_bits, register, vector
from .parser import Instruction
from .wave import Wave

Step = Callable[[Wave], None]
_NAME = re.compile(r"v_mfma_(f32|i32|f64)_(\d+)x(\d+)x(\d+)_?(\w+)$")
_F8F6F4 = {0: "fp8", 1: "bf8"}


def decode(ins: Instruction, arch: str) -> Step | None:
    """Closure of a v_mfma instruction, None when it is not one."""
    if not ins.name.startswith(("v_mfma_", "v_smfmac_")):
        return None
    match = _NAME.match(ins.name)
    if match is None:
        raise NotImplementedError(ins.text)
    result, m, n, k, types = match[1], int(match[2]), int(match[3]), int(match[4]), match[5]
    a_type, b_type = _types(ins, types)
    if result != "f32" or m != n or m not in (16, 32) or int(ins.modifiers.get("abid", "0")):
        raise NotImplementedError(ins.text)
    elements = k * m // 64
    if elements == 0:
        raise NotImplementedError(f"multi-block {ins.text}")
    read_a = _operand(ins.operands[1], a_type, m, elements, arch)
    read_b = _operand(ins.operands[2], b_type, m, elements, arch)
    registers = m * m // 64
    out = vector(ins.operands[0])
    gather, scatter = _tile(m)
    addend = register(ins.operands[3])
    if addend is None:
        bits = constant_bits(ins.operands[3], "f32")
        fixed = np.full((m, m), np.uint32(bits).view(np.float32))

        def step_fixed(w: Wave) -> None:
            w.f[out : out + registers] = scatter(read_a(w) @ read_b(w).T + fixed)

        return step_fixed
    c = addend[1]

    def step(w: Wave) -> None:
        w.f[out : out + registers] = scatter(read_a(w) @ read_b(w).T + gather(w.f[c : c + registers]))

    return step


def _types(ins: Instruction, types: str) -> tuple[str, str]:
    if types == "f8f6f4":
        formats = [int(ins.modifiers.get(key, "0")) for key in ("cbsz", "blgp")]
        if any(f not in _F8F6F4 for f in formats):
            raise NotImplementedError(ins.text)
        return _F8F6F4[formats[0]], _F8F6F4[formats[1]]
    if any(int(ins.modifiers.get(key, "0")) for key in ("cbsz", "blgp")):
        raise NotImplementedError(ins.text)
    if types in ("fp8_fp8", "fp8_bf8", "bf8_fp8", "bf8_bf8"):
        return types[:3], types[4:]
    known = {"bf16": "bf16", "bf16_1k": "bf16", "f16": "f16", "f32": "f32"}
    if types not in known:
        raise NotImplementedError(ins.text)
    return known[types], known[types]


def _tile(m: int) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    """(registers [R, 64] -> [m, m], [m, m] -> [R, 64])."""
    groups, halves = (4, 2) if m == 32 else (1, 4)

    def gather(r: np.ndarray) -> np.ndarray:
        return r.reshape(groups, 4, halves, m).transpose(0, 2, 1, 3).reshape(m, m)

    def scatter(d: np.ndarray) -> np.ndarray:
        return d.reshape(groups, halves, 4, m).transpose(0, 2, 1, 3).reshape(-1, 64)

    return gather, scatter


def _operand(text: str, kind: str, m: int, elements: int, arch: str) -> Callable[[Wave], np.ndarray]:
    """Closure -> float32 [m, K]."""
    row = vector(text)
    size = {"bf16": 2, "f16": 2, "f32": 4, "fp8": 1, "bf8": 1}[kind]
    words = elements * size // 4
    table = float8_table(kind, arch) if size == 1 else None

    def read(w: Wave) -> np.ndarray:
        raw = np.ascontiguousarray(w.v[row : row + words].T)  # [lane, words]
        if kind == "f32":
            values: Any = raw.view(np.float32)
        elif kind == "bf16":
            values = (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        elif kind == "f16":
            values = raw.view(np.float16).astype(np.float32)
        else:
            assert table is not None
            values = table[raw.view(np.uint8)]
        return values.reshape(64 // m, m, elements).transpose(1, 0, 2).reshape(m, -1)

    return read
