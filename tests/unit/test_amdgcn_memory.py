"""Interpreter: memory and LDS instructions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.amdgcn import MemoryFault
from tests.support.amdgcn.snippet import execute, new_wave, set_pointer

LANE = np.arange(64)


def words(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)


def test_scalar_load(seed: int) -> None:
    data = words(seed, 16)
    wave = new_wave(buffers=[data])
    set_pointer(wave, 0, data.ctypes.data)
    execute(wave, "s_load_dwordx4 s[4:7], s[0:1], 0x8\ns_load_dword s8, s[0:1], 0x3c")
    assert wave.s[4:8] == data[2:6].tolist()
    assert wave.s[8] == data[15]


@pytest.mark.parametrize("family", ["saddr", "vaddr", "buffer"])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_load_and_store(family: str, width: int, seed: int) -> None:
    data, out = words(seed, 64 * width + 4), np.zeros(64 * width + 4, np.uint32)
    wave = new_wave(buffers=[data, out])
    suffix = {1: "", 2: "x2", 3: "x3", 4: "x4"}[width]
    reg = "v8" if width == 1 else f"v[8:{7 + width}]"
    lane_offset = (LANE * 4 * width).astype(np.uint32)
    if family == "saddr":
        set_pointer(wave, 0, data.ctypes.data)
        set_pointer(wave, 2, out.ctypes.data)
        wave.v[1] = lane_offset
        execute(
            wave,
            f"global_load_dword{suffix} {reg}, v1, s[0:1] offset:16\n"
            f"global_store_dword{suffix} v1, {reg}, s[2:3] offset:16",
        )
    elif family == "vaddr":
        for row, buffer in ((2, data), (4, out)):
            address = np.uint64(buffer.ctypes.data) + lane_offset
            wave.v[row], wave.v[row + 1] = address.astype(np.uint32), (address >> np.uint64(32)).astype(np.uint32)
        execute(
            wave,
            f"global_load_dword{suffix} {reg}, v[2:3], off offset:16\nflat_store_dword{suffix} v[4:5], {reg} offset:16",
        )
    else:
        for register, buffer in ((0, data), (4, out)):
            set_pointer(wave, register, buffer.ctypes.data)
            wave.s[register + 2 : register + 4] = [buffer.nbytes, 0x27000]
        wave.s[9] = 16
        wave.v[1] = lane_offset
        execute(
            wave,
            f"buffer_load_dword{suffix} {reg}, v1, s[0:3], s9 offen\n"
            f"buffer_store_dword{suffix} {reg}, v1, s[4:7], 0 offen offset:16",
        )
    np.testing.assert_array_equal(out[4:], data[4:])
    assert (out[:4] == 0).all()


def test_buffer_out_of_range_reads_zero_and_drops_stores(seed: int) -> None:
    data = words(seed, 64)
    before = data.copy()
    wave = new_wave(buffers=[data])
    set_pointer(wave, 0, data.ctypes.data)
    wave.s[2], wave.s[3] = 128, 0x27000
    wave.v[1] = LANE * 4
    wave.v[3] = 7
    execute(wave, "buffer_load_dword v2, v1, s[0:3], 0 offen\nbuffer_store_dword v3, v1, s[0:3], 0 offen")
    np.testing.assert_array_equal(wave.v[2], np.where(LANE < 32, before, 0))
    np.testing.assert_array_equal(data, np.where(LANE < 32, 7, before))


def test_narrow_loads_and_stores(seed: int) -> None:
    data, out = words(seed, 64), np.zeros(64, np.uint32)
    raw = data.view(np.uint8)
    wave = new_wave(buffers=[data, out])
    set_pointer(wave, 0, data.ctypes.data)
    set_pointer(wave, 2, out.ctypes.data)
    wave.v[1] = LANE + 3
    wave.v[7] = 0xAAAA5555
    execute(wave, "global_load_sbyte v2, v1, s[0:1]\n"
        "global_load_ushort v3, v1, s[0:1]\n"
        "global_load_short_d16_hi v7, v1, s[0:1]\n"
                  "global_store_byte v1, v2, s[2:3]\nglobal_load_sshort v4, v1, s[0:1]")  # fmt: skip
    np.testing.assert_array_equal(wave.i[2], raw[LANE + 3].view(np.int8))
    half = raw[LANE + 3].astype(np.uint32) | raw[LANE + 4].astype(np.uint32) << 8
    np.testing.assert_array_equal(wave.v[3], half)
    np.testing.assert_array_equal(wave.i[4], half.astype(np.uint16).view(np.int16))
    np.testing.assert_array_equal(wave.v[7], half << 16 | 0x5555)
    np.testing.assert_array_equal(out.view(np.uint8)[3:67], raw[3:67])


def test_inactive_lanes_touch_nothing(seed: int) -> None:
    data = words(seed, 8)
    wave = new_wave(buffers=[data])
    set_pointer(wave, 0, data.ctypes.data)
    wave.v[1] = LANE * 4  # lanes from 8 on lie outside the buffer
    wave.v[2] = 5
    wave.set_exec(0xFF)
    execute(wave, "global_load_dword v2, v1, s[0:1]")
    np.testing.assert_array_equal(wave.v[2], np.concatenate([data, np.full(56, 5, np.uint32)]))
    wave.set_exec(0x1FF)
    with pytest.raises(MemoryFault):
        execute(wave, "global_load_dword v2, v1, s[0:1]")


def test_atomics_are_serialised(seed: int) -> None:
    data = np.zeros(4, np.uint32)
    wave = new_wave(buffers=[data])
    set_pointer(wave, 0, data.ctypes.data)
    wave.v[1] = 4
    wave.v[2] = LANE
    execute(wave, "global_atomic_add v3, v1, v2, s[0:1] sc0\nglobal_atomic_umax v1, v2, s[0:1] offset:4")
    assert data.tolist() == [0, LANE.sum(), 63, 0]
    np.testing.assert_array_equal(wave.v[3], np.cumsum(LANE) - LANE)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_lds_round_trip(width: int, seed: int) -> None:
    wave = new_wave(8192)
    wave.v[8 : 8 + width] = words(seed, 64 * width).reshape(width, 64)
    reg, back = ("v8", "v16") if width == 1 else (f"v[8:{7 + width}]", f"v[16:{15 + width}]")
    wave.v[1] = LANE[::-1] * 4 * width
    execute(wave, f"ds_write_b{32 * width} v1, {reg} offset:64\nds_read_b{32 * width} {back}, v1 offset:64")
    np.testing.assert_array_equal(wave.v[16 : 16 + width], wave.v[8 : 8 + width])
    np.testing.assert_array_equal(
        wave.lds.words[16 : 16 + 64 * width].reshape(64, width)[::-1].T, wave.v[8 : 8 + width]
    )


def test_lds_pairs(seed: int) -> None:
    wave = new_wave(64 * 1024)
    wave.v[2:6] = words(seed, 256).reshape(4, 64)
    wave.v[1] = LANE * 8
    execute(wave, "ds_write2_b32 v1, v2, v3 offset0:1 offset1:0\nds_read_b64 v[8:9], v1\n"
                  "ds_write2st64_b64 v1, v[2:3], v[4:5] offset0:2 offset1:4\n"
                      "ds_read2st64_b64 v[10:13], v1 offset0:4 offset1:2")  # fmt: skip
    np.testing.assert_array_equal(wave.v[8:10], wave.v[[3, 2]])
    np.testing.assert_array_equal(wave.v[10:14], wave.v[[4, 5, 2, 3]])


def test_lds_halves_and_bounds(seed: int) -> None:
    wave = new_wave(256)
    wave.v[2] = words(seed, 64)
    wave.v[1] = LANE * 2
    execute(wave, "ds_write_b16 v1, v2\n"
        "ds_write_b16_d16_hi v1, v2 offset:128\n"
        "ds_read_u16 v3, v1\n"
        "ds_read_u16 v4, v1 offset:128\n"
                  "ds_read_i8 v5, v1 offset:1")  # fmt: skip
    np.testing.assert_array_equal(wave.v[3] | wave.v[4] << 16, wave.v[2])
    np.testing.assert_array_equal(wave.i[5], (wave.v[2] >> 8 & 0xFF).astype(np.uint8).view(np.int8))
    with pytest.raises(MemoryFault):
        execute(wave, "ds_read_u16 v3, v1 offset:130")


def test_lane_crossbar(seed: int) -> None:
    wave = new_wave()
    order = np.random.default_rng(seed).permutation(64)
    wave.v[1], wave.v[2] = order * 4, words(seed, 64)
    execute(wave, "ds_bpermute_b32 v3, v1, v2\n"
        "ds_permute_b32 v4, v1, v2\n"
        "ds_swizzle_b32 v5, v2 offset:swizzle(SWAP,16)\n"
                  "ds_swizzle_b32 v6, v2 offset:0x401f")  # fmt: skip
    np.testing.assert_array_equal(wave.v[3], wave.v[2][order])
    np.testing.assert_array_equal(wave.v[4][order], wave.v[2])
    np.testing.assert_array_equal(wave.v[5], wave.v[2][LANE ^ 16])
    np.testing.assert_array_equal(wave.v[6], wave.v[2][LANE ^ 16])


def test_transpose_read(seed: int) -> None:
    """Sixteen lanes read a 4 x 16 matrix of 16-bit elements row by row and get its columns."""
    wave = new_wave(512)
    wave.lds.words[:] = words(seed, 128)
    wave.v[1] = LANE * 8
    execute(wave, "ds_read_b64_tr_b16 v[2:3], v1", "gfx950")
    matrices = wave.lds.words.view(np.uint16).reshape(4, 4, 16)
    got = np.ascontiguousarray(wave.v[2:4].T).view(np.uint16).reshape(4, 16, 4)
    np.testing.assert_array_equal(got, matrices.transpose(0, 2, 1))


def test_load_straight_to_lds(seed: int) -> None:
    data = words(seed, 64)
    wave = new_wave(1024, [data])
    set_pointer(wave, 0, data.ctypes.data)
    wave.s[124] = 256
    wave.v[1] = LANE[::-1] * 4
    execute(wave, "global_load_lds_dword v1, s[0:1] offset:0")
    np.testing.assert_array_equal(wave.lds.words[64:128], data[::-1])
