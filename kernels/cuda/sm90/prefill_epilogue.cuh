// The end of an item: sinks, normalisation, output and LSE.
#pragma once
#include "prefill_softmax.cuh"

// The factor that normalises a row, its LSE stored on the way; l is the whole denominator.
MLA_DEVICE float finish_row(const PrefillParams& p, const Item& item, int row, bool stores_lse, float m, float l, float scale) {
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
MLA_DEVICE void transpose_quad(uint32_t& a0, uint32_t& a1, uint32_t& a2, uint32_t& a3) {
  const int t = threadIdx.x & 3;
  uint32_t x = __shfl_xor_sync(~0u, t & 1 ? a0 : a1, 1), y = __shfl_xor_sync(~0u, t & 1 ? a2 : a3, 1);
  if (t & 1) a0 = x, a2 = y;
  else a1 = x, a3 = y;
  x = __shfl_xor_sync(~0u, t & 2 ? a0 : a2, 2);
  y = __shfl_xor_sync(~0u, t & 2 ? a1 : a3, 2);
  if (t & 2) a0 = x, a1 = y;
  else a2 = x, a3 = y;
}

// Stores this thread's two rows.
MLA_DEVICE void store_rows(const PrefillParams& p, const Item& item, int row, const float (&o)[MLA_V_DIM / 2], const RowSums& sums, float scale) {
  constexpr int N = MLA_V_DIM / 2;
  const int t = threadIdx.x & 3;
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
    uint32_t pairs[N / 2];  // as the accumulator has them, half the registers
#pragma unroll
    for (int i = 0; i < N / 2; i++) pairs[i] = cvt_rn_x2<Element>(o[2 * i] * factor[i & 1], o[2 * i + 1] * factor[i & 1]);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int g = 0; g < N / 16; g++) {
        uint32_t &a0 = pairs[8 * g + r], &a1 = pairs[8 * g + 2 + r], &a2 = pairs[8 * g + 4 + r], &a3 = pairs[8 * g + 6 + r];
        transpose_quad(a0, a1, a2, a3);
        if (row + 8 * r < item.rows)
          *reinterpret_cast<uint4*>(to + 8 * r * p.output_stride_t + 32 * g + 8 * t) = make_uint4(a0, a1, a2, a3);
      }
  }
}

MLA_DEVICE void finish_item(const PrefillParams& p, const Item& item, int row, float (&o)[MLA_V_DIM / 2], RowSums& sums, float scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sums.l[r] += __shfl_xor_sync(~0u, sums.l[r], 1);
    sums.l[r] += __shfl_xor_sync(~0u, sums.l[r], 2);
  }
  store_rows(p, item, row, o, sums, scale);
}
