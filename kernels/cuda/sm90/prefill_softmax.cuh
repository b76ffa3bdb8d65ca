// Online softmax of one warpgroup: a thread holds two rows (r = 0, 1; eight apart) of a score tile, columns
// 8j + 2t + e of each: element 4j + 2r + e.
#pragma once
#include "prefill_layout.cuh"

// A row keeps an older maximum as its reference while p stays below 2^kGrowth: sums and P only scale, nothing is lost.
// Decided for each row by itself, so that its bits do not depend on its neighbours. No row grows so far while the sums
// of a tile's exponentials stay below kMostSum (less than 2^kGrowth by more than they are rounded).
constexpr float kGrowth = 15.0f, kMostSum = 0x1.fp14f;

// Scores become base-2 logits, softcapped and biased; hidden keys stay to be masked.
template <int W>
MLA_DEVICE void scale_scores(float (&s)[W / 2], const PrefillParams& p, const Item& item, int q_row, int key) {
#pragma unroll
  for (int i = 0; i < W / 2; i++) {
#if MLA_SOFTCAP
    // softcap * tanh(x / softcap) by tanh(y) = 1 - 2 / (1 + exp(2y)), whose absolute error stays near fp32's
    s[i] = p.softcap_logit - 2.0f * p.softcap_logit * rcp_approx_ftz(1.0f + ex2_approx_ftz(s[i] * p.softcap_scale));
#else
    s[i] *= p.logit_scale;
#endif
#if MLA_MASK_BIASES
    const int row = item.q_position + q_row + (i & 2) * 4 - item.start,
              column = item.k_position + key + (i / 4) * 8 + (i & 1);
    s[i] += kLog2e * mask_bias(p.mask, item.sequence, item.head, row, column);
#endif
  }
}

// Hides by select. q_row: this thread's first row in the item; key: its first column, counted from key 0.
template <int W>
MLA_DEVICE void mask_scores(float (&s)[W / 2], const PrefillParams& p, const Item& item, int q_row, int key) {
  if (key - (key & 7) + W > item.n_keys) {
    const int limit = item.n_keys - key;
#pragma unroll
    for (int i = 0; i < W / 2; i++) s[i] = (i / 4) * 8 + (i & 1) < limit ? s[i] : -infinity();
  }
#if !MLA_MASK_ALWAYS
  // Positions relative to the first column, hidden from the compiler's algebra: `k <= q` then compares a constant with
  // a register.
  const int k_position = item.k_position + key;
  int ahead = item.q_position + q_row - k_position;
  asm volatile("" : "+r"(ahead));
  if constexpr (MLA_MASK_UNROLL) {
#pragma unroll
    for (int i = 0; i < W / 2; i++) {
      const bool visible = mask_visible(p.mask, item.sequence, item.head, k_position + (ahead + (i & 2) * 4),
                                        k_position + ((i / 4) * 8 + (i & 1)));
      s[i] = visible ? s[i] : -infinity();
    }
  } else {
    // An expression of several comparisons, unrolled, takes more registers than there are: first the answers of a part
    // in a word, then the selects.
    constexpr int kPart = W / 2 < 32 ? W / 2 : 32;
#pragma unroll
    for (int part = 0; part < W / 2; part += kPart) {
      uint32_t visible = 0;
#pragma unroll 1
      for (int i = 0; i < kPart; i++)
        visible |= uint32_t(mask_visible(p.mask, item.sequence, item.head, k_position + (ahead + (i & 2) * 4),
                                         k_position + (((part + i) / 4) * 8 + (i & 1))))
                   << i;
#pragma unroll
      for (int i = 0; i < kPart; i++) s[part + i] = visible >> i & 1 ? s[part + i] : -infinity();
    }
  }
#endif
}

// Takes the tile's maxima in; returns whether any row of the warp moved its reference, by alpha (1 for the others).
template <int W>
MLA_DEVICE bool move_reference(const float (&s)[W / 2], RowSums& sums, float (&alpha)[2], float scale) {
  bool moved = false;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float a = fmaxf(sums.m[r], s[2 * r]), b = s[2 * r + 1];
#pragma unroll
    for (int j = 1; j < W / 8; j++) {
      a = fmaxf(a, s[4 * j + 2 * r]);
      b = fmaxf(b, s[4 * j + 2 * r + 1]);
    }
    a = fmaxf(a, b);
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 2));
    // As exponentials() has it. From -inf: true; -inf from -inf: NaN, false.
    const bool grown = __fmaf_rn(a, scale, -(sums.m[r] * scale)) > kGrowth;
    alpha[r] = grown ? ex2_approx_ftz((sums.m[r] - a) * scale) : 1.0f;
    sums.m[r] = grown ? a : sums.m[r];
    sums.l[r] *= alpha[r];
    moved |= grown;
  }
  return __any_sync(~0u, moved);
}

// Scores to probabilities, and this thread's sums of them. A row without a reference has 0, or overflows.
template <int W, bool kOverflows>
MLA_DEVICE void exponentials(float (&s)[W / 2], const float (&m)[2], float (&sum)[2], float scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float reference = !kOverflows && m[r] == -infinity() ? 0.0f : m[r] * scale;
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int j = 0; j < W / 8; j++) {
      float& x = s[4 * j + 2 * r];
      float& y = s[4 * j + 2 * r + 1];
      x = ex2_approx_ftz(__fmaf_rn(x, scale, -reference));
      y = ex2_approx_ftz(__fmaf_rn(y, scale, -reference));
      a += x;
      b += y;
    }
    sum[r] = a + b;
  }
}
