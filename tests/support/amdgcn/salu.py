"""Scalar instructions: arithmetic, compares, lane masks, branches.

Registers are Python ints. Each `_*` table maps a mnemonic to a function of the source values; SCC follows the rule of
the table. Sources: "Scalar ALU Operations" of AMD's CDNA2, CDNA3 and CDNA4 instruction set manuals.
"""

from __future__ import annotations

from collections.abc import Callable

from .operands import register, scalar_reader, scalar_writer
from .parser import Instruction, Program
from .wave import VCC, Wave

Step = Callable[[Wave], None]
M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def signed(x: int, bits: int = 32) -> int:
    """Two's complement value of the low bits."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def _bfe(a: int, b: int, bits: int, is_signed: bool) -> int:
    offset, width = b & (bits - 1), b >> 16 & 0x7F
    value = (a >> offset) & ((1 << width) - 1)
    return signed(value, width) & ((1 << bits) - 1) if is_signed and width else value


def _first_one(a: int) -> int:
    return (a & -a).bit_length() - 1 if a else M32


def _leading_sign(a: int) -> int:
    flipped = a ^ M32 if a >> 31 else a
    return 32 - flipped.bit_length() if flipped else M32


_CARRY = {  # -> (result, scc)
    "s_add_u32": lambda w, a, b: (a + b, a + b > M32),
    "s_addc_u32": lambda w, a, b: (a + b + w.scc, a + b + w.scc > M32),
    "s_sub_u32": lambda w, a, b: (a - b, b > a),
    "s_subb_u32": lambda w, a, b: (a - b - w.scc, b + w.scc > a),
    "s_add_i32": lambda w, a, b: (a + b, signed(a) + signed(b) != signed(a + b)),
    "s_sub_i32": lambda w, a, b: (a - b, signed(a) - signed(b) != signed(a - b)),
    "s_min_i32": lambda w, a, b: (min(signed(a), signed(b)), signed(a) < signed(b)),
    "s_max_i32": lambda w, a, b: (max(signed(a), signed(b)), signed(a) > signed(b)),
    "s_min_u32": lambda w, a, b: (min(a, b), a < b),
    "s_max_u32": lambda w, a, b: (max(a, b), a > b),
}
_NO_SCC = {
    "s_mul_i32": lambda a, b: a * b,
    "s_mul_hi_u32": lambda a, b: a * b >> 32,
    "s_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32,
    "s_pack_ll_b32_b16": lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16,
    "s_pack_lh_b32_b16": lambda a, b: a & 0xFFFF | b & 0xFFFF0000,
    "s_pack_hh_b32_b16": lambda a, b: a >> 16 | b & 0xFFFF0000,
    "s_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
}
_NONZERO = {  # SCC = result is not zero; the 64-bit form works on pairs
    "s_and": lambda a, b: a & b,
    "s_or": lambda a, b: a | b,
    "s_xor": lambda a, b: a ^ b,
    "s_andn2": lambda a, b: a & ~b,
    "s_orn2": lambda a, b: a | ~b,
    "s_nand": lambda a, b: ~(a & b),
    "s_nor": lambda a, b: ~(a | b),
    "s_xnor": lambda a, b: ~(a ^ b),
}
_SHIFT_ADD = {f"s_lshl{n}_add_u32": n for n in (1, 2, 3, 4)}
_COMPARE = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip
_UNARY = {  # (function of the value, source is 64 bits, destination is 64 bits, SCC follows the result)
    "s_mov_b32": (lambda a: a, False, False, False),
    "s_mov_b64": (lambda a: a, True, True, False),
    "s_not_b32": (lambda a: ~a & M32, False, False, True),
    "s_not_b64": (lambda a: ~a & M64, True, True, True),
    "s_abs_i32": (lambda a: abs(signed(a)) & M32, False, False, True),
    "s_brev_b32": (lambda a: int(f"{a:032b}"[::-1], 2), False, False, False),
    "s_bcnt1_i32_b32": (lambda a: a.bit_count(), False, False, True),
    "s_bcnt1_i32_b64": (lambda a: a.bit_count(), True, False, True),
    "s_bcnt0_i32_b32": (lambda a: 32 - a.bit_count(), False, False, True),
    "s_ff1_i32_b32": (_first_one, False, False, False),
    "s_ff1_i32_b64": (_first_one, True, False, False),
    "s_flbit_i32_b32": (lambda a: 32 - a.bit_length() if a else M32, False, False, False),
    "s_flbit_i32_b64": (lambda a: 64 - a.bit_length() if a else M32, True, False, False),
    "s_flbit_i32": (_leading_sign, False, False, False),
    "s_sext_i32_i8": (lambda a: signed(a, 8) & M32, False, False, False),
    "s_sext_i32_i16": (lambda a: signed(a, 16) & M32, False, False, False),
}
_IGNORED = {
    "s_nop", "s_waitcnt", "s_sleep", "s_setprio", "s_inst_prefetch", "s_sethalt", "s_icache_inv", "s_dcache_inv",
    "s_dcache_wb", "s_setreg_imm32_b32", "s_setreg_b32", "s_ttracedata", "s_sched_barrier", "s_iglp_opt",
}  # fmt: skip


def decode(ins: Instruction, program: Program) -> Step | None:
    """Closure of a scalar instruction, None when it is not one."""
    name = ins.name
    if name in _IGNORED:
        return lambda w: None
    step = _control(ins, program) or _lane_mask(ins)
    if step is not None:
        return step
    if name in _UNARY:
        return _unary(ins)
    if name.startswith(("s_cmp_", "s_cmpk_", "s_bitcmp")):
        return _compare(ins)
    if name.startswith("s_cselect"):
        wide = name.endswith("64")
        put = scalar_writer(ins.operands[0], wide=wide)
        yes, no = (scalar_reader(x, wide=wide) for x in ins.operands[1:])
        return lambda w: put(w, yes(w) if w.scc else no(w))
    if name.startswith("s_cmov"):
        wide = name.endswith("64")
        put, get = scalar_writer(ins.operands[0], wide=wide), scalar_reader(ins.operands[1], wide=wide)
        return lambda w: put(w, get(w)) if w.scc else None
    if name in ("s_movk_i32", "s_addk_i32", "s_mulk_i32", "s_cmovk_i32"):
        return _immediate16(ins)
    return _binary(ins)


def _control(ins: Instruction, program: Program) -> Step | None:
    name = ins.name
    if name == "s_endpgm":

        def end(w: Wave) -> None:
            w.stopped = w.ended = True

        return end
    if name == "s_barrier":

        def barrier(w: Wave) -> None:
            w.stopped = True

        return barrier
    if name != "s_branch" and not name.startswith("s_cbranch_"):
        return None
    target = program.labels[ins.operands[0]]

    def jump(w: Wave) -> None:
        w.pc = target

    if name == "s_branch":
        return jump
    taken = {
        "s_cbranch_scc0": lambda w: not w.scc,
        "s_cbranch_scc1": lambda w: w.scc,
        "s_cbranch_vccz": lambda w: not w.pair(VCC),
        "s_cbranch_vccnz": lambda w: w.pair(VCC),
        "s_cbranch_execz": lambda w: not w.exec,
        "s_cbranch_execnz": lambda w: w.exec,
    }[name]

    def branch(w: Wave) -> None:
        if taken(w):
            w.pc = target

    return branch


def _lane_mask(ins: Instruction) -> Step | None:
    """s_<op>_saveexec_b64 and the gfx9 s_andn{1,2}_wrexec family."""
    if not ins.name.endswith("_saveexec_b64"):
        return None
    put, get = scalar_writer(ins.operands[0], wide=True), scalar_reader(ins.operands[1], wide=True)
    op = ins.name[: -len("_saveexec_b64")]
    combine = {
        "s_and": lambda s, e: s & e,
        "s_or": lambda s, e: s | e,
        "s_xor": lambda s, e: s ^ e,
        "s_andn2": lambda s, e: s & ~e,
        "s_orn2": lambda s, e: s | ~e,
        "s_andn1": lambda s, e: ~s & e,
        "s_orn1": lambda s, e: ~s | e,
        "s_nand": lambda s, e: ~(s & e),
        "s_nor": lambda s, e: ~(s | e),
        "s_xnor": lambda s, e: ~(s ^ e),
    }[op]

    def step(w: Wave) -> None:
        source, old = get(w), w.exec
        put(w, old)
        w.set_exec(combine(source, old) & M64)
        w.scc = int(w.exec != 0)

    return step


def _unary(ins: Instruction) -> Step:
    function, wide_in, wide_out, sets_scc = _UNARY[ins.name]
    put, get = scalar_writer(ins.operands[0], wide=wide_out), scalar_reader(ins.operands[1], wide=wide_in)

    def step(w: Wave) -> None:
        value = function(get(w))
        put(w, value)
        if sets_scc:
            w.scc = int(value != 0)

    return step


def _compare(ins: Instruction) -> Step:
    name = ins.name
    if name.startswith("s_bitcmp"):
        wanted, wide = int(name[len("s_bitcmp")]), name.endswith("64")
        a, b = scalar_reader(ins.operands[0], wide=wide), scalar_reader(ins.operands[1])
        mask = 63 if wide else 31

        def test_bit(w: Wave) -> None:
            w.scc = int((a(w) >> (b(w) & mask) & 1) == wanted)

        return test_bit
    _, _, relation, kind = name.split("_")
    compare, wide = _COMPARE[relation], kind.endswith("64")
    a, b = (scalar_reader(x, wide=wide) for x in ins.operands)
    if name.startswith("s_cmpk_") and kind == "i32":
        immediate = signed(int(ins.operands[1], 0), 16)
        b = lambda w: immediate  # noqa: E731
    if kind == "i32":

        def step(w: Wave) -> None:
            w.scc = int(compare(signed(a(w)), signed(b(w))))

    else:

        def step(w: Wave) -> None:
            w.scc = int(compare(a(w), b(w)))

    return step


def _immediate16(ins: Instruction) -> Step:
    put, immediate = scalar_writer(ins.operands[0]), signed(int(ins.operands[1], 0), 16)
    get = scalar_reader(ins.operands[0])
    if ins.name == "s_movk_i32":
        return lambda w: put(w, immediate & M32)
    if ins.name == "s_cmovk_i32":
        return lambda w: put(w, immediate & M32) if w.scc else None
    if ins.name == "s_mulk_i32":
        return lambda w: put(w, get(w) * immediate & M32)

    def step(w: Wave) -> None:
        value = signed(get(w)) + immediate
        put(w, value & M32)
        w.scc = int(value != signed(value))

    return step


def _binary(ins: Instruction) -> Step | None:
    name = ins.name
    base, _, kind = name.rpartition("_")
    if name in ("s_bitset0_b32", "s_bitset1_b32"):
        put, old, bit = scalar_writer(ins.operands[0]), scalar_reader(ins.operands[0]), scalar_reader(ins.operands[1])
        if name == "s_bitset1_b32":
            return lambda w: put(w, old(w) | 1 << (bit(w) & 31))
        return lambda w: put(w, old(w) & ~(1 << (bit(w) & 31)))
    if len(ins.operands) != 3 or (register(ins.operands[0]) or "v")[0] != "s":
        return None
    wide = kind.endswith("64")
    bits, mask = (64, M64) if wide else (32, M32)
    put = scalar_writer(ins.operands[0], wide=wide)
    if base in ("s_lshl", "s_lshr", "s_ashr", "s_bfe"):
        a, b = scalar_reader(ins.operands[1], wide=wide), scalar_reader(ins.operands[2])
        function = {
            "s_lshl": lambda x, y: x << (y & (bits - 1)),
            "s_lshr": lambda x, y: x >> (y & (bits - 1)),
            "s_ashr": lambda x, y: signed(x, bits) >> (y & (bits - 1)),
            "s_bfe": lambda x, y: _bfe(x, y, bits, kind.startswith("i")),
        }[base]
    else:
        a, b = (scalar_reader(x, wide=wide) for x in ins.operands[1:])
        if name in _CARRY:
            with_carry = _CARRY[name]

            def add(w: Wave) -> None:
                value, carry = with_carry(w, a(w), b(w))
                put(w, value & M32)
                w.scc = int(carry)

            return add
        if name in _NO_SCC:
            plain = _NO_SCC[name]
            return lambda w: put(w, plain(a(w), b(w)) & M32)
        if name in _SHIFT_ADD:
            n = _SHIFT_ADD[name]

            def shift_add(w: Wave) -> None:
                value = (a(w) << n) + b(w)
                put(w, value & M32)
                w.scc = int(value > M32)

            return shift_add
        if base not in _NONZERO:
            return None
        function = _NONZERO[base]

    def step(w: Wave) -> None:
        value = function(a(w), b(w)) & mask
        put(w, value)
        w.scc = int(value != 0)

    return step
