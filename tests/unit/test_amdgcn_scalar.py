"""Interpreter: scalar instructions against integer formulas."""

from __future__ import annotations

import pytest

from tests.support.amdgcn.snippet import execute, new_wave

A, B = 0x9234_5678, 0x8000_0003
M32 = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("name", "value", "scc"),
    [
        ("s_add_u32", (A + B) & M32, 1),
        ("s_sub_u32", (A - B) & M32, 0),
        ("s_add_i32", (A + B) & M32, 1),
        ("s_sub_i32", (A - B) & M32, 0),
        ("s_min_i32", B, 0),
        ("s_max_u32", A, 1),
        ("s_and_b32", A & B, 1),
        ("s_andn2_b32", A & ~B & M32, 1),
        ("s_xnor_b32", ~(A ^ B) & M32, 1),
        ("s_lshl_b32", A << 3 & M32, 1),
        ("s_lshr_b32", A >> 3, 1),
        ("s_ashr_i32", (A - (1 << 32)) >> 3 & M32, 1),
        ("s_mul_i32", A * B & M32, 0),
        ("s_mul_hi_u32", A * B >> 32, 0),
        ("s_mul_hi_i32", (A - (1 << 32)) * (B - (1 << 32)) >> 32 & M32, 0),
        ("s_pack_lh_b32_b16", A & 0xFFFF | B & 0xFFFF0000, 0),
        ("s_lshl2_add_u32", ((A << 2) + B) & M32, 1),
    ],
)
def test_binary(name: str, value: int, scc: int) -> None:
    wave = new_wave()
    wave.s[2], wave.s[3] = A, B
    execute(wave, f"{name} s1, s2, s3")
    assert (wave.s[1], wave.scc) == (value, scc)


def test_carry_chain_is_64_bit_addition() -> None:
    wave = new_wave()
    wave.s[0:4] = [0xFFFFFFFF, 1, 2, 3]
    execute(wave, "s_add_u32 s4, s0, s2\ns_addc_u32 s5, s1, s3\ns_sub_u32 s6, s4, s2\ns_subb_u32 s7, s5, s3")
    assert wave.pair(4) == 0x1_FFFF_FFFF + 0x3_0000_0002
    assert wave.pair(6) == 0x1_FFFF_FFFF


@pytest.mark.parametrize(
    ("name", "immediate", "value"),
    [("s_bfe_u32", 8 | 12 << 16, A >> 8 & 0xFFF), ("s_bfe_i32", 20 | 12 << 16, (0x923 - 0x1000) & M32)],
)
def test_bit_field(name: str, immediate: int, value: int) -> None:
    wave = new_wave()
    wave.s[2] = A
    execute(wave, f"{name} s1, s2, {immediate:#x}")
    assert wave.s[1] == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("s_ff1_i32_b32 s1, s2", 3),
        ("s_flbit_i32_b32 s1, s2", 0),
        ("s_bcnt1_i32_b32 s1, s2", bin(A).count("1")),
        ("s_brev_b32 s1, s2", int(f"{A:032b}"[::-1], 2)),
        ("s_abs_i32 s1, s2", (1 << 32) - A),
        ("s_sext_i32_i16 s1, s2", 0x5678),
        ("s_movk_i32 s1, 0x8000", 0xFFFF8000),
        ("s_not_b32 s1, s2", ~A & M32),
        ("s_mov_b32 s1, 1.0", 0x3F800000),
    ],
)
def test_unary(name: str, value: int) -> None:
    wave = new_wave()
    wave.s[2] = A
    assert execute(wave, name).s[1] == value


@pytest.mark.parametrize(
    ("name", "scc"),
    [
        ("s_cmp_gt_i32 s2, s3", 1), ("s_cmp_lt_u32 s2, s3", 0), ("s_cmp_eq_u64 s[2:3], s[2:3]", 1),
        ("s_cmpk_lg_i32 s2, 0x5678", 1), ("s_cmp_lt_i32 s2, -1", 1), ("s_bitcmp1_b32 s2, 31", 1),
    ],
)  # fmt: skip
def test_compare(name: str, scc: int) -> None:
    wave = new_wave()
    wave.s[2], wave.s[3] = A, B
    assert execute(wave, name).scc == scc


def test_saveexec_and_select() -> None:
    wave = new_wave()
    wave.s[2], wave.s[3] = 0xF0, 0
    execute(wave, "s_and_saveexec_b64 s[4:5], s[2:3]\ns_cselect_b32 s6, 1, 2\ns_xor_b64 s[8:9], exec, s[4:5]")
    assert wave.exec == 0xF0
    assert wave.pair(4) == (1 << 64) - 1
    assert wave.s[6] == 1
    assert wave.pair(8) == (1 << 64) - 1 - 0xF0
    assert wave.mask.sum() == 4


def test_loop_runs_to_its_bound() -> None:
    wave = new_wave()
    execute(
        wave,
        "s_mov_b32 s0, 0\n"
        "s_mov_b32 s1, 0\n"
        "loop:\n"
        "s_add_i32 s1, s1, s0\n"
        "s_add_i32 s0, s0, 1\n"
        "s_cmp_lt_i32 s0, 10\n"
        "s_cbranch_scc1 loop",
    )
    assert wave.s[1] == 45


def test_unknown_instruction_is_named() -> None:
    with pytest.raises(NotImplementedError, match="s_frobnicate_b32 s0, s1"):
        execute(new_wave(), "s_frobnicate_b32 s0, s1")
