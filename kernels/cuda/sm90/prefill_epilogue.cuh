// The end of an item: sinks, normalisation, output and LSE. Included behind a layout that defines PrefillParams.
#pragma once
#include "prefill_items.cuh"

// The factor that normalises a row, its LSE stored on the way; l is the whole denominator.
MLA_DEVICE float finish_row(const PrefillParams& p, const Item& item, int row, bool stores_lse, float m, float l,
                            float scale) {
  float logit = m == -infinity() ? -infinity() : m * scale, factor = 1.0f;
#if MLA_SINKS
  const float sink = p.sinks[item.head] * kLog2e, reference = fmaxf(logit, sink);
  if (reference > -infinity()) {
    factor = ex2_approx_ftz(logit - reference);
    l = l * factor + ex2_approx_ftz(sink - reference);
    logit = reference;
  }
#endif
#if MLA_LSE
  if (stores_lse && row < item.rows)
    p.lse[(item.q_row + row) * p.lse_stride_t + item.head * p.lse_stride_h] =
        l == 0.0f ? -infinity() : kLn2 * (logit + lg2_approx_ftz(l));
#endif
  return l == 0.0f ? 0.0f : factor / l;
}

// A 4 x 4 transposition over the quad: lane t has word i of lane i's, and ends with the words of column block t.
MLA_DEVICE void transpose_quad(uint32_t (&a)[4]) {
  const bool odd = tid_x() & 1, high = tid_x() & 2;
  uint32_t x = __shfl_xor_sync(~0u, odd ? a[0] : a[1], 1), y = __shfl_xor_sync(~0u, odd ? a[2] : a[3], 1);
  if (odd)
    a[0] = x, a[2] = y;
  else
    a[1] = x, a[3] = y;
  x = __shfl_xor_sync(~0u, high ? a[0] : a[2], 2);
  y = __shfl_xor_sync(~0u, high ? a[1] : a[3], 2);
  if (high)
    a[0] = x, a[1] = y;
  else
    a[2] = x, a[3] = y;
}

// Stores this thread's two rows.
MLA_DEVICE void store_rows(const PrefillParams& p, const Item& item, int row, const float (&o)[MLA_V_DIM / 2],
                           const RowSums& sums, float scale) {
  constexpr int N = MLA_V_DIM / 2;
  const int t = tid_x() & 3;
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; r++) factor[r] = finish_row(p, item, row + 8 * r, t == 0, sums.m[r], sums.l[r], scale);
  Output* to = static_cast<Output*>(p.output) + (item.q_row + row) * p.output_stride_t + item.head * p.output_stride_h;
  if constexpr (sizeof(Output) == 4) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int j = 0; j < N / 4; j++)
        if (row + 8 * r < item.rows)
          *reinterpret_cast<float2*>(to + 8 * r * p.output_stride_t + 8 * j + 2 * t) =
              make_float2(o[4 * j + 2 * r] * factor[r], o[4 * j + 2 * r + 1] * factor[r]);
  } else {
#pragma unroll
    for (int g = 0; g < N / 16; g++)  // 32 columns
#pragma unroll
      for (int r = 0; r < 2; r++) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = 4 * (4 * g + j) + 2 * r;
          words[j] = cvt_rn_x2<Element>(o[i] * factor[r], o[i + 1] * factor[r]);
        }
        transpose_quad(words);
        if (row + 8 * r < item.rows)
          *reinterpret_cast<uint4*>(to + 8 * r * p.output_stride_t + 32 * g + 8 * t) =
              make_uint4(words[0], words[1], words[2], words[3]);
      }
  }
}

MLA_DEVICE void finish_item(const PrefillParams& p, const Item& item, int row, float (&o)[MLA_V_DIM / 2], RowSums& sums,
                            float scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sums.l[r] += __shfl_xor_sync(~0u, sums.l[r], 1);
    sums.l[r] += __shfl_xor_sync(~0u, sums.l[r], 2);
  }
  store_rows(p, item, row, o, sums, scale);
}
