"""Interpreter: 8-bit formats and the conversions to and from them, against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.amdgcn.float8 import float8_table
from tests.support.amdgcn.snippet import execute, new_wave

FORMATS = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
#: The first number that rounds to none: half-way from the largest (240, odd; 448, even) to what would come next.
LOST = {"gfx942": np.float32(248), "gfx950": np.nextafter(np.float32(464), np.float32(np.inf))}


def test_tables() -> None:
    fn, fnuz = float8_table("fp8", "gfx950"), float8_table("fp8", "gfx942")
    assert fn[0x7E] == 448 and np.isnan(fn[0x7F]) and fn[0x38] == 1
    assert fnuz[0x7F] == 240 and np.isnan(fnuz[0x80]) and fnuz[0x40] == 1
    assert float8_table("bf8", "gfx950")[0x3C] == 1 and np.isinf(float8_table("bf8", "gfx950")[0x7C])
    for table, dtype in ((fn, FORMATS["gfx950"]), (fnuz, FORMATS["gfx942"])):
        expected = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float().numpy()
        np.testing.assert_array_equal(table, expected)


def interesting(arch: str, seed: int) -> np.ndarray:
    """Every number of the format, what lies half-way to the next and beside that, zeros, subnormals, the ends, NaN."""
    table = float8_table("fp8", arch)
    numbers = np.unique(table[np.isfinite(table)])
    middle = (numbers[1:] + numbers[:-1]) / 2
    largest = numbers[-1]
    step = largest - numbers[-2]
    ends = np.array(
        [largest + step / 2, largest + step, -largest - step / 2, 1e30, -1e30, np.inf, -np.inf, np.nan, -0.0]
    )
    some = np.random.default_rng(seed).standard_normal(300) * 2.0 ** np.random.default_rng(seed).integers(-12, 9, 300)
    parts = (
        numbers,
        middle,
        np.nextafter(middle, np.float32(np.inf)),
        np.nextafter(middle, np.float32(-np.inf)),
        ends,
        some,
    )
    values = np.concatenate(parts).astype(np.float32)
    return np.resize(values, -(-len(values) // 128) * 128)


@pytest.mark.parametrize("arch", FORMATS)
def test_to_nearest_even(arch: str, seed: int) -> None:
    for pair in interesting(arch, seed).reshape(-1, 2, 64):
        wave = new_wave()
        wave.f[1], wave.f[2] = pair
        wave.v[0] = wave.v[3] = 0xABCD1234
        execute(wave, "v_cvt_pk_fp8_f32 v0, v1, v2\nv_cvt_pk_fp8_f32 v3, v1, v2 op_sel:[0,0,1]", arch)
        got = np.stack([wave.v[0] & 0xFF, wave.v[0] >> 8 & 0xFF])
        expected = torch.tensor(pair).to(FORMATS[arch]).view(torch.uint8).numpy()
        numbers = np.abs(pair) < LOST[arch]
        np.testing.assert_array_equal(got[numbers], expected[numbers])
        assert np.isnan(float8_table("fp8", arch)[got[~numbers]]).all(), "beyond the largest number lies NaN"
        assert (wave.v[0] >> 16 == 0xABCD).all() and (wave.v[3] & 0xFFFF == 0x1234).all()
        np.testing.assert_array_equal(wave.v[3] >> 16, wave.v[0] & 0xFFFF)


@pytest.mark.parametrize("arch", FORMATS)
def test_widening(arch: str) -> None:
    for first in range(0, 256, 64):
        byte = np.arange(first, first + 64, dtype=np.uint32)
        wave = new_wave()
        wave.v[4] = byte | (byte ^ 0xFF) << 8 | (byte ^ 0x55) << 16 | (byte ^ 0x81) << 24
        execute(wave, "v_cvt_pk_f32_fp8 v[0:1], v4\nv_cvt_pk_f32_fp8 v[2:3], v4 src0_sel:WORD_1", arch)
        for row, flipped in enumerate((0, 0xFF, 0x55, 0x81)):
            np.testing.assert_array_equal(wave.f[row], float8_table("fp8", arch)[byte ^ flipped])


def test_widening_with_a_scale() -> None:
    """Only the exponent of the scale counts."""
    byte, scale = np.arange(64, dtype=np.uint32), np.resize(np.float32([1, 1.75, 0.25, 6]), 64)
    wave = new_wave()
    wave.v[4], wave.f[5] = byte | (byte ^ 0xFF) << 8 | (byte ^ 0x55) << 16 | (byte ^ 0x81) << 24, scale
    lower, upper = (
        "v_cvt_scalef32_pk_f32_fp8 v[0:1], v4, v5",
        "v_cvt_scalef32_pk_f32_fp8 v[2:3], v4, 1.0 op_sel:[1,0,0]",
    )
    execute(wave, f"{lower}\n{upper}", "gfx950")
    table = float8_table("fp8", "gfx950")
    for row, flipped in enumerate((0, 0xFF, 0x55, 0x81)):
        power = np.exp2(np.floor(np.log2(scale))) if row < 2 else 1
        np.testing.assert_array_equal(wave.f[row], table[byte ^ flipped] * power)


def test_row_broadcast(seed: int) -> None:
    """Each lane reads lane N of its row of 16."""
    x, y = np.random.default_rng(seed).standard_normal((2, 64)).astype(np.float32)
    wave = new_wave()
    wave.f[1], wave.f[2] = x, y
    execute(wave, "v_mul_f32_dpp v0, v1, v2 row_newbcast:5 row_mask:0xf bank_mask:0xf bound_ctrl:1")
    np.testing.assert_array_equal(wave.f[0], x[np.arange(64) // 16 * 16 + 5] * y)
