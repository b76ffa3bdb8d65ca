// Fixed-width names, compile-time helpers and conversions between storage types and fp32. NVRTC needs no system header for them.
#pragma once

#define MLA_DEVICE __device__ __forceinline__

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;

static_assert(sizeof(uint32_t) == 4 && sizeof(uint64_t) == 8, "CUDA's data model");

// Storage types: bits that only the conversions below read.
struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };  // OCP float8_e4m3fn: no infinities, 0x7f and 0xff are NaN, largest value 448

constexpr float kE4m3Max = 448.0f;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <typename A, typename B> constexpr bool is_same = false;
template <typename A> constexpr bool is_same<A, A> = true;

MLA_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
MLA_DEVICE constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

MLA_DEVICE float infinity() { return __int_as_float(0x7f800000); }

MLA_DEVICE float to_float(float x) { return x; }
MLA_DEVICE float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
MLA_DEVICE float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
MLA_DEVICE float to_float(e4m3 x) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(x.bits)));
  return to_float(fp16{uint16_t(halves & 0xffff)});
#else
  // e4m3 has fp16's sign, a 4-bit exponent of bias 7 and 3 mantissa bits: shifted into fp16 it reads 2^-8 of its value,
  // subnormals included, which an exact multiplication mends.
  const uint32_t magnitude = x.bits & 0x7f;
  if (magnitude == 0x7f) return __int_as_float(0x7fffffff);
  return 256.0f * to_float(fp16{uint16_t((x.bits & 0x80) << 8 | magnitude << 7)});
#endif
}

template <typename T> MLA_DEVICE T from_float(float x);
template <> MLA_DEVICE float from_float<float>(float x) { return x; }
template <> MLA_DEVICE bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> MLA_DEVICE fp16 from_float<fp16>(float x) {
  fp16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
// To nearest even, saturating at +-448; NaN stays NaN.
template <> MLA_DEVICE e4m3 from_float<e4m3>(float x) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return e4m3{uint8_t(pair & 0xff)};
#else
  const uint32_t sign = __float_as_uint(x) >> 24 & 0x80;
  const float magnitude = fabsf(x);
  if (magnitude != magnitude) return e4m3{0x7f};
  if (magnitude < 0x1p-6f) return e4m3{uint8_t(sign | __float2int_rn(magnitude * 512.0f))};  // 8 subnormal steps, then 2^-6
  const uint32_t bits = __float_as_uint(fminf(magnitude, kE4m3Max));
  const uint32_t rounded = bits + 0x7ffff + (bits >> 20 & 1);
  return e4m3{uint8_t(sign | ((rounded >> 20) - ((127 - 7) << 3)))};
#endif
}
