"""A mask's program as source text: C for CUDA and HIP (and, in the tests, for the host), Python for Triton.

Both printers walk the nodes of `mla.mask_expr`; what is used more than once becomes a named value, so text and work
stay proportional to the expression. ``//`` and ``%`` are printed as shifts or helpers, because both languages truncate
where a mask floors. What the functions are and how a kernel calls them: docs/design.md.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mla.mask_expr import INT32_MIN, Node, postorder
from mla.mask_interval import TILE_HIDDEN, TILE_PARTIAL, TILE_VISIBLE
from mla.masks import BIASES_MAX, CAPTURES_MAX, Mask, MaskProgram

_LINE = 72  # characters beyond which an expression is given a name
_BIAS_DTYPE_CODES = {"fp32": 0, "bf16": 1, "fp16": 2}


@dataclass(frozen=True)
class _Language:
    formats: Mapping[str, str]
    capture: str
    assignment: str
    result: str
    true: str
    false: str

    def literal(self, value: int) -> str:
        if value == INT32_MIN:
            return f"({INT32_MIN + 1} - 1)"  # -2147483648 is two tokens in C, the second too large for an int
        return str(value) if value >= 0 else f"({value})"

    def expression(self, node: Node, names: Mapping[Node, str], program: MaskProgram) -> str:
        operands = [names[arg] for arg in node.args]
        match node.op:
            case "var":
                return str(node.value)
            case "bool":
                return self.true if node.value else self.false
            case "int":
                return self.literal(int(node.value))  # type: ignore[arg-type]
            case "capture":
                slot = int(node.value)  # type: ignore[arg-type]
                return self.capture.format(slot=slot, index=program.captures[slot])
            case "floordiv" | "mod" if (divisor := node.args[1].constant or 0) > 0 and divisor & (divisor - 1) == 0:
                if node.op == "floordiv":
                    return f"({operands[0]} >> {divisor.bit_length() - 1})"
                return f"({operands[0]} & {divisor - 1})"
            case op:
                return self.formats[op].format(*operands)

    def body(self, root: Node, program: MaskProgram) -> str:
        """Return the statements that compute ``root`` and return it."""
        nodes = list(postorder(root))
        uses = Counter(arg for node in nodes for arg in node.args)
        names: dict[Node, str] = {}
        lines: list[str] = []
        for node in nodes:
            text = self.expression(node, names, program)
            if (node.args and node is not root and (uses[node] > 1 or len(text) > _LINE)) or node.op == "capture":
                name = f"t{len(lines)}"
                lines.append(self.assignment.format(type="bool" if node.is_bool else "int", name=name, value=text))
                text = name
            names[node] = text
        return "\n".join(f"    {line}" for line in [*lines, self.result.format(value=names[root])])


_COMMON = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "floordiv": "mask_floordiv({}, {})",
    "mod": "mask_mod({}, {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "eq": "({} == {})",
    "ne": "({} != {})",
    "and": "({} & {})",
    "or": "({} | {})",
    "xor": "({} != {})",
}
_C = _Language(
    formats={
        **_COMMON,
        "min": "mask_min({}, {})",
        "max": "mask_max({}, {})",
        "abs": "mask_abs({})",
        "where": "({} ? {} : {})",
    },
    capture="m.capture[{slot}][{index}]",
    assignment="const {type} {name} = {value};",
    result="return {value};",
    true="true",
    false="false",
)
_TRITON = _Language(
    formats={
        **_COMMON,
        "min": "tl.minimum({}, {})",
        "max": "tl.maximum({}, {})",
        "abs": "tl.abs({})",
        "where": "tl.where({}, {}, {})",
    },
    capture="tl.load(c{slot} + {index})",
    assignment="{name} = {value}",
    result="return {value}",
    true="(q == q)",
    false="(q != q)",
)

_C_HEADER = f"""\
struct MaskBias {{ const void* data; long long stride_b, stride_h, stride_q; int rows, cols; }};
struct MaskArgs {{ const int* capture[MLA_MASK_CAPTURES_MAX]; MaskBias bias[MLA_MASK_BIASES_MAX]; }};
enum : int {{ kTileHidden = {TILE_HIDDEN}, kTilePartial = {TILE_PARTIAL}, kTileVisible = {TILE_VISIBLE} }};

