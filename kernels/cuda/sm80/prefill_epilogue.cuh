// The end of an item: sinks, normalisation, output and LSE.
#pragma once
#include "prefill_softmax.cuh"

// The factor that normalises a row, its LSE stored on the way; l is the whole denominator.
MLA_DEVICE float finish_row(const PrefillParams& p, const Item& item, int row, float m, float l, float scale) {
  float logit = m == -infinity() ? -infinity() : m * scale, factor = 1.0f;
#if MLA_SINKS
  const float sink = p.sinks[item.head] * kLog2e, reference = fmaxf(logit, sink);
  if (reference > -infinity()) {
    factor = ex2_approx_ftz(logit - reference);
    l = __fmaf_rn(l, factor, ex2_approx_ftz(sink - reference));
    logit = reference;
  }
#endif
#if MLA_LSE
  if (threadIdx.x % 4 == 0 && row < item.rows)
    p.lse[(item.q_row + row) * p.lse_stride_t + item.head * p.lse_stride_h] =
        l == 0.0f ? -infinity() : kLn2 * (logit + lg2_approx_ftz(l));
#endif
  return l == 0.0f ? 0.0f : factor / l;
}

// Two neighbouring elements, in one store where addresses allow it.
template <typename T> MLA_DEVICE void store_pair(T* to, float x, float y) {
  const uint32_t pair = cvt_rn_x2<T>(x, y);
  if constexpr (MLA_ALIGNMENT >= 4)
    *reinterpret_cast<uint32_t*>(to) = pair;
  else
    to[0].bits = uint16_t(pair), to[1].bits = uint16_t(pair >> 16);
}
template <> MLA_DEVICE void store_pair<float>(float* to, float x, float y) {
  if constexpr (MLA_ALIGNMENT >= 8)
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
  else
    to[0] = x, to[1] = y;
}

MLA_DEVICE void finish_item(const PrefillParams& p, const Item& item, const Accumulator& o, const RowSums& sums) {
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    float l = sums.l[r];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const int row = first_row() + row_step(r / 2, r % 2 * 2);
    const float factor = finish_row(p, item, row, sums.m[r], l, score_scale(p));
    if (row >= item.rows) continue;
    Output* to = p.output + (item.q_row + row) * p.output_stride_t + item.head * p.output_stride_h + first_column();
#pragma unroll
    for (int j = 0; j < kVDim / 8; j++)
      store_pair(to + 8 * j, o[r / 2][j][r % 2 * 2] * factor, o[r / 2][j][r % 2 * 2 + 1] * factor);
  }
}
