"""Interpreter: vector instructions against numpy formulas."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.amdgcn.snippet import execute, new_wave
from tests.support.amdgcn.wave import Wave, bits_of

LANE = np.arange(64)
EDGES = np.array([0, 1, 31, 32, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678], np.uint32)


def integers(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**32, 64, dtype=np.uint32)
    values[:8] = rng.permutation(EDGES)
    return values


def wave_with(**registers: np.ndarray) -> Wave:
    wave = new_wave()
    for name, value in registers.items():
        wave.v[int(name[1:])] = value.view(np.uint32)
    return wave


def s64(x: np.ndarray) -> np.ndarray:
    return x.view(np.int32).astype(np.int64)


def u64(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint64)


INTEGER = {
    "v_add_u32": lambda a, b, c: u64(a) + u64(b),
    "v_sub_u32": lambda a, b, c: u64(a) - u64(b),
    "v_subrev_u32": lambda a, b, c: u64(b) - u64(a),
    "v_mul_lo_u32": lambda a, b, c: u64(a) * u64(b),
    "v_mul_hi_u32": lambda a, b, c: u64(a) * u64(b) >> np.uint64(32),
    "v_mul_hi_i32": lambda a, b, c: s64(a) * s64(b) >> 32,
    "v_mul_u32_u24": lambda a, b, c: u64(a & 0xFFFFFF) * u64(b & 0xFFFFFF),
    "v_mad_u32_u24": lambda a, b, c: u64(a & 0xFFFFFF) * u64(b & 0xFFFFFF) + u64(c),
    "v_lshlrev_b32": lambda a, b, c: u64(b) << u64(a & 31),
    "v_lshrrev_b32": lambda a, b, c: u64(b) >> u64(a & 31),
    "v_ashrrev_i32": lambda a, b, c: s64(b) >> (a & 31).astype(np.int64),
    "v_and_b32": lambda a, b, c: a & b,
    "v_xnor_b32": lambda a, b, c: ~(a ^ b),
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_and_or_b32": lambda a, b, c: (a & b) | c,
    "v_xad_u32": lambda a, b, c: u64(a ^ b) + u64(c),
    "v_add3_u32": lambda a, b, c: u64(a) + u64(b) + u64(c),
    "v_lshl_add_u32": lambda a, b, c: (u64(a) << u64(b & 31)) + u64(c),
    "v_add_lshl_u32": lambda a, b, c: ((u64(a) + u64(b)) & np.uint64(0xFFFFFFFF)) << u64(c & 31),
    "v_lshl_or_b32": lambda a, b, c: (u64(a) << u64(b & 31)) | u64(c),
    "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
    "v_bfe_u32": lambda a, b, c: (u64(a) >> u64(b & 31)) & ((np.uint64(1) << u64(c & 31)) - np.uint64(1)),
    "v_alignbit_b32": lambda a, b, c: ((u64(a) << np.uint64(32)) | u64(b)) >> u64(c & 31),
    "v_min_i32": lambda a, b, c: np.minimum(s64(a), s64(b)),
    "v_max3_i32": lambda a, b, c: np.maximum(np.maximum(s64(a), s64(b)), s64(c)),
    "v_med3_i32": lambda a, b, c: np.sort(np.stack([s64(a), s64(b), s64(c)]), 0)[1],
    "v_sad_u32": lambda a, b, c: np.abs(a.astype(np.int64) - b.astype(np.int64)) + c.astype(np.int64),
}
THREE = {"v_mad_u32_u24", "v_or3_b32", "v_and_or_b32", "v_xad_u32", "v_add3_u32", "v_lshl_add_u32", "v_add_lshl_u32",
         "v_lshl_or_b32", "v_bfi_b32", "v_bfe_u32", "v_alignbit_b32", "v_max3_i32", "v_med3_i32",
         "v_sad_u32"}  # fmt: skip


@pytest.mark.parametrize("name", INTEGER)
def test_integer(name: str, seed: int) -> None:
    a, b, c = (integers(seed + n) for n in range(3))
    wave = wave_with(v1=a, v2=b, v3=c)
    execute(wave, f"{name} v0, v1, v2" + (", v3" if name in THREE else ""))
    with np.errstate(all="ignore"):
        expected = INTEGER[name](a, b, c).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    np.testing.assert_array_equal(wave.v[0], expected)


def test_bit_field_is_signed(seed: int) -> None:
    a = integers(seed)
    wave = execute(wave_with(v1=a), "v_bfe_i32 v0, v1, 4, 12")
    field = (a >> 4 & 0xFFF).astype(np.int64)
    np.testing.assert_array_equal(wave.i[0], np.where(field >= 2048, field - 4096, field))


def test_64_bit(seed: int) -> None:
    a, b, c, d = (integers(seed + n) for n in range(4))
    wave = wave_with(v2=a, v3=b, v4=c, v5=d)
    execute(wave, "v_lshl_add_u64 v[0:1], v[2:3], 2, v[4:5]\nv_lshlrev_b64 v[6:7], 7, v[2:3]\n"
                  "v_mad_u64_u32 v[8:9], vcc, v2, v3, v[4:5]\nv_mad_i64_i32 v[10:11], vcc, v2, v3, v[4:5]\n"
                  "v_add_co_u32 v12, vcc, v2, v4\nv_addc_co_u32 v13, vcc, v3, v5, vcc\n"
                  "v_sub_co_u32 v14, vcc, v2, v4\nv_subb_co_u32 v15, vcc, v3, v5, vcc")  # fmt: skip
    wide = lambda lo, hi: u64(lo) | u64(hi) << np.uint64(32)  # noqa: E731
    x, y = wide(a, b), wide(c, d)
    with np.errstate(all="ignore"):
        expected = {0: (x << np.uint64(2)) + y, 6: x << np.uint64(7), 8: u64(a) * u64(b) + y,
                    10: (s64(a) * s64(b)).view(np.uint64) + y, 12: x + y, 14: x - y}  # fmt: skip
    for row, value in expected.items():
        np.testing.assert_array_equal(wide(wave.v[row], wave.v[row + 1]), value, err_msg=f"v[{row}]")


FLOAT = {
    "v_add_f32": lambda a, b, c: a + b,
    "v_sub_f32": lambda a, b, c: a - b,
    "v_mul_f32": lambda a, b, c: a * b,
    "v_max_f32": lambda a, b, c: np.fmax(a, b),
    "v_min3_f32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_max3_f32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "v_med3_f32": lambda a, b, c: np.sort(np.stack([a, b, c]), 0)[1],
    "v_fma_f32": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
}


@pytest.mark.parametrize("name", FLOAT)
def test_float(name: str, seed: int) -> None:
    a, b, c = np.random.default_rng(seed).standard_normal((3, 64)).astype(np.float32)
    three = "3" in name.split("_f32")[0] or "fma" in name
    wave = execute(wave_with(v1=a, v2=b, v3=c), f"{name} v0, v1, v2" + (", v3" if three else ""))
    np.testing.assert_array_equal(wave.f[0], FLOAT[name](a, b, c))


UNARY = {
    "v_exp_f32": np.exp2, "v_log_f32": lambda x: np.log2(x), "v_rcp_f32": lambda x: 1 / x, "v_sqrt_f32": np.sqrt,
    "v_rsq_f32": lambda x: 1 / np.sqrt(x), "v_floor_f32": np.floor, "v_rndne_f32": np.rint,
    "v_fract_f32": lambda x: x % 1,
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_float_function(name: str, seed: int) -> None:
    x = np.random.default_rng(seed).uniform(0.1, 9, 64).astype(np.float32)
    wave = execute(wave_with(v1=x), f"{name} v0, v1")
    np.testing.assert_allclose(wave.f[0], UNARY[name](x), rtol=3e-7, atol=3e-7)


def test_sign_modifiers_clamp_and_output_scale(seed: int) -> None:
    a, b = np.random.default_rng(seed).standard_normal((2, 64)).astype(np.float32)
    wave = wave_with(v1=a, v2=b)
    execute(wave, "v_add_f32_e64 v3, -v1, |v2|\nv_mul_f32_e64 v4, v1, v2 mul:2\nv_add_f32_e64 v5, v1, v2 clamp\n"
                  "v_fma_f32 v6, -v1, v2, 1.0\nv_add_f32_e64 v7, v1, -|v2|")  # fmt: skip
    np.testing.assert_array_equal(wave.f[3], -a + np.abs(b))
    np.testing.assert_array_equal(wave.f[4], a * b * 2)
    np.testing.assert_array_equal(wave.f[5], np.clip(a + b, 0, 1))
    np.testing.assert_array_equal(wave.f[6], (-a.astype(np.float64) * b + 1).astype(np.float32))
    np.testing.assert_array_equal(wave.f[7], a - np.abs(b))


def test_division_sequence_is_exact(seed: int) -> None:
    a, b = np.random.default_rng(seed).standard_normal((2, 64)).astype(np.float32)
    wave = execute(wave_with(v1=a, v2=b), """
        v_div_scale_f32 v3, s[0:1], v2, v2, v1
        v_rcp_f32 v4, v3
        v_div_scale_f32 v5, vcc, v1, v2, v1
        v_fma_f32 v6, -v3, v4, 1.0
        v_fmac_f32 v4, v6, v4
        v_mul_f32 v6, v5, v4
        v_fma_f32 v7, -v3, v6, v5
        v_fmac_f32 v6, v7, v4
        v_fma_f32 v3, -v3, v6, v5
        v_div_fmas_f32 v3, v3, v4, v6
        v_div_fixup_f32 v0, v3, v2, v1""")  # fmt: skip
    np.testing.assert_array_equal(wave.f[0], a / b)


def test_half_precision_and_packed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = rng.standard_normal((3, 64, 2)).astype(np.float16)
    x, y, z, t = rng.standard_normal((4, 64)).astype(np.float32)
    wave = wave_with(
        v1=a.view(np.uint32)[:, 0], v2=b.view(np.uint32)[:, 0], v3=c.view(np.uint32)[:, 0], v4=x, v5=y, v6=z, v7=t
    )
    execute(wave, "v_pk_fma_f16 v10, v1, v2, v3\n"
        "v_pk_mul_f16 v11, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]\n"
        "v_add_f16 v12, v1, v2\n"
                  "v_pk_mul_f32 v[14:15], v[4:5], v[6:7] op_sel_hi:[1,0]\n"
                      "v_pk_mov_b32 v[16:17], v[4:5], v[6:7] op_sel:[0,1]\n"
                  "v_pk_fma_f32 v[18:19], v[4:5], v[6:7], v[4:5] neg_lo:[1,0,0] neg_hi:[1,0,0]")  # fmt: skip
    fma = (a.astype(np.float64) * b + c).astype(np.float16)
    np.testing.assert_array_equal(wave.v[10].view(np.float16).reshape(64, 2), fma)
    np.testing.assert_array_equal(wave.v[11].view(np.float16).reshape(64, 2), a[:, ::-1] * b)
    np.testing.assert_array_equal(
        wave.v[12].view(np.float16).reshape(64, 2), np.stack([a[:, 0] + b[:, 0], 0 * a[:, 0]], 1)
    )
    np.testing.assert_array_equal(wave.f[14:16], np.stack([x * z, y * z]))
    np.testing.assert_array_equal(wave.f[16:18], np.stack([x, t]))
    exact = lambda p, q, r: (-p.astype(np.float64) * q + r).astype(np.float32)  # noqa: E731
    np.testing.assert_array_equal(wave.f[18:20], np.stack([exact(x, z, x), exact(y, t, y)]))


def test_mixed_precision_fma(seed: int) -> None:
    rng = np.random.default_rng(seed)
    half = rng.standard_normal((64, 2)).astype(np.float16)
    x, y = rng.standard_normal((2, 64)).astype(np.float32)
    wave = wave_with(v1=half.view(np.uint32)[:, 0], v2=x, v3=y, v4=half.view(np.uint32)[:, 0])
    execute(
        wave,
        "v_fma_mix_f32 v0, v1, -v2, v3 op_sel:[1,0,0] op_sel_hi:[1,0,0]\n"
        "v_fma_mixhi_f16 v4, v1, v2, v3 op_sel_hi:[1,0,0]\nv_fma_mixlo_f16 v5, v2, v3, 0",
    )
    first, second = half[:, 0].astype(np.float64), half[:, 1].astype(np.float64)
    np.testing.assert_array_equal(wave.f[0], (second * -x + y).astype(np.float32))
    mixed = wave.v[4].view(np.float16).reshape(64, 2)
    np.testing.assert_array_equal(mixed, np.stack([half[:, 0], (first * x + y).astype(np.float16)], 1))
    np.testing.assert_array_equal(wave.v[5].view(np.float16)[::2], (x.astype(np.float64) * y).astype(np.float16))


def test_conversions(seed: int) -> None:
    x = (np.random.default_rng(seed).standard_normal(64) * 100).astype(np.float32)
    x[:4] = [np.nan, 1e20, -1e20, 0.5]
    n = integers(seed)
    wave = wave_with(v1=x, v2=n, v3=-x)
    execute(wave, "v_cvt_i32_f32 v4, v1\nv_cvt_u32_f32 v5, v1\nv_cvt_f32_i32 v6, v2\nv_cvt_f16_f32 v7, v1\n"
                  "v_cvt_pk_bf16_f32 v8, v1, v3\n"
                      "v_cvt_f32_ubyte2 v9, v2\n"
                      "v_cvt_pkrtz_f16_f32 v10, v1, v3", "gfx950")  # fmt: skip
    clean = np.nan_to_num(x.astype(np.float64))
    np.testing.assert_array_equal(wave.i[4], np.clip(np.trunc(clean), -(2**31), 2**31 - 1).astype(np.int64))
    np.testing.assert_array_equal(wave.v[5], np.clip(np.trunc(clean), 0, 2**32 - 1).astype(np.uint64))
    np.testing.assert_array_equal(wave.f[6], n.view(np.int32).astype(np.float32))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(wave.v[7].view(np.float16)[::2], x.astype(np.float16))
    import torch

    bf16 = torch.from_numpy(np.stack([x, -x], 1)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(wave.v[8].view(np.uint16).reshape(64, 2)[1:], bf16[1:])
    np.testing.assert_array_equal(wave.f[9], (n >> 16 & 0xFF).astype(np.float32))
    towards_zero = wave.v[10].view(np.float16)[6::2].astype(np.float32)
    assert (np.abs(towards_zero) <= np.abs(x[3:])).all()


def test_compare_select_and_exec(seed: int) -> None:
    a, b = np.random.default_rng(seed).standard_normal((2, 64)).astype(np.float32)
    a[5] = np.nan
    wave = wave_with(v1=a, v2=b, v0=np.zeros(64, np.uint32))
    wave.set_exec(0x00FF_FFFF_FFFF_FFFF)
    execute(wave, "v_cmp_gt_f32 vcc, v1, v2\nv_cndmask_b32 v0, v1, v2, vcc\nv_cmp_nlt_f32 s[4:5], v1, v2\n"
                  "v_cmp_class_f32 s[6:7], v1, 3\nv_cmp_lt_i32 s[8:9], 3, v1")  # fmt: skip
    inside = LANE < 56
    assert wave.pair(106) == bits_of((a > b) & inside)
    assert wave.pair(4) == bits_of(~(a < b) & inside)
    assert wave.pair(6) == 1 << 5
    assert wave.pair(8) == bits_of((a.view(np.int32) > 3) & inside)
    np.testing.assert_array_equal(wave.f[0][inside], np.where(a > b, b, a)[inside])
    assert (wave.v[0][~inside] == 0).all()


def test_lane_moves(seed: int) -> None:
    a = integers(seed)
    wave = wave_with(v1=a, v2=a, v3=a + np.uint32(1), v4=a + np.uint32(1), v5=a)
    wave.s[9] = 17
    execute(wave, "v_readlane_b32 s0, v1, s9\n"
        "v_writelane_b32 v2, s9, 3\n"
        "v_mbcnt_lo_u32_b32 v6, -1, 0\n"
        "v_mbcnt_hi_u32_b32 v6, -1, v6\n"
                  "v_permlane32_swap_b32 v4, v5\n"
                      "s_mov_b64 exec, 0xf0\n"
                      "v_readfirstlane_b32 s1, v1", "gfx950")  # fmt: skip
    assert wave.s[0] == a[17]
    assert wave.s[1] == a[4]
    assert wave.v[2][3] == 17
    np.testing.assert_array_equal(wave.v[6], LANE)
    np.testing.assert_array_equal(wave.v[4], np.concatenate([a[:32] + np.uint32(1), a[:32]]))
    np.testing.assert_array_equal(wave.v[5], np.concatenate([a[32:] + np.uint32(1), a[32:]]))


ROW = LANE & ~15
DPP = {
    "quad_perm:[1,0,3,2]": (LANE ^ 1, LANE >= 0),
    "row_shr:1": (LANE - 1, LANE % 16 >= 1),
    "row_shl:4": (LANE + 4, LANE % 16 < 12),
    "row_ror:8": (ROW + (LANE - 8) % 16, LANE >= 0),
    "row_mirror": (LANE ^ 15, LANE >= 0),
    "row_half_mirror": (LANE ^ 7, LANE >= 0),
    "row_newbcast:5": (ROW + 5, LANE >= 0),
    "row_bcast:15": (ROW - 1, LANE >= 16),
    "row_bcast:31": (0 * LANE + 31, LANE >= 32),
}


@pytest.mark.parametrize("bound", [False, True], ids=["keep", "zero"])
@pytest.mark.parametrize("control", DPP)
def test_dpp(control: str, bound: bool, seed: int) -> None:
    a, old = integers(seed), integers(seed + 1)
    source, valid = DPP[control]
    suffix = " bound_ctrl:1" if bound else ""
    wave = execute(wave_with(v1=a, v0=old), f"v_mov_b32_dpp v0, v1 {control} row_mask:0xf bank_mask:0xf{suffix}")
    np.testing.assert_array_equal(wave.v[0], np.where(valid, a[source % 64], 0 if bound else old))


def test_dpp_masks_rows(seed: int) -> None:
    a, old = integers(seed), integers(seed + 1)
    wave = execute(wave_with(v1=a, v0=old), "v_mov_b32_dpp v0, v1 row_mirror row_mask:0x5 bank_mask:0xf")
    np.testing.assert_array_equal(wave.v[0], np.where(LANE // 16 % 2 == 0, a[LANE ^ 15], old))


def test_sdwa_and_byte_permute(seed: int) -> None:
    a, b = integers(seed), integers(seed + 1)
    wave = wave_with(v1=a, v2=b, v3=b)
    execute(wave, "v_add_u32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1\n"
                  "v_lshlrev_b32_sdwa v3, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE "
                  "src0_sel:BYTE_0 src1_sel:DWORD\n"
                  "v_perm_b32 v4, v1, v2, 0x0c070100\nv_bitop3_b32 v5, v1, v2, v1 bitop3:0xca", "gfx950")  # fmt: skip
    np.testing.assert_array_equal(wave.v[0], (a >> 16 & 0xFF) + (b >> 16))
    np.testing.assert_array_equal(wave.v[3], ((b << (a & 31)) << 16) | (b & 0xFFFF))
    np.testing.assert_array_equal(wave.v[4], (a >> 24 << 16) | (b & 0xFFFF))
    np.testing.assert_array_equal(wave.v[5], (a & b) | (~a & a))


def test_accumulation_registers(seed: int) -> None:
    a = integers(seed)
    wave = execute(wave_with(v1=a), "v_accvgpr_write_b32 a3, v1\nv_accvgpr_mov_b32 a4, a3\nv_accvgpr_read_b32 v0, a4")
    np.testing.assert_array_equal(wave.v[0], a)
    np.testing.assert_array_equal(wave.v[256 + 3], a)
