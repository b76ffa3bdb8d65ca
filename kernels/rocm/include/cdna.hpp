// Instructions that differ between CDNA2 (gfx90a), CDNA3 (gfx942) and CDNA4 (gfx950), one wrapper each.
#pragma once
#include "wave.hpp"

typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 h16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 h16x8 __attribute__((ext_vector_type(8)));
#if defined(__gfx950__)  // older compilers have no __bf16
typedef __bf16 b16x8 __attribute__((ext_vector_type(8)));
#endif

// D[32, 32] = A[32, 16] B[16, 32] + C. A lane gives 8 elements of row (column of B) lane % 32: the elements of lanes l
// and l + 32 together are the 16 of the sum, in any order that A and B share. It gets D[(r / 4) * 8 + (lane / 32) * 4 +
// r % 4][lane % 32], r < 16.
template <typename T> MLA_DEVICE f32x16 mfma_f32_32x32x16(u32x4 a, u32x4 b, f32x16 c) {
#if defined(__gfx950__)
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
    else
      c = __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(h16x4, half(a, i)),
                                               __builtin_bit_cast(h16x4, half(b, i)), c, 0, 0, 0);
  }
  return c;
#else
  static_assert(sizeof(T) == 0, "no MFMA on this architecture");
#endif
}

// Wait for every load from memory that is under way. Placed before a loop, it spares the loop the waits for what was
// loaded before.
MLA_DEVICE void wait_for_loads() {
  __builtin_amdgcn_s_waitcnt(0x0f70);
}  // vmcnt(0), the other counters at their maximum

// Order for the compiler's scheduler: READS fragments from LDS, each for one mfma_f32_32x32x16, AHEAD of them before
// the first product.
template <int READS, int AHEAD> MLA_DEVICE void interleave_reads_with_mfma() {
#if __has_builtin(__builtin_amdgcn_sched_group_barrier)
#if defined(__gfx950__)
  constexpr int kMfmas = 1;
#else
  constexpr int kMfmas = 2;
#endif
  constexpr int kMfma = 0x8, kLdsRead = 0x100;
  __builtin_amdgcn_sched_group_barrier(kLdsRead, AHEAD, 0);
#pragma unroll
  for (int i = 0; i < READS - AHEAD; ++i) {
    __builtin_amdgcn_sched_group_barrier(kMfma, kMfmas, 0);
    __builtin_amdgcn_sched_group_barrier(kLdsRead, 1, 0);
  }
  __builtin_amdgcn_sched_group_barrier(kMfma, AHEAD * kMfmas, 0);
#endif
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
