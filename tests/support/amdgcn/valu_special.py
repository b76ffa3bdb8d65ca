"""Vector instructions that do not fit the table of `valu`: carries, compares, selects, lane moves, packed math."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .operands import DTYPE, Dpp, reader, register, scalar_reader, scalar_writer, vector
from .parser import Instruction
from .valu import F16, U32, _fma, _fma16, op_sel, writer
from .wave import LANES, Wave, bits_of, lanes_of

Step = Callable[[Wave], None]

_COMPARE = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "lg": lambda a, b: (a < b) | (a > b),
    "ne": np.not_equal, "ge": np.greater_equal, "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b), "neq": np.not_equal, "nlt": lambda a, b: ~(a < b),
    "f": lambda a, b: np.zeros(LANES, bool), "t": lambda a, b: np.ones(LANES, bool),
}  # fmt: skip
_CMP = re.compile(r"v_cmp(x?)_(\w+)_([fiu])(16|32|64)$")
_PACKED = {
    "v_pk_fma_f32": _fma, "v_pk_mul_f32": lambda a, b: a * b, "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mov_b32": lambda a, b: None,
    "v_pk_fma_f16": _fma16, "v_pk_mul_f16": lambda a, b: a * b, "v_pk_add_f16": lambda a, b: a + b,
    "v_pk_max_f16": np.fmax, "v_pk_min_f16": np.fmin,
    "v_pk_add_u16": lambda a, b: a + b, "v_pk_sub_i16": lambda a, b: a - b, "v_pk_mul_lo_u16": lambda a, b: a * b,
    "v_pk_lshlrev_b16": lambda a, b: b << (a & np.uint16(15)),
    "v_pk_lshrrev_b16": lambda a, b: b >> (a & np.uint16(15)),
    "v_pk_max_u16": np.maximum, "v_pk_min_u16": np.minimum,
    "v_pk_mad_u16": lambda a, b, c: a * b + c,
}  # fmt: skip


def decode(ins: Instruction) -> Step | None:
    """Closure of a special vector instruction, None when it is not one."""
    name = ins.name
    match = _CMP.match(name)
    if match:
        return _compare(ins, match)
    if name in _PACKED:
        return _packed(ins)
    build = _NAMED.get(name)
    return build(ins) if build else None


def _sources(ins: Instruction, texts: list[str], kinds: list[str]) -> list[Callable[[Wave], Any]]:
    dpp = Dpp(ins.modifiers) if any(c in ins.modifiers for c in Dpp.CONTROLS) else None
    return [
        reader(text, kind, select=ins.modifiers.get(f"src{n}_sel", ""), dpp=dpp if n == 0 else None)
        for n, (text, kind) in enumerate(zip(texts, kinds, strict=False))
    ]


def _compare(ins: Instruction, match: re.Match[str]) -> Step:
    writes_exec, relation, letter, bits = match.groups()
    put = scalar_writer(ins.operands[0], wide=True)
    if relation == "class":
        return _class(ins, put)
    compare = _COMPARE[relation]
    a, b = _sources(ins, ins.operands[1:], [letter + bits] * 2)

    def step(w: Wave) -> None:
        found = bits_of(np.broadcast_to(compare(a(w), b(w)), LANES)) & w.exec
        put(w, found)
        if writes_exec:
            w.set_exec(found)

    return step


def _class(ins: Instruction, put: Callable[[Wave, int], None]) -> Step:
    """v_cmp_class_f32: bits sNaN, qNaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf."""
    a, wanted = _sources(ins, ins.operands[1:], ["f32", "u32"])

    def step(w: Wave) -> None:
        x = np.broadcast_to(a(w), LANES)
        bits = np.ascontiguousarray(x).view(U32)
        negative = (bits >> U32(31)).astype(bool)
        size = bits & U32(0x7FFFFFFF)
        kind = np.select([size > 0x7F800000, size == 0x7F800000, size >= 0x800000, size > 0], [4, 3, 2, 1], 0)
        place = np.where(kind == 4, np.where(size & 0x400000, 1, 0), np.where(negative, 5 - kind, 6 + kind))
        put(w, bits_of((wanted(w) >> place.astype(U32) & U32(1)).astype(bool)) & w.exec)

    return step


def _carry(function: Callable[[Any, Any, Any], tuple[Any, Any]], takes_carry: bool) -> Callable[[Instruction], Step]:
    def build(ins: Instruction) -> Step:
        put_carry = scalar_writer(ins.operands[1], wide=True)
        a, b = _sources(ins, ins.operands[2:4], ["u32", "u32"])
        carry = scalar_reader(ins.operands[4], wide=True) if takes_carry else (lambda w: 0)
        put = writer(ins, ins.operands[0], "u32")

        def step(w: Wave) -> None:
            x, y = np.broadcast_to(a(w), LANES).astype(np.int64), np.broadcast_to(b(w), LANES).astype(np.int64)
            value, out = function(x, y, lanes_of(carry(w)).astype(np.int64))
            put(w, value.astype(U32))
            put_carry(w, bits_of(out) & w.exec)

        return step

    return build


def _add(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    total = a + b + c
    return total, total > 0xFFFFFFFF


def _sub(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    total = a - b - c
    return total, total < 0


def _mad64(kind: str) -> Callable[[Instruction], Step]:
    def build(ins: Instruction) -> Step:
        a, b, c = (
            reader(t, k) for t, k in zip(ins.operands[2:], (kind + "32", kind + "32", kind + "64"), strict=False)
        )
        wide = DTYPE[kind + "64"]
        put = writer(ins, ins.operands[0], kind + "64")
        put_carry = scalar_writer(ins.operands[1], wide=True)

        def step(w: Wave) -> None:
            addend = np.broadcast_to(c(w), LANES)
            total = np.multiply(a(w), b(w), dtype=wide) + addend
            put(w, total)
            put_carry(w, bits_of(total < addend) & w.exec)

        return step

    return build


def _cndmask(ins: Instruction) -> Step:
    a, b = _sources(ins, ins.operands[1:3], ["u32", "u32"])
    signs = [reader(t, "f32") if t[0] in "-|" and not t[1:2].isdigit() else None for t in ins.operands[1:3]]
    a, b = (r if s is None else (lambda w, s=s: s(w).view(U32)) for r, s in zip((a, b), signs, strict=False))
    condition = scalar_reader(ins.operands[3], wide=True)
    put = writer(ins, ins.operands[0], "u32")
    return lambda w: put(w, np.where(lanes_of(condition(w)), b(w), a(w)))


def _readfirstlane(ins: Instruction) -> Step:
    put, row = scalar_writer(ins.operands[0]), vector(ins.operands[1])
    return lambda w: put(w, int(w.v[row, (w.exec & -w.exec).bit_length() - 1 if w.exec else 0]))


def _readlane(ins: Instruction) -> Step:
    put, row, lane = scalar_writer(ins.operands[0]), vector(ins.operands[1]), scalar_reader(ins.operands[2])
    return lambda w: put(w, int(w.v[row, lane(w) & 63]))


def _writelane(ins: Instruction) -> Step:
    row, value, lane = vector(ins.operands[0]), scalar_reader(ins.operands[1]), scalar_reader(ins.operands[2])

    def step(w: Wave) -> None:
        w.v[row, lane(w) & 63] = value(w)

    return step


def _mbcnt(high: bool) -> Callable[[Instruction], Step]:
    lane = np.arange(LANES)
    first = 32 if high else 0
    below = np.array([((1 << max(0, min(32, n - first))) - 1) for n in lane], np.uint64).astype(U32)

    def build(ins: Instruction) -> Step:
        a, b = _sources(ins, ins.operands[1:], ["u32", "u32"])
        put = writer(ins, ins.operands[0], "u32")

        def step(w: Wave) -> None:
            ones = np.unpackbits((np.broadcast_to(a(w), LANES) & below).view(np.uint8).reshape(LANES, 4), axis=1).sum(1)
            put(w, ones.astype(U32) + b(w))

        return step

    return build


def _swap(ins: Instruction) -> Step:
    """v_swap_b32 and v_permlane{16,32}_swap_b32 (odd rows of the first register against even rows of the second)."""
    one, two = vector(ins.operands[0]), vector(ins.operands[1])
    lane = np.arange(LANES)
    if ins.name == "v_swap_b32":

        def swap(w: Wave) -> None:
            first = w.v[one].copy()
            w.put(one, w.v[two])
            w.put(two, first)

        return swap
    width = 16 if "16" in ins.name else 32
    odd = lane[(lane // width) % 2 == 1]

    def step(w: Wave) -> None:
        if not w.full:
            raise NotImplementedError(f"lane swap with inactive lanes: {ins.text}")
        upper = w.v[one, odd].copy()
        w.v[one, odd] = w.v[two, odd - width]
        w.v[two, odd - width] = upper

    return step


def _bitop3(kind: str) -> Callable[[Instruction], Step]:
    def decode(ins: Instruction) -> Step:
        a, b, c = (reader(t, kind) for t in ins.operands[1:])
        table = int(ins.modifiers["bitop3"], 0)
        put = writer(ins, ins.operands[0], kind)

        def step(w: Wave) -> None:
            x, y, z = a(w), b(w), c(w)
            out = np.zeros_like(x)
            for n in range(8):
                if table >> n & 1:
                    out = out | (x if n & 4 else ~x) & (y if n & 2 else ~y) & (z if n & 1 else ~z)
            put(w, out)

        return step

    return decode


def _div_scale(ins: Instruction) -> Step:
    """Passes the operand and no scaling flag: v_div_fixup makes the quotient."""
    a, put = reader(ins.operands[2], "f32"), writer(ins, ins.operands[0], "f32")
    flag = scalar_writer(ins.operands[1], wide=True)

    def step(w: Wave) -> None:
        put(w, a(w))
        flag(w, 0)

    return step


def _div_fmas(ins: Instruction) -> Step:
    a, b, c = (reader(t, "f32") for t in ins.operands[1:])
    put = writer(ins, ins.operands[0], "f32")
    return lambda w: put(w, _fma(a(w), b(w), c(w)))


def _packed(ins: Instruction) -> Step:
    """v_pk_*: op_sel / op_sel_hi pick the half of each source for the low / high result."""
    name, texts = ins.name, ins.operands[1:]
    n = len(texts)
    low_half, high_half = op_sel(ins, "op_sel", 0, n), op_sel(ins, "op_sel_hi", 1, n)
    low_sign, high_sign = op_sel(ins, "neg_lo", 0, n), op_sel(ins, "neg_hi", 0, n)
    row = vector(ins.operands[0])
    function = _PACKED[name]
    if name.endswith("32"):
        if name == "v_pk_mov_b32":
            first, second = _half32(texts[0], "u32", low_half[0], 0), _half32(texts[1], "u32", low_half[1], 0)

            def move(w: Wave) -> None:
                one, two = np.copy(first(w)), np.copy(second(w))
                w.put(row, one)
                w.put(row + 1, two)

            return move
        lows = [_half32(t, "f32", h, s) for t, h, s in zip(texts, low_half, low_sign, strict=False)]
        highs = [_half32(t, "f32", h, s) for t, h, s in zip(texts, high_half, high_sign, strict=False)]

        def step32(w: Wave) -> None:
            low, high = function(*(r(w) for r in lows)), function(*(r(w) for r in highs))
            for place, value in ((row, low), (row + 1, high)):
                if w.full:
                    w.f[place] = value
                else:
                    np.copyto(w.f[place], value, where=w.mask)

        return step32
    kind = "f16" if name.endswith("f16") else "u16"

    def half(text: str, which: int, negate: int) -> Callable[[Wave], Any]:
        if register(text) is None:  # an inline constant fills the low half only; the high half of it is zero for floats
            which = which if kind == "u16" else 0
        read = reader(text, kind, half=which)
        return (lambda w: -read(w)) if negate else read

    lows16 = [half(t, h, s) for t, h, s in zip(texts, low_half, low_sign, strict=False)]
    highs16 = [half(t, h, s) for t, h, s in zip(texts, high_half, high_sign, strict=False)]
    dtype = F16 if kind == "f16" else np.uint16

    def step16(w: Wave) -> None:
        low = np.asarray(function(*(r(w) for r in lows16)), dtype).view(np.uint16).astype(U32)
        high = np.asarray(function(*(r(w) for r in highs16)), dtype).view(np.uint16).astype(U32)
        w.put(row, low | high << U32(16))

    return step16


def _mix(ins: Instruction) -> Step:
    """v_fma_mix_f32, _mixlo_f16, _mixhi_f16: op_sel_hi says which sources are f16, op_sel which half of those."""
    halves, is_half = op_sel(ins, "op_sel", 0, 3), op_sel(ins, "op_sel_hi", 0, 3)
    a, b, c = (
        reader(text, "f16" if half else "f32", half=which if half else 0)
        for text, which, half in zip(ins.operands[1:], halves, is_half, strict=False)
    )
    row = vector(ins.operands[0])
    kind = ins.name.removeprefix("v_fma_mix")

    def step(w: Wave) -> None:
        value = np.asarray(np.multiply(a(w), b(w), dtype=np.float64) + c(w))
        if kind == "_f32":
            w.put(row, value.astype(np.float32).view(U32))
            return
        bits = value.astype(F16).view(np.uint16).astype(U32)
        if kind == "lo_f16":
            w.put(row, w.v[row] & U32(0xFFFF0000) | bits)
        else:
            w.put(row, w.v[row] & U32(0xFFFF) | bits << U32(16))

    return step


def _half32(text: str, kind: str, which: int, negate: int) -> Callable[[Wave], Any]:
    """Reader of one 32-bit register of a packed pair; a constant is the same in both."""
    found = register(text)
    if found is None:
        read = reader(text, kind)
    else:
        bank, n = found
        view = DTYPE[kind]
        n += which
        read = (lambda w: w.v[n].view(view)) if bank == "v" else (lambda w: U32(w.s[n]).view(view))
    return (lambda w: -read(w)) if negate else read


_NAMED: dict[str, Callable[[Instruction], Step]] = {
    "v_add_co_u32": _carry(_add, False), "v_addc_co_u32": _carry(_add, True),
    "v_sub_co_u32": _carry(_sub, False), "v_subb_co_u32": _carry(_sub, True),
    "v_subrev_co_u32": _carry(lambda a, b, c: _sub(b, a, c), False),
    "v_subbrev_co_u32": _carry(lambda a, b, c: _sub(b, a, c), True),
    "v_mad_u64_u32": _mad64("u"), "v_mad_i64_i32": _mad64("i"),
    "v_cndmask_b32": _cndmask, "v_readfirstlane_b32": _readfirstlane, "v_readlane_b32": _readlane,
    "v_writelane_b32": _writelane, "v_mbcnt_lo_u32_b32": _mbcnt(False), "v_mbcnt_hi_u32_b32": _mbcnt(True),
    "v_swap_b32": _swap, "v_permlane16_swap_b32": _swap, "v_permlane32_swap_b32": _swap, "v_bitop3_b32": _bitop3("u32"),
    "v_bitop3_b16": _bitop3("u16"),
    "v_div_scale_f32": _div_scale, "v_div_fmas_f32": _div_fmas,
    "v_fma_mix_f32": _mix, "v_fma_mixlo_f16": _mix, "v_fma_mixhi_f16": _mix,
    "v_nop": lambda ins: lambda w: None,
}  # fmt: skip
