// The end of an item: sinks, normalisation, output and LSE.
#pragma once
#include "prefill_softmax.cuh"

// The factor that normalises a row, its LSE stored on the way; l is the whole denominator.
MLA_DEVICE float finish_row(const PrefillParams& p, const Item& item, int row, float m, float l, float scale) {
  float logit = m == -infinity() ? -infinity() : __fmaf_rn(m, scale, -kReferenceBits), factor = 1.0f;
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
  float value_scale = 1.0f;
  if (kFp8Data && !kValueScales && p.scales.v != nullptr) value_scale = p.scales.v[item.head * p.scales.v_stride];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    float l = sums.l[r];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const int row = first_row() + row_step(r / 2, r % 2 * 2);
    const float factor = finish_row(p, item, row, sums.m[r], l, score_scale(p)) * value_scale;
    if (row >= item.rows) continue;
    Output* to = p.output + (item.q_row + row) * p.output_stride_t + item.head * p.output_stride_h;
    const int e = r % 2 * 2;
    if constexpr (kFp8Data) {
      // Fragments 2j and 2j + 1 hold the even and the odd columns of 16.
#pragma unroll
      for (int j = 0; j < kVDim / 8; j += 2)
#pragma unroll
        for (int i = 0; i < 2; i++)
          store_pair(to + 2 * first_column() + 8 * j + 2 * i, o[r / 2][j][e + i] * factor,
                     o[r / 2][j + 1][e + i] * factor);
    } else {
#pragma unroll
      for (int j = 0; j < kVDim / 8; j++)
        store_pair(to + first_column() + 8 * j, o[r / 2][j][e] * factor, o[r / 2][j][e + 1] * factor);
    }
  }
}
