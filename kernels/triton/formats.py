"""Number formats: fp8 by integer arithmetic, and rounding that Triton's interpreter gets right too.

float8 e4m3 has the same bits on every architecture and under the interpreter, hardware fp8 or not.
e4m3fn (OCP): exponent bias 7, largest value 448, no infinity, 0x7f and 0xff are NaN.
e4m3fnuz (gfx942): exponent bias 8, largest value 240, no negative zero, 0x80 is NaN.
"""

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(code, FNUZ: tl.constexpr):
    """Return the float16 values of uint8 codes; exact."""
    code = code.to(tl.int16)
    # Exponent and mantissa lie in float16 as they do here, seven bits higher, with a bias of 15.
    bits = ((code & 127) << 7) | ((code & 128) << 8)
    value = bits.to(tl.float16, bitcast=True) * (128.0 if FNUZ else 256.0)
    nan = (code == 128) if FNUZ else ((code & 127) == 127)
    return tl.where(nan, float("nan"), value)


@triton.jit
def quantized(value, dtype: tl.constexpr, FNUZ: tl.constexpr):
    """Return float32 values as fp8, or as uint8 codes of it: rounded to nearest even, saturated; NaN stays NaN."""
    return value.to(dtype) if dtype.is_fp8() else encode_e4m3(value, FNUZ)


@triton.jit
def encode_e4m3(value, FNUZ: tl.constexpr):
    """Return the uint8 codes of float32 values, rounded to nearest even, saturated; NaN stays NaN."""
    bias: tl.constexpr = 8 if FNUZ else 7
    largest: tl.constexpr = 240.0 if FNUZ else 448.0
    negative = value < 0
    magnitude = tl.minimum(tl.abs(value), largest)
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFFF + ((bits >> 20) & 1)
    normal = (rounded >> 20) - ((127 - bias) << 3)
    # Below the smallest normal number codes are multiples of the smallest subnormal: adding 2**23 rounds to an integer.
    scaled = magnitude * (1024.0 if FNUZ else 512.0) + 8388608.0
    subnormal = scaled.to(tl.int32, bitcast=True) & 15
    code = tl.where(magnitude < (0.0078125 if FNUZ else 0.015625), subnormal, normal)
    sign = tl.where(negative & ((code != 0) if FNUZ else True), 128, 0)
    code = tl.where(value == value, code | sign, 128 if FNUZ else 127)
    return code.to(tl.uint8)


@triton.jit
def widen(value, dtype: tl.constexpr, FNUZ: tl.constexpr):
    """Return fp8 values, or uint8 codes of them, in a type that holds them; values of other types as they are."""
    if value.dtype == tl.uint8:
        value = decode_e4m3(value, FNUZ).to(dtype)
    elif value.dtype.is_fp8():
        value = value.to(dtype)
    return value


@triton.jit
def narrow(value, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return float32 values in another type, rounded to nearest even. The interpreter truncates to bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        value = tl.where(value == value, rounded, value)
    return value.to(dtype)


@triton.jit
def fp8_scale(amax, FNUZ: tl.constexpr):
    # Not below the smallest normal number, so that zeros divide to zeros.
    return tl.maximum(
        tl.div_rn(amax, tl.full(amax.shape, 240.0 if FNUZ else 448.0, tl.float32)), 1.1754943508222875e-38
    )


@triton.jit
def divide(values, scale, PLAIN: tl.constexpr):
    """Return quotients rounded to nearest, as `/` does not on NVIDIA: every backend writes the same bytes.

    By the rounded reciprocal, corrected by its exact remainder (Markstein, "Computation of elementary functions on the
    IBM RISC System/6000 processor", 1990), which spares each element a division. Small ones are lifted, so that
    remainders stay normal. PLAIN for scales that let a quotient overflow, and for the interpreter, which rounds a
    product before it adds to it.
    """
    if PLAIN:
        quotient = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
    else:
        lift = tl.where(scale < 2.0**-60, 2.0**64, 1.0)
        divisor = scale * lift
        inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        lifted = values * lift
        quotient = lifted * inverse
        quotient = tl.fma(tl.fma(-quotient, divisor, lifted), inverse, quotient)
    return quotient
