"""Vector arithmetic: one table row an instruction, one generic decoder.

A row is (kind of the destination, kinds of the sources, function of the source lanes). Sign modifiers, SDWA, DPP,
op_sel, clamp and output scaling are applied around the function. Sources: "Vector ALU Operations" of AMD's CDNA2, CDNA3
and CDNA4 instruction set manuals. Floating point rounds to nearest even; v_div_fixup divides, so that the division
sequence (v_div_scale, v_rcp, fma refinement, v_div_fmas, v_div_fixup) gives what it gives on the device: the correctly
rounded quotient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .operands import DTYPE, Dpp, Read, reader, vector
from .parser import Instruction
from .wave import Wave

Step = Callable[[Wave], None]
Function = Callable[..., Any]
_31, _63, _16 = np.uint32(31), np.uint64(63), np.uint32(16)
F32, F16, U32, I32, U64 = np.float32, np.float16, np.uint32, np.int32, np.uint64


def _fma(a: Any, b: Any, c: Any) -> Any:
    return np.asarray(np.multiply(a, b, dtype=np.float64) + c).astype(F32)


def _fma16(a: Any, b: Any, c: Any) -> Any:
    return np.asarray(np.multiply(a, b, dtype=np.float64) + c).astype(F16)


def _med3(a: Any, b: Any, c: Any) -> Any:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _to_int(a: Any, low: int, high: int, dtype: Any) -> Any:
    clean = np.nan_to_num(np.asarray(a, np.float64), nan=0.0, posinf=high, neginf=low)
    return np.clip(np.trunc(clean), low, high).astype(np.int64).astype(dtype)


def _perm(a: Any, b: Any, selector: Any) -> Any:
    """Bytes picked from {a, b}; b holds bytes 0-3. 8-11 replicate a sign, 12 is 0x00, above is 0xff."""
    both = np.asarray(a, U64) << U64(32) | np.asarray(b, U64)
    out = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(selector)), U32)
    for n in range(4):
        pick = np.asarray(selector) >> U32(8 * n) & U32(0xFF)
        byte = (both >> (np.minimum(pick, 7).astype(U64) * U64(8)) & U64(0xFF)).astype(U32)
        sign_bit = (np.clip(pick, 8, 11).astype(U64) - U64(8)) * U64(16) + U64(15)
        sign = (both >> sign_bit & U64(1)).astype(U32) * U32(255)
        byte = np.where(pick < 8, byte, np.where(pick < 12, sign, np.where(pick == 12, U32(0), U32(255))))
        out |= byte << U32(8 * n)
    return out


def _bfe(is_signed: bool) -> Function:
    def bfe(a: Any, offset: Any, width: Any) -> Any:
        shifted, bits = a.view(U32) >> (offset & _31), width & _31
        low = shifted & ((U32(1) << bits) - U32(1))
        if not is_signed:
            return low
        sign = np.where(bits > 0, U32(1) << (np.maximum(bits, U32(1)) - U32(1)), U32(0))
        return ((low ^ sign) - sign).view(I32)

    return bfe


def _bits(count: Callable[[int], int]) -> Function:
    return lambda a: np.array([count(int(x)) for x in np.broadcast_to(a, 64)], U32)


def _mul_hi(dtype: Any) -> Function:
    return lambda a, b: (np.multiply(a, b, dtype=dtype) >> dtype(32)).astype(U32)


def bf16_bits(x: Any) -> Any:
    """float32 -> bf16 bits in uint32, to nearest even; NaN stays NaN."""
    u = np.ascontiguousarray(x, F32).view(U32)
    rounded = (u + U32(0x7FFF) + (u >> _16 & U32(1))) >> _16
    return np.where(np.isnan(x), u >> _16 | U32(0x40), rounded)


def _pack(low: Any, high: Any) -> Any:
    return (np.asarray(low).astype(U32) & U32(0xFFFF)) | np.asarray(high).astype(U32) << _16


def _f16_bits(x: Any) -> Any:
    return np.asarray(x).astype(F16).view(np.uint16)


def _toward_zero16(x: Any) -> Any:
    half = np.asarray(x).astype(F16)
    over = np.abs(half.astype(F32)) > np.abs(x)
    return np.where(over, np.nextafter(half, F16(0)), half).view(np.uint16)


def _align(a: Any, b: Any, shift: Any) -> Any:
    return ((a.astype(U64) << U64(32) | b) >> shift.astype(U64)).astype(U32)


def _byte(n: int) -> Function:
    return lambda a: (a >> U32(8 * n) & U32(0xFF)).astype(F32)


def _turns(function: Function) -> Function:
    return lambda a: function(np.asarray(a, np.float64) * (2 * np.pi)).astype(F32)


def _u24(a: Any) -> Any:
    return a & U32(0xFFFFFF)


def _i24(a: Any) -> Any:
    return (a << I32(8)) >> I32(8)


def _ldexp(a: Any, n: Any) -> Any:
    return np.ldexp(a, n)


_OPS: dict[str, tuple[str, str, Function]] = {
    "v_mov_b32": ("u32", "u32", lambda a: a),
    "v_accvgpr_read_b32": ("u32", "u32", lambda a: a),
    "v_accvgpr_write_b32": ("u32", "u32", lambda a: a),
    "v_accvgpr_mov_b32": ("u32", "u32", lambda a: a),
    "v_not_b32": ("u32", "u32", lambda a: ~a),
    "v_bfrev_b32": ("u32", "u32", _bits(lambda x: int(f"{x:032b}"[::-1], 2))),
    "v_ffbh_u32": ("u32", "u32", _bits(lambda x: 32 - x.bit_length() if x else 0xFFFFFFFF)),
    "v_ffbl_b32": ("u32", "u32", _bits(lambda x: (x & -x).bit_length() - 1 if x else 0xFFFFFFFF)),
    "v_bcnt_u32_b32": ("u32", "u32 u32", lambda a, b: _bits(int.bit_count)(a) + b),
    "v_add_u32": ("u32", "u32 u32", lambda a, b: a + b),
    "v_sub_u32": ("u32", "u32 u32", lambda a, b: a - b),
    "v_subrev_u32": ("u32", "u32 u32", lambda a, b: b - a),
    "v_add_i32": ("u32", "u32 u32", lambda a, b: a + b),
    "v_sub_i32": ("u32", "u32 u32", lambda a, b: a - b),
    "v_mul_lo_u32": ("u32", "u32 u32", lambda a, b: a * b),
    "v_mul_hi_u32": ("u32", "u32 u32", _mul_hi(np.uint64)),
    "v_mul_hi_i32": ("u32", "i32 i32", _mul_hi(np.int64)),
    "v_mul_u32_u24": ("u32", "u32 u32", lambda a, b: _u24(a) * _u24(b)),
    "v_mul_i32_i24": ("i32", "i32 i32", lambda a, b: _i24(a) * _i24(b)),
    "v_mul_hi_u32_u24": ("u32", "u32 u32", lambda a, b: _mul_hi(np.uint64)(_u24(a), _u24(b))),
    "v_mad_u32_u24": ("u32", "u32 u32 u32", lambda a, b, c: _u24(a) * _u24(b) + c),
    "v_mad_i32_i24": ("i32", "i32 i32 i32", lambda a, b, c: _i24(a) * _i24(b) + c),
    "v_lshlrev_b32": ("u32", "u32 u32", lambda a, b: b << (a & _31)),
    "v_lshrrev_b32": ("u32", "u32 u32", lambda a, b: b >> (a & _31)),
    "v_ashrrev_i32": ("i32", "u32 i32", lambda a, b: b >> (a & _31).astype(I32)),
    "v_lshlrev_b64": ("u64", "u32 u64", lambda a, b: b << (a.astype(U64) & _63)),
    "v_lshrrev_b64": ("u64", "u32 u64", lambda a, b: b >> (a.astype(U64) & _63)),
    "v_ashrrev_i64": ("i64", "u32 i64", lambda a, b: b >> (a.astype(np.int64) & np.int64(63))),
    "v_lshl_add_u64": ("u64", "u64 u32 u64", lambda a, b, c: (a << (b.astype(U64) & _63)) + c),
    "v_mov_b64": ("u64", "u64", lambda a: a),
    "v_and_b32": ("u32", "u32 u32", lambda a, b: a & b),
    "v_or_b32": ("u32", "u32 u32", lambda a, b: a | b),
    "v_xor_b32": ("u32", "u32 u32", lambda a, b: a ^ b),
    "v_xnor_b32": ("u32", "u32 u32", lambda a, b: ~(a ^ b)),
    "v_or3_b32": ("u32", "u32 u32 u32", lambda a, b, c: a | b | c),
    "v_and_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: a & b | c),
    "v_xad_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_add3_u32": ("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
    "v_lshl_add_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a << (b & _31)) + c),
    "v_add_lshl_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a + b) << (c & _31)),
    "v_lshl_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: a << (b & _31) | c),
    "v_bfe_u32": ("u32", "u32 u32 u32", _bfe(False)),
    "v_bfe_i32": ("i32", "i32 u32 u32", _bfe(True)),
    "v_bfi_b32": ("u32", "u32 u32 u32", lambda a, b, c: a & b | ~a & c),
    "v_bfm_b32": ("u32", "u32 u32", lambda a, b: ((U32(1) << (a & _31)) - U32(1)) << (b & _31)),
    "v_alignbit_b32": ("u32", "u32 u32 u32", lambda a, b, c: _align(a, b, c & _31)),
    "v_alignbyte_b32": ("u32", "u32 u32 u32", lambda a, b, c: _align(a, b, (c & U32(3)) * U32(8))),
    "v_perm_b32": ("u32", "u32 u32 u32", _perm),
    "v_min_u32": ("u32", "u32 u32", np.minimum), "v_max_u32": ("u32", "u32 u32", np.maximum),
    "v_min_i32": ("i32", "i32 i32", np.minimum), "v_max_i32": ("i32", "i32 i32", np.maximum),
    "v_min3_u32": ("u32", "u32 u32 u32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("u32", "u32 u32 u32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_i32": ("i32", "i32 i32 i32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("i32", "i32 i32 i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u32": ("u32", "u32 u32 u32", _med3), "v_med3_i32": ("i32", "i32 i32 i32", _med3),
    "v_med3_f32": ("f32", "f32 f32 f32", _med3),
    "v_sad_u32": ("u32", "u32 u32 u32", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c),
    "v_add_u16": ("u16", "u16 u16", lambda a, b: a + b), "v_sub_u16": ("u16", "u16 u16", lambda a, b: a - b),
    "v_mul_lo_u16": ("u16", "u16 u16", lambda a, b: a * b),
    "v_max_u16": ("u16", "u16 u16", np.maximum), "v_min_u16": ("u16", "u16 u16", np.minimum),
    "v_max_i16": ("i16", "i16 i16", np.maximum), "v_min_i16": ("i16", "i16 i16", np.minimum),
    "v_lshlrev_b16": ("u16", "u16 u16", lambda a, b: b << (a & np.uint16(15))),
    "v_lshrrev_b16": ("u16", "u16 u16", lambda a, b: b >> (a & np.uint16(15))),
    "v_ashrrev_i16": ("i16", "u16 i16", lambda a, b: b >> (a & np.uint16(15)).astype(np.int16)),
    "v_mad_u16": ("u16", "u16 u16 u16", lambda a, b, c: a * b + c),
    "v_add_f32": ("f32", "f32 f32", lambda a, b: a + b),
    "v_sub_f32": ("f32", "f32 f32", lambda a, b: a - b),
    "v_subrev_f32": ("f32", "f32 f32", lambda a, b: b - a),
    "v_mul_f32": ("f32", "f32 f32", lambda a, b: a * b),
    "v_mul_legacy_f32": ("f32", "f32 f32", lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b)),
    "v_fma_f32": ("f32", "f32 f32 f32", _fma),
    "v_max_f32": ("f32", "f32 f32", np.fmax), "v_min_f32": ("f32", "f32 f32", np.fmin),
    "v_max3_f32": ("f32", "f32 f32 f32", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "v_min3_f32": ("f32", "f32 f32 f32", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "v_exp_f32": ("f32", "f32", np.exp2), "v_log_f32": ("f32", "f32", np.log2),
    "v_rcp_f32": ("f32", "f32", lambda a: F32(1) / a), "v_rcp_iflag_f32": ("f32", "f32", lambda a: F32(1) / a),
    "v_rsq_f32": ("f32", "f32", lambda a: F32(1) / np.sqrt(a)), "v_sqrt_f32": ("f32", "f32", np.sqrt),
    "v_sin_f32": ("f32", "f32", _turns(np.sin)), "v_cos_f32": ("f32", "f32", _turns(np.cos)),
    "v_trunc_f32": ("f32", "f32", np.trunc), "v_rndne_f32": ("f32", "f32", np.rint),
    "v_floor_f32": ("f32", "f32", np.floor), "v_ceil_f32": ("f32", "f32", np.ceil),
    "v_fract_f32": ("f32", "f32", lambda a: a - np.floor(a)),
    "v_ldexp_f32": ("f32", "f32 i32", _ldexp),
    "v_frexp_exp_i32_f32": ("i32", "f32", lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0)),
    "v_frexp_mant_f32": ("f32", "f32", lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a)),
    "v_div_fixup_f32": ("f32", "f32 f32 f32", lambda q, den, num: num / den),
    "v_add_f64": ("f64", "f64 f64", lambda a, b: a + b), "v_mul_f64": ("f64", "f64 f64", lambda a, b: a * b),
    "v_fma_f64": ("f64", "f64 f64 f64", lambda a, b, c: a * b + c),
    "v_max_f64": ("f64", "f64 f64", np.fmax), "v_min_f64": ("f64", "f64 f64", np.fmin),
    "v_rcp_f64": ("f64", "f64", lambda a: 1 / a),
    "v_add_f16": ("f16", "f16 f16", lambda a, b: a + b), "v_sub_f16": ("f16", "f16 f16", lambda a, b: a - b),
    "v_subrev_f16": ("f16", "f16 f16", lambda a, b: b - a), "v_mul_f16": ("f16", "f16 f16", lambda a, b: a * b),
    "v_max_f16": ("f16", "f16 f16", np.fmax), "v_min_f16": ("f16", "f16 f16", np.fmin),
    "v_fma_f16": ("f16", "f16 f16 f16", _fma16),
    "v_cvt_f32_i32": ("f32", "i32", lambda a: a.astype(F32)), "v_cvt_f32_u32": ("f32", "u32", lambda a: a.astype(F32)),
    "v_cvt_i32_f32": ("i32", "f32", lambda a: _to_int(a, -(2**31), 2**31 - 1, I32)),
    "v_cvt_u32_f32": ("u32", "f32", lambda a: _to_int(a, 0, 2**32 - 1, U32)),
    "v_cvt_f16_f32": ("f16", "f32", lambda a: a.astype(F16)), "v_cvt_f32_f16": ("f32", "f16", lambda a: a.astype(F32)),
    "v_cvt_f32_bf16": ("f32", "u16", lambda a: (a.astype(U32) << _16).view(F32)),
    "v_cvt_f64_f32": ("f64", "f32", lambda a: a.astype(np.float64)),
    "v_cvt_f32_f64": ("f32", "f64", lambda a: a.astype(F32)),
    "v_cvt_f64_i32": ("f64", "i32", lambda a: a.astype(np.float64)),
    "v_cvt_f64_u32": ("f64", "u32", lambda a: a.astype(np.float64)),
    "v_cvt_i32_f64": ("i32", "f64", lambda a: _to_int(a, -(2**31), 2**31 - 1, I32)),
    "v_cvt_u32_f64": ("u32", "f64", lambda a: _to_int(a, 0, 2**32 - 1, U32)),
    "v_cvt_f32_ubyte0": ("f32", "u32", _byte(0)), "v_cvt_f32_ubyte1": ("f32", "u32", _byte(1)),
    "v_cvt_f32_ubyte2": ("f32", "u32", _byte(2)), "v_cvt_f32_ubyte3": ("f32", "u32", _byte(3)),
    "v_cvt_pk_bf16_f32": ("u32", "f32 f32", lambda a, b: _pack(bf16_bits(a), bf16_bits(b))),
    "v_cvt_pk_f16_f32": ("u32", "f32 f32", lambda a, b: _pack(_f16_bits(a), _f16_bits(b))),
    "v_cvt_pkrtz_f16_f32": ("u32", "f32 f32", lambda a, b: _pack(_toward_zero16(a), _toward_zero16(b))),
    "v_pack_b32_f16": ("u32", "u16 u16", _pack),
}  # fmt: skip
#: Three-source 16-bit instructions keep the high half of the destination; the others clear it (GFX9).
_KEEPS_HIGH = {"v_fma_f16", "v_mad_u16"}
_ACCUMULATE = {  # name -> the three-source instruction whose last source is the destination
    "v_fmac_f32": "v_fma_f32", "v_mac_f32": "v_fma_f32", "v_fmac_f16": "v_fma_f16", "v_fmac_f64": "v_fma_f64",
}  # fmt: skip
_LITERAL = {"v_fmaak_f32", "v_madak_f32", "v_fmamk_f32", "v_madmk_f32"}  # printed in the order of v_fma_f32
_OUTPUT_SCALE = {("mul", "2"): 2.0, ("mul", "4"): 4.0, ("div", "2"): 0.5}
_MATRIX = {"u32": "v", "i32": "i", "f32": "f"}


def op_sel(ins: Instruction, key: str, default: int, count: int) -> list[int]:
    """The bits of op_sel, op_sel_hi, neg_lo or neg_hi, one a source."""
    if key not in ins.modifiers:
        return [default] * count
    return [int(x) for x in ins.modifiers[key].strip("[]").split(",")]


def decode(ins: Instruction) -> Step | None:
    """Closure of an instruction of the table, None when it is not in it."""
    name, sources = ins.name, ins.operands[1:]
    if name in _ACCUMULATE:
        name, sources = _ACCUMULATE[name], [*sources, ins.operands[0]]
    elif name in _LITERAL:
        name = "v_fma_f32"
    row = _OPS.get(name)
    if row is None:
        return None
    kind, kinds, function = row[0], row[1].split(), row[2]
    dpp = Dpp(ins.modifiers) if any(c in ins.modifiers for c in Dpp.CONTROLS) else None
    halves = op_sel(ins, "op_sel", 0, len(kinds) + 1)
    reads = [
        reader(text, k, half=halves[n], select=ins.modifiers.get(f"src{n}_sel", ""), dpp=dpp if n == 0 else None)
        for n, (text, k) in enumerate(zip(sources, kinds, strict=True))
    ]
    function = _adjusted(ins, kind, function)
    high = halves[-1] if len(halves) > len(kinds) else 0
    put = writer(ins, ins.operands[0], kind, dpp, keep_high=name in _KEEPS_HIGH, high=high)
    return _step(function, reads, put)


def _step(function: Function, reads: list[Read], put: Callable[[Wave, Any], None]) -> Step:
    if len(reads) == 1:
        a = reads[0]
        return lambda w: put(w, function(a(w)))
    if len(reads) == 2:
        a, b = reads
        return lambda w: put(w, function(a(w), b(w)))
    a, b, c = reads
    return lambda w: put(w, function(a(w), b(w), c(w)))


def _saturated(ins: Instruction, kind: str, function: Function) -> Function:
    """An integer sum or difference that stays at the limits of its type."""
    if not ins.name.startswith(("v_add_u32", "v_sub_u32", "v_add_i32", "v_sub_i32")):
        raise NotImplementedError(f"integer clamp: {ins.text}")
    limits = np.iinfo(DTYPE[kind])

    def saturated(*operands: Any) -> Any:
        exact = function(*(np.asarray(x).astype(np.int64) for x in operands))
        return np.clip(exact, limits.min, limits.max).astype(DTYPE[kind])

    return saturated


def _adjusted(ins: Instruction, kind: str, function: Function) -> Function:
    """The function with output scaling and clamp."""
    factor = next((f for (key, n), f in _OUTPUT_SCALE.items() if ins.modifiers.get(key) == n), None)
    if factor is not None:
        unscaled, scale = function, DTYPE[kind](factor)
        function = lambda *x: unscaled(*x) * scale  # noqa: E731
    if "clamp" in ins.modifiers:
        if not kind.startswith("f"):
            return _saturated(ins, kind, function)
        free, low, high = function, DTYPE[kind](0), DTYPE[kind](1)
        function = lambda *x: np.fmin(np.fmax(free(*x), low), high)  # noqa: E731
    return function


def writer(
    ins: Instruction, text: str, kind: str, dpp: Dpp | None = None, *, keep_high: bool = False, high: int = 0
) -> Callable[[Wave, Any], None]:
    """Closure that writes lanes of a kind into a vector register under exec, DPP and SDWA rules."""
    if text.startswith(("s", "vcc")):
        raise NotImplementedError(f"vector result in a scalar register: {ins.text}")
    row = vector(text)
    if "dst_sel" in ins.modifiers and ins.modifiers["dst_sel"] != "DWORD":
        return _sdwa_writer(ins, row, kind)
    if kind.endswith("64"):

        def put64(w: Wave, value: Any) -> None:
            bits = np.asarray(value).view(U64)
            w.put(row, bits.astype(U32))
            w.put(row + 1, (bits >> U64(32)).astype(U32))

        return put64
    if kind.endswith("16"):

        def put16(w: Wave, value: Any) -> None:
            bits = np.ascontiguousarray(value).view(np.uint16).astype(U32)
            if high:
                bits = bits << _16 | w.v[row] & U32(0xFFFF)
            elif keep_high:
                bits = bits | w.v[row] & U32(0xFFFF0000)
            w.put(row, bits)

        return put16
    matrix = _MATRIX[kind]
    if dpp is not None:

        def put_dpp(w: Wave, value: Any) -> None:
            np.copyto(getattr(w, matrix)[row], value, where=dpp.write_mask(w), casting="unsafe")

        return put_dpp
    if kind == "f32":

        def put_f32(w: Wave, value: Any) -> None:
            if w.full:
                w.f[row] = value
            else:
                np.copyto(w.f[row], value, where=w.mask)

        return put_f32

    def put(w: Wave, value: Any) -> None:
        target = getattr(w, matrix)[row]
        if w.full:
            target[:] = value
        else:
            np.copyto(target, value, where=w.mask)

    return put


def _sdwa_writer(ins: Instruction, row: int, kind: str) -> Callable[[Wave, Any], None]:
    unit, _, index = ins.modifiers["dst_sel"].partition("_")
    width = {"BYTE": 8, "WORD": 16}[unit]
    shift, low = U32(width * int(index)), U32((1 << width) - 1)
    unused = ins.modifiers.get("dst_unused", "UNUSED_PAD")
    if unused == "UNUSED_SEXT":
        raise NotImplementedError(ins.text)

    def put(w: Wave, value: Any) -> None:
        raw = np.ascontiguousarray(value)
        bits = raw.view(np.uint16).astype(U32) if kind.endswith("16") else raw.view(U32)
        bits = (bits & low) << shift
        if unused == "UNUSED_PRESERVE":
            bits = bits | w.v[row] & ~(low << shift)
        w.put(row, bits)

    return put
