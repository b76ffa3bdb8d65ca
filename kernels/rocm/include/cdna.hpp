// Instructions that differ between CDNA2 (gfx90a), CDNA3 (gfx942) and CDNA4 (gfx950), one wrapper each.
#pragma once
#include "wave.hpp"

typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 h16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 h16x8 __attribute__((ext_vector_type(8)));
#if defined(__gfx950__)  // older compilers have no __bf16
typedef __bf16 b16x8 __attribute__((ext_vector_type(8)));
#endif

// D[32, 32] = A[32, K] B[K, 32] + C, K = 32 / sizeof(T) for 16 bytes a lane, twice that for 32 bytes. A lane gives elements
// of row (column of B) lane % 32: the elements of lanes l and l + 32 together are the K of the sum, in any order that A and
// B share. It gets D[(r / 4) * 8 + (lane / 32) * 4 + r % 4][lane % 32], r < 16.
template <typename T> MLA_DEVICE f32x16 mfma_f32_32x32(u32x4 a, u32x4 b, f32x16 c) {
#if defined(__gfx950__)
  static_assert(sizeof(T) == 2, "8-bit operands have 32 bytes");
  if constexpr (is_same<T, bf16>)
    return __builtin_amdgcn_mfma_f32_32x32x16_bf16(__builtin_bit_cast(b16x8, a), __builtin_bit_cast(b16x8, b), c, 0, 0,
                                                   0);
  else
    return __builtin_amdgcn_mfma_f32_32x32x16_f16(__builtin_bit_cast(h16x8, a), __builtin_bit_cast(h16x8, b), c, 0, 0,
                                                  0);
#elif defined(__gfx942__) || defined(__gfx90a__)
  const auto half = [](u32x4 x, int i) {
    return u32x2{x[2 * i], x[2 * i + 1]};
  };  // bit_cast of a swizzle (.zw) takes .xy
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (is_same<T, bf16>)
      c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(s16x4, half(a, i)),
                                                   __builtin_bit_cast(s16x4, half(b, i)), c, 0, 0, 0);
    else if constexpr (is_same<T, fp16>)
      c = __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(h16x4, half(a, i)),
                                               __builtin_bit_cast(h16x4, half(b, i)), c, 0, 0, 0);
    else
#if defined(__gfx942__)
      c = __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(__builtin_bit_cast(int64_t, half(a, i)),
                                                     __builtin_bit_cast(int64_t, half(b, i)), c, 0, 0, 0);
#else
      static_assert(sizeof(T) == 2, "CDNA2 has no 8-bit floating-point MFMA");
#endif
  }
  return c;
#else
  static_assert(sizeof(T) == 0, "no MFMA on this architecture");
#endif
}

#if defined(__gfx950__)
template <typename T> MLA_DEVICE f32x16 mfma_f32_32x32(u32x8 a, u32x8 b, f32x16 c) {
  if constexpr (sizeof(T) == 1) {  // 64 columns at once; formats 0 are e4m3, scales 0 say that there are none
    typedef int s32x8 __attribute__((ext_vector_type(8)));
    return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(__builtin_bit_cast(s32x8, a), __builtin_bit_cast(s32x8, b),
                                                           c, 0, 0, 0, 0, 0, 0);
  } else {
    c = mfma_f32_32x32<T>(u32x4{a[0], a[1], a[2], a[3]}, u32x4{b[0], b[1], b[2], b[3]}, c);
    return mfma_f32_32x32<T>(u32x4{a[4], a[5], a[6], a[7]}, u32x4{b[4], b[5], b[6], b[7]}, c);
  }
}
#endif

// What a lane gives to one product beside T: 16 bytes; 32 where the matrix unit takes 64 columns of 8 bits at once.
template <typename T> struct MfmaOperand { using type = u32x4; };
#if defined(__gfx950__)
template <> struct MfmaOperand<e4m3> { using type = u32x8; };
#endif

// Wait for every load from memory that is under way. Placed before a loop, it spares the loop the waits for what was
// loaded before.
MLA_DEVICE void wait_for_loads() {
  __builtin_amdgcn_s_waitcnt(0x0f70);
}  // vmcnt(0), the other counters at their maximum

