"""Interpreter: matrix instructions element by element against the documented lane maps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.amdgcn.float8 import float8_table
from tests.support.amdgcn.snippet import execute, new_wave

CASES = [
    ("gfx90a", "v_mfma_f32_32x32x8bf16_1k", 32, 8, "bf16"),
    ("gfx90a", "v_mfma_f32_16x16x16f16", 16, 16, "f16"),
    ("gfx942", "v_mfma_f32_32x32x8_f16", 32, 8, "f16"),
    ("gfx942", "v_mfma_f32_16x16x16_bf16", 16, 16, "bf16"),
    ("gfx942", "v_mfma_f32_32x32x2_f32", 32, 2, "f32"),
    ("gfx942", "v_mfma_f32_32x32x16_fp8_fp8", 32, 16, "fp8"),
    ("gfx942", "v_mfma_f32_16x16x32_bf8_fp8", 16, 32, "bf8"),
    ("gfx950", "v_mfma_f32_32x32x16_bf16", 32, 16, "bf16"),
    ("gfx950", "v_mfma_f32_16x16x32_f16", 16, 32, "f16"),
    ("gfx950", "v_mfma_f32_16x16x32_fp8_fp8", 16, 32, "fp8"),
    ("gfx950", "v_mfma_f32_32x32x64_f8f6f4", 32, 64, "fp8"),
]


def decoded(bits: np.ndarray, kind: str, arch: str) -> np.ndarray:
    if kind == "f32":
        return bits.view(np.float32)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return float8_table(kind, arch)[bits]


@pytest.mark.parametrize(("arch", "name", "m", "k", "kind"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
@pytest.mark.parametrize("accumulate", [False, True], ids=["zero", "acc"])
def test_against_lane_map(arch: str, name: str, m: int, k: int, kind: str, accumulate: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    elements = k * m // 64
    size = {"f32": 4, "f16": 2, "bf16": 2}.get(kind, 1)
    b_kind = "fp8" if kind == "bf8" else kind
    dtype = {4: np.uint32, 2: np.uint16, 1: np.uint8}[size]

    def random_bits() -> np.ndarray:
        if size == 1:
            magnitude, sign = rng.integers(0, 0x60, (64, elements)), rng.integers(0, 2, (64, elements))
            return (magnitude | sign << 7).astype(np.uint8)
        values = rng.standard_normal((64, elements)).astype(np.float32)
        if kind == "f16":
            return values.astype(np.float16).view(np.uint16)
        return values.view(np.uint32) if kind == "f32" else (values.view(np.uint32) >> 16).astype(np.uint16)

    a_bits, b_bits = random_bits(), random_bits()
    registers, words = m * m // 64, elements * size // 4
    wave = new_wave()
    for row, bits in ((64, a_bits), (80, b_bits)):
        wave.v[row : row + words] = np.ascontiguousarray(bits.astype(dtype)).view(np.uint32).reshape(64, words).T
    c = rng.standard_normal((registers, 64)).astype(np.float32)
    wave.f[32 : 32 + registers] = c
    span = lambda first, n: f"v[{first}:{first + n - 1}]" if n > 1 else f"v{first}"  # noqa: E731
    source = span(32, registers) if accumulate else "0"
    execute(wave, f"{name} {span(0, registers)}, {span(64, words)}, {span(80, words)}, {source}", arch)
    a, b = decoded(a_bits, kind, arch).astype(np.float64), decoded(b_bits, b_kind, arch).astype(np.float64)
    with np.errstate(all="ignore"):
        for reg in range(registers):
            for lane in range(0, 64, 7):
                row = (reg // 4) * 8 + (lane // 32) * 4 + reg % 4 if m == 32 else (lane // 16) * 4 + reg
                column = lane % m
                expected = float(c[reg, lane]) if accumulate else 0.0
                for kk in range(k):
                    group, e = divmod(kk, elements)
                    expected += a[group * m + row, e] * b[group * m + column, e]
                assert wave.f[reg, lane] == pytest.approx(expected, rel=1e-5, abs=1e-4, nan_ok=True)


def test_exec_is_ignored() -> None:
    wave = new_wave()
    wave.v[:16] = 0
    wave.v[16:20] = 0x3F803F80
    wave.set_exec(1)
    execute(wave, "v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]")
    assert (wave.f[:16] == 8).all()
