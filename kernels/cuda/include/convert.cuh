// Conversions of packed storage types: one 32-bit register of elements, lowest address in the lowest bits, from and to fp32.
#pragma once
#include "ptx.cuh"

template <typename T> constexpr int kPerWord = 4 / int(sizeof(T));

template <typename T> MLA_DEVICE void unpack(uint32_t word, float (&x)[kPerWord<T>]);

template <> MLA_DEVICE void unpack<float>(uint32_t word, float (&x)[1]) { x[0] = __uint_as_float(word); }
template <> MLA_DEVICE void unpack<bf16>(uint32_t word, float (&x)[2]) {
  x[0] = __uint_as_float(word << 16);
  x[1] = __uint_as_float(word & 0xffff0000);
}
template <> MLA_DEVICE void unpack<fp16>(uint32_t word, float (&x)[2]) {
  x[0] = cvt_f32_f16(uint16_t(word));
  x[1] = cvt_f32_f16(uint16_t(word >> 16));
}

// Two e4m3 elements, the lower bytes of a word, as two of a 16-bit type, which holds them exactly.
template <typename T> MLA_DEVICE uint32_t widen_e4m3_x2(uint32_t pair);
template <> MLA_DEVICE uint32_t widen_e4m3_x2<fp16>(uint32_t pair) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(pair)));
  return halves;
#else
  // e4m3 has fp16's sign, a 4-bit exponent of bias 7 and 3 mantissa bits: shifted into fp16 it reads 2^-8 of its value, subnormals
  // included, which an exact multiplication mends. NaN, the one code above 448, overflows where 448 does not, and 0 * inf is NaN.
  constexpr uint32_t k256 = 0x5c005c00, k36864 = 0x78807880;
  const uint32_t bytes = (pair & 0xff) << 8 | (pair & 0xff00) << 16;
  const uint32_t shifted = (bytes & 0x80008000) | (bytes & 0x7f007f00) >> 1;
  return fma_rn_f16x2(mul_f16x2(shifted, k36864), 0, mul_f16x2(shifted, k256));
#endif
}
template <> MLA_DEVICE uint32_t widen_e4m3_x2<bf16>(uint32_t pair) {
  const uint32_t halves = widen_e4m3_x2<fp16>(pair);
  return cvt_rn_x2<bf16>(cvt_f32_f16(uint16_t(halves)), cvt_f32_f16(uint16_t(halves >> 16)));
}

template <> MLA_DEVICE void unpack<e4m3>(uint32_t word, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t halves = widen_e4m3_x2<fp16>(word >> 16 * i);
    x[2 * i] = cvt_f32_f16(uint16_t(halves));
    x[2 * i + 1] = cvt_f32_f16(uint16_t(halves >> 16));
  }
}

#if __CUDA_ARCH__ < 890

// One element to nearest even, saturating; NaN stays NaN.
MLA_DEVICE uint32_t e4m3_bits(float x) {
  const uint32_t sign = __float_as_uint(x) >> 24 & 0x80;
  const float magnitude = fabsf(x);
  if (magnitude != magnitude) return 0x7f;
  if (magnitude < 0x1p-6f)
    return sign | __float2int_rn(magnitude * 512.0f);  // 8 subnormal steps, the last of them 2^-6
  const uint32_t bits = __float_as_uint(fminf(magnitude, kE4m3Max));
  const uint32_t rounded = bits + 0x7ffff + (bits >> 20 & 1);
  return sign | ((rounded >> 20) - ((127 - 7) << 3));
}

#endif

// Round to nearest even; e4m3 saturates at +-448.
template <typename T> MLA_DEVICE uint32_t pack(const float (&x)[kPerWord<T>]);

template <> MLA_DEVICE uint32_t pack<float>(const float (&x)[1]) { return __float_as_uint(x[0]); }
template <> MLA_DEVICE uint32_t pack<bf16>(const float (&x)[2]) { return cvt_rn_x2<bf16>(x[0], x[1]); }
template <> MLA_DEVICE uint32_t pack<fp16>(const float (&x)[2]) { return cvt_rn_x2<fp16>(x[0], x[1]); }
template <> MLA_DEVICE uint32_t pack<e4m3>(const float (&x)[4]) {
#if __CUDA_ARCH__ >= 890
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
  return uint32_t(high) << 16 | low;
#else
  return e4m3_bits(x[3]) << 24 | e4m3_bits(x[2]) << 16 | e4m3_bits(x[1]) << 8 | e4m3_bits(x[0]);
#endif
}
