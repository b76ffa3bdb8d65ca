// The end of an item: sinks, normalisation, output and LSE, without a branch. Included behind a layout that defines
// PrefillParams.
#pragma once
#include "prefill_items.cuh"
#include "quad.cuh"

// What normalises a row, and its LSE; l is the whole denominator.
struct RowEnd { float factor, lse; };
MLA_DEVICE RowEnd end_row(const PrefillParams& p, const Item& item, float m, float l, float scale) {
  float logit = m == -infinity() ? -infinity() : m * scale, factor = 1.0f;
#if MLA_SINKS
  const float sink = p.sinks[item.head] * kLog2e, reference = fmaxf(logit, sink);
  const bool some = reference > -infinity();
  factor = some ? ex2_approx_ftz(logit - reference) : 1.0f;
  l = some ? l * factor + ex2_approx_ftz(sink - reference) : l;
  logit = reference;
#endif
  return {l == 0.0f ? 0.0f : factor * rcp_approx_ftz(l), l == 0.0f ? -infinity() : kLn2 * (logit + lg2_approx_ftz(l))};
}

// Ends an item: stores this thread's two rows and their LSE.
MLA_DEVICE void finish_item(const PrefillParams& p, const Item& item, int row, const float (&o)[MLA_V_DIM / 2],
                            const RowSums& sums, float scale) {
  constexpr int N = MLA_V_DIM / 2;
  const int t = tid_x() & 3;
  const int64_t first = item.q_row + row;
  Output* to = static_cast<Output*>(p.output) + first * p.output_stride_t + item.head * p.output_stride_h +
               t * (sizeof(Output) == 4 ? 2 : 8);
#pragma unroll
  for (int r = 0; r < 2; r++, to += 8 * p.output_stride_t) {
    float l = sums.l[r];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const RowEnd end = end_row(p, item, sums.m[r], l, scale);
    const bool inside = row + 8 * r < item.rows;
#if MLA_LSE
    st_global_f32_if(inside && t == 0, p.lse + (first + 8 * r) * p.lse_stride_t + item.head * p.lse_stride_h, end.lse);
#endif
    if constexpr (sizeof(Output) == 4) {
#pragma unroll
      for (int j = 0; j < N / 4; j++)
        st_global_v2_f32_if(inside, to + 8 * j, o[4 * j + 2 * r] * end.factor, o[4 * j + 2 * r + 1] * end.factor);
    } else {
#pragma unroll
      for (int g = 0; g < N / 16; g++) {  // 32 columns
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = 4 * (4 * g + j) + 2 * r;
          words[j] = cvt_rn_x2<Element>(o[i] * end.factor, o[i + 1] * end.factor);
        }
        transpose_quad(words);
        st_global_v4_b32_if(inside, to + 32 * g, words);
      }
    }
  }
}