MLA_DEVICE int mask_min(int x, int y) {{ return x < y ? x : y; }}
MLA_DEVICE int mask_max(int x, int y) {{ return x < y ? y : x; }}
MLA_DEVICE int mask_abs(int x) {{ return x < 0 ? -x : x; }}
// Rounded towards minus infinity, 0 for a zero divisor. A constant divisor leaves a multiplication and a correction.
MLA_DEVICE int mask_floordiv(int x, int d) {{
    if (d == 0) return 0;
    const int quotient = x / d, rest = x - quotient * d;
    return quotient - (rest != 0 && (rest < 0) != (d < 0));
}}
MLA_DEVICE int mask_mod(int x, int d) {{
    if (d == 0) return 0;
    const int rest = x % d;
    return rest != 0 && (rest < 0) != (d < 0) ? rest + d : rest;
}}
"""

_C_LOADS = {
    "fp32": """\
MLA_DEVICE float mask_load_fp32(const void* data, long long i) { return static_cast<const float*>(data)[i]; }
""",
    "bf16": """\
MLA_DEVICE float mask_load_bf16(const void* data, long long i) {
    return mask_float(static_cast<unsigned int>(static_cast<const unsigned short*>(data)[i]) << 16);
}
""",
    "fp16": """\
MLA_DEVICE float mask_load_fp16(const void* data, long long i) {
    const unsigned int half = static_cast<const unsigned short*>(data)[i];
    const unsigned int sign = (half & 0x8000u) << 16, magnitude = (half & 0x7fffu) << 13;
    if ((half & 0x7c00u) == 0x7c00u) return mask_float(sign | magnitude | 0x7f800000u);  // infinity, NaN
    if ((half & 0x7c00u) != 0) return mask_float(sign | (magnitude + (112u << 23)));
    // Subnormal: as the fraction of 2^-14 + x, which needs no subnormal float.
    const float value = mask_float(magnitude + (113u << 23)) - mask_float(113u << 23);
    return sign ? -value : value;
}
""",
}


def c_source(program: MaskProgram) -> str:
    """Return the mask's C text: ``MaskArgs``, ``mask_visible``, ``mask_tile_class`` and, with a bias, ``mask_bias``.

    No header is included. The file that includes the text defines ``MLA_DEVICE`` before it.
    """
    macros = {
        "MLA_MASK_CAPTURES_MAX": CAPTURES_MAX,
        "MLA_MASK_BIASES_MAX": BIASES_MAX,
        "MLA_MASK_CAPTURES": len(program.captures),
        "MLA_MASK_BIASES": len(program.biases),
        "MLA_MASK_ALWAYS": int(program.always),
        **{f"MLA_MASK_BIAS{i}_DTYPE": _BIAS_DTYPE_CODES[dtype] for i, dtype in enumerate(program.biases)},
    }
    parts = [
        "\n".join(f"#define {name} {value}" for name, value in macros.items()),
        "",
        _C_HEADER,
        f"""\
MLA_DEVICE bool mask_visible(const MaskArgs& m, int b, int h, int q, int k) {{
{_C.body(program.expression, program)}
}}
""",
        f"""\
MLA_DEVICE int mask_tile_class(const MaskArgs& m, int b, int h, int q_lo, int q_hi, int k_lo, int k_hi) {{
{_C.body(program.tile_class, program)}
}}
""",
    ]
    if program.has_bias:
        parts.append(_c_bias(program))
    return "\n".join(parts)


def _c_bias(program: MaskProgram) -> str:
    minus_infinity = "mask_float(0xff800000u)"
    terms = "\n".join(
        f"""\
    {{
        const MaskBias& bias = m.bias[{i}];
        if (row < 0 || row >= bias.rows || col < 0 || col >= bias.cols) return {minus_infinity};
        total += mask_load_{dtype}(bias.data, b * bias.stride_b + h * bias.stride_h + row * bias.stride_q + col);
    }}"""
        for i, dtype in enumerate(program.biases)
    )
    return f"""\
