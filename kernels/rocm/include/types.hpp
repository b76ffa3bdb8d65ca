// Fixed-width names, vectors, compile-time helpers and conversions between storage types and fp32. hipRTC brings its
// own headers; nothing else is included.
#pragma once

#define MLA_DEVICE __device__ __forceinline__
// Work-items of a workgroup (exactly) and, if stated, waves that share a SIMD; decides the registers of a wave.
#define MLA_WORKGROUP(threads) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define MLA_WAVES(waves) __attribute__((amdgpu_waves_per_eu(waves, waves)))

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;
static_assert(sizeof(uint32_t) == 4 && sizeof(uint64_t) == 8 && sizeof(void*) == 8, "the device's data model");

typedef uint32_t u32x2 __attribute__((ext_vector_type(2)));
typedef uint32_t u32x4 __attribute__((ext_vector_type(4)));
typedef uint32_t u32x8 __attribute__((ext_vector_type(8)));
typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));

// What moves a number of bytes at once.
template <int BYTES> struct AccessOf;
template <> struct AccessOf<1> { using type = uint8_t; };
template <> struct AccessOf<2> { using type = uint16_t; };
template <> struct AccessOf<4> { using type = uint32_t; };
template <> struct AccessOf<8> { using type = u32x2; };
template <> struct AccessOf<16> { using type = u32x4; };

// Storage types: bits that only the conversions below read.
struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };  // OCP float8_e4m3fn: 0x7f and 0xff are NaN, largest value 448
struct e4m3fnuz { uint8_t bits; };  // float8_e4m3fnuz, MI300's own: one NaN (0x80), no negative zero, largest value 240

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Memory accesses through a pointer whose origin the compiler cannot see: global, not flat.
template <typename T> MLA_DEVICE T load_global(const void* p) { return *(const T __attribute__((address_space(1)))*)p; }
typedef u32x4 u32x4_anywhere __attribute__((aligned(1)));
MLA_DEVICE u32x4 load_global_unaligned(const void* p) {
  return *(const u32x4_anywhere __attribute__((address_space(1)))*)p;
}
template <typename T> MLA_DEVICE void store_global(void* p, T x) { *(T __attribute__((address_space(1)))*)p = x; }

template <typename A, typename B> constexpr bool is_same = false;
template <typename A> constexpr bool is_same<A, A> = true;

MLA_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
MLA_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }

MLA_DEVICE float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
MLA_DEVICE uint32_t as_uint(float x) { return __builtin_bit_cast(uint32_t, x); }
MLA_DEVICE float infinity() { return __builtin_inff(); }
MLA_DEVICE float absolute(float x) { return __builtin_fabsf(x); }
MLA_DEVICE float maximum(float a, float b) { return __builtin_fmaxf(a, b); }

MLA_DEVICE float to_float(float x) { return x; }
MLA_DEVICE float to_float(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
MLA_DEVICE float to_float(fp16 x) { return float(__builtin_bit_cast(_Float16, x.bits)); }
// Both 8-bit formats have fp16's sign, a 4-bit exponent and 3 mantissa bits: shifted into fp16 they read 2^(bias - 15)
// of their value, subnormals included, which an exact multiplication mends.
MLA_DEVICE float to_float(e4m3 x) {
  const uint32_t magnitude = x.bits & 0x7f;
  const float value = 256.0f * to_float(fp16{uint16_t((x.bits & 0x80) << 8 | magnitude << 7)});
  return magnitude == 0x7f ? __builtin_nanf("") : value;
}
MLA_DEVICE float to_float(e4m3fnuz x) {
  const float value = 128.0f * to_float(fp16{uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)});
  return x.bits == 0x80 ? __builtin_nanf("") : value;
}

template <typename T> constexpr float kLargest = 0.0f;
template <> constexpr float kLargest<e4m3> = 448.0f;
template <> constexpr float kLargest<e4m3fnuz> = 240.0f;

// Magnitude of a 4-bit exponent, 3-bit mantissa number with the given bias, to nearest even; x lies in [0, largest].
template <int BIAS> MLA_DEVICE uint32_t round_to_e4m3(float x) {
  constexpr float kSmallestNormal = 1.0f / (1 << (BIAS - 1));
  if (x < kSmallestNormal)
    return uint32_t(__builtin_rintf(x * (8.0f / kSmallestNormal)));  // 8 steps, then the normal itself
  const uint32_t bits = as_uint(x);
  const uint32_t rounded = bits + 0x7ffff + (bits >> 20 & 1);
  return (rounded >> 20) - ((127 - BIAS) << 3);
}

template <typename T> MLA_DEVICE T from_float(float x);
template <> MLA_DEVICE float from_float<float>(float x) { return x; }
template <> MLA_DEVICE bf16 from_float<bf16>(float x) {
  const uint32_t bits = as_uint(x);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  return {uint16_t((x != x ? bits | 0x400000 : rounded) >> 16)};
}
template <> MLA_DEVICE fp16 from_float<fp16>(float x) { return {__builtin_bit_cast(uint16_t, _Float16(x))}; }
// To nearest even, saturating; NaN stays NaN.
template <> MLA_DEVICE e4m3 from_float<e4m3>(float x) {
  if (x != x) return {0x7f};
  const float magnitude = __builtin_fminf(absolute(x), kLargest<e4m3>);
  return {uint8_t((as_uint(x) >> 24 & 0x80) | round_to_e4m3<7>(magnitude))};
}
template <> MLA_DEVICE e4m3fnuz from_float<e4m3fnuz>(float x) {
  if (x != x) return {0x80};
  const uint32_t magnitude = round_to_e4m3<8>(__builtin_fminf(absolute(x), kLargest<e4m3fnuz>));
  return {uint8_t(magnitude == 0 ? 0 : (as_uint(x) >> 24 & 0x80) | magnitude)};
}