// Order for the compiler's scheduler: PRODUCTS operands from LDS, each for one mfma_f32_32x32<T>, AHEAD of them before the
// first product.
template <typename T, typename Operand, int PRODUCTS, int AHEAD> MLA_DEVICE void interleave_reads_with_mfma() {
#if __has_builtin(__builtin_amdgcn_sched_group_barrier)
  constexpr int kReads = sizeof(Operand) / 16;
#if defined(__gfx950__)
  constexpr int kMfmas = sizeof(T) == 1 ? 1 : kReads;
#else
  constexpr int kMfmas = 2 * kReads;
#endif
  constexpr int kMfma = 0x8, kLdsRead = 0x100;
  __builtin_amdgcn_sched_group_barrier(kLdsRead, AHEAD * kReads, 0);
#pragma unroll
  for (int i = 0; i < PRODUCTS - AHEAD; ++i) {
    __builtin_amdgcn_sched_group_barrier(kMfma, kMfmas, 0);
    __builtin_amdgcn_sched_group_barrier(kLdsRead, kReads, 0);
  }
  __builtin_amdgcn_sched_group_barrier(kMfma, AHEAD * kMfmas, 0);
#endif
}

// x of lane 16 * (lane / 16) + N, for N = 0..15 in turn: f(N, value). Part of the instruction that uses it.
template <int N = 0, typename F> MLA_DEVICE void for_each_lane_of_row(float x, F f) {
  constexpr int kRowBroadcast = 0x150;
  f(N, as_float(__builtin_amdgcn_update_dpp(0, int(as_uint(x)), kRowBroadcast + N, 0xf, 0xf, true)));
  if constexpr (N + 1 < 16) for_each_lane_of_row<N + 1>(x, f);
}

// x, computed by an instruction of its own: packed ones take no lane of another row.
MLA_DEVICE float unpaired(float x) {
  asm("" : "+v"(x));
  return x;
}

// 2^x with subnormal results flushed to zero.
MLA_DEVICE float exp2_flushed(float x) {
#if __has_builtin(__builtin_amdgcn_exp2f)
  return __builtin_amdgcn_exp2f(x);
#else
  return exp2f(x);
#endif
}

// log2 of a normal number.
MLA_DEVICE float log2_normal(float x) {
#if __has_builtin(__builtin_amdgcn_logf)
  return __builtin_amdgcn_logf(x);
#else
  return log2f(x);
#endif
}

MLA_DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }

// The value of lane ^ 32.
MLA_DEVICE float other_half(float x) {
#if __has_builtin(__builtin_amdgcn_permlane32_swap) && defined(__gfx950__)
  const auto swapped = __builtin_amdgcn_permlane32_swap(as_uint(x), as_uint(x), false, false);
  return as_float(lane_id() < 32 ? swapped[1] : swapped[0]);
#else
  return shuffle(x, lane_id() ^ 32);
#endif
}

// Two floats as 16-bit elements of one register, `low` in bits 15:0. bf16 rounds to nearest with ties away from zero
// (half a unit in the last place at most, as to nearest even); no NaN or infinity is asked for.
template <typename T> MLA_DEVICE uint32_t pack_finite(float low, float high) {
  if constexpr (is_same<T, fp16>) {
    typedef _Float16 h16x2 __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(uint32_t, h16x2{_Float16(low), _Float16(high)});
  } else {
#if defined(__gfx950__)
    typedef __bf16 b16x2 __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(uint32_t, b16x2{__bf16(low), __bf16(high)});
#else
    return __builtin_amdgcn_perm(as_uint(high) + 0x8000, as_uint(low) + 0x8000, 0x07060302);
#endif
  }
}

// Four floats as 8-bit elements of one register, the first in bits 7:0, to nearest even; within the format's range.
template <typename T> MLA_DEVICE uint32_t pack_finite(float a, float b, float c, float d) {
#if defined(__gfx942__) || defined(__gfx950__)
  static_assert(sizeof(T) == 1, "8-bit elements");
  return uint32_t(__builtin_amdgcn_cvt_pk_fp8_f32(c, d, __builtin_amdgcn_cvt_pk_fp8_f32(a, b, 0, false), true));
#else
  static_assert(sizeof(T) == 0, "no conversion to 8-bit elements on this architecture");
#endif
}

// Elements 2 * PAIR and 2 * PAIR + 1 of four 8-bit ones, exact in 16 bits each.
template <typename To, typename From, int PAIR> MLA_DEVICE uint32_t widened_pair(uint32_t word) {
#if defined(__gfx942__) || defined(__gfx950__)
  const auto x = __builtin_amdgcn_cvt_pk_f32_fp8(int(word), PAIR != 0);
  if constexpr (is_same<To, bf16>)
    return __builtin_amdgcn_perm(as_uint(x[1]), as_uint(x[0]), 0x07060302);
  else
    return pack_finite<To>(x[0], x[1]);
#else
  const auto element = [&](int i) {
    return uint32_t(from_float<To>(to_float(__builtin_bit_cast(From, uint8_t(word >> (2 * PAIR + i) * 8)))).bits);
  };
  return element(0) | element(1) << 16;
#endif
}