union MaskBits {{ unsigned int bits; float value; }};
MLA_DEVICE float mask_float(unsigned int bits) {{
    MaskBits both;
    both.bits = bits;
    return both.value;
}}
{"".join(_C_LOADS[dtype] for dtype in dict.fromkeys(program.biases))}
// Natural-log units. Minus infinity hides the key, as it does outside the extent of a bias.
MLA_DEVICE float mask_bias(const MaskArgs& m, int b, int h, int row, int col) {{
    float total = 0.0f;
{terms}
    return total;
}}
"""


_TRITON_HEADER = '''\
import triton
import triton.language as tl


@triton.jit
def mask_floordiv(x, d):
    """Rounded towards minus infinity, 0 for a zero divisor."""
    divisor = tl.where(d == 0, 1, d)
    quotient = x // divisor
    rest = x - quotient * divisor
    return tl.where(d == 0, 0, tl.where((rest != 0) & ((rest < 0) != (divisor < 0)), quotient - 1, quotient))


@triton.jit
def mask_mod(x, d):
    """The rest of `mask_floordiv`, 0 for a zero divisor."""
    divisor = tl.where(d == 0, 1, d)
    return tl.where(d == 0, 0, x - mask_floordiv(x, divisor) * divisor)
'''


def triton_source(program: MaskProgram) -> str:
    """Return the mask's Triton module: ``mask_visible``, ``mask_tile_class`` and, with a bias, ``mask_bias``."""
    parts = [
        _TRITON_HEADER,
        f"""
@triton.jit
def mask_visible(b, h, q, k, c0, c1, c2, c3):
{_TRITON.body(program.expression, program)}
""",
        f"""
@triton.jit
def mask_tile_class(b, h, q_lo, q_hi, k_lo, k_hi, c0, c1, c2, c3):
{_TRITON.body(program.tile_class, program)}
""",
    ]
    if program.has_bias:
        parts.append(_triton_bias(program))
    return "\n".join(parts)


def _triton_bias(program: MaskProgram) -> str:
    parameters = ", ".join(
        f"bias{i}, stride_b{i}, stride_h{i}, stride_q{i}, rows{i}, cols{i}" for i in range(BIASES_MAX)
    )
    terms = "\n".join(
        f"""\
    offs{i} = tl.cast(b, tl.int64) * stride_b{i} + tl.cast(h, tl.int64) * stride_h{i}
    offs{i} += row * tl.cast(stride_q{i}, tl.int64) + col
    mask{i} = (row >= 0) & (row < rows{i}) & (col >= 0) & (col < cols{i})
    total += tl.load(bias{i} + offs{i}, mask=mask{i}, other=float("-inf")).to(tl.float32)"""
        for i in range(len(program.biases))
    )
    return f'''
@triton.jit
def mask_bias(b, h, row, col, {parameters}):
    """Natural-log units. Minus infinity hides the key, as it does outside the extent of a bias."""
    total = tl.zeros_like(row + col).to(tl.float32)
{terms}
    return total
'''


class MaskBias(ctypes.Structure):
    """``MaskBias`` of the C text; strides in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride_b", ctypes.c_longlong),
        ("stride_h", ctypes.c_longlong),
        ("stride_q", ctypes.c_longlong),
        ("rows", ctypes.c_int),
        ("cols", ctypes.c_int),
    )


class MaskArgs(ctypes.Structure):
    """``MaskArgs`` of the C text: the part of a kernel's parameters that a mask reads."""

    _fields_ = (("capture", ctypes.c_void_p * CAPTURES_MAX), ("bias", MaskBias * BIASES_MAX))


def head_stride(bias: torch.Tensor) -> int:
    """Return the stride between heads of a bias [B, 1 or H, Sq, Sk]; 0 where all heads share it."""
    return bias.stride(1) if bias.shape[1] > 1 else 0


def c_args(mask: Mask, device: torch.device) -> MaskArgs:
    """Return the addresses, strides and extents that the C text reads. The mask must outlive the launch."""
    struct = MaskArgs()
    for i, capture in enumerate(mask.captures_on(device)):
        struct.capture[i] = capture.data_ptr()
    for i, bias in enumerate(mask.biases):
        rows, cols = bias.shape[2:]
        struct.bias[i] = MaskBias(bias.data_ptr(), bias.stride(0), head_stride(bias), bias.stride(2), rows, cols)
    return struct
