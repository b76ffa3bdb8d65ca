// The end of an item: merge of warpgroups that shared its rows, sinks, normalisation, output and LSE.
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

// Stores this thread's two rows, columns [column, column + 2 * N).
template <int N>
MLA_DEVICE void store_rows(const PrefillParams& p, const Item& item, int row, int column, float (&o)[N], const RowSums& sums, float scale) {
  const int t = threadIdx.x & 3;
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; r++) factor[r] = finish_row(p, item, row + 8 * r, t == 0 && column == 0, sums.m[r], sums.l[r], scale);
  Output* to = static_cast<Output*>(p.output) + (item.q_row + row) * p.output_stride_t + item.head * p.output_stride_h + column;
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

// Two warpgroups have each seen half of the keys of the same rows: each gives away its sums of one half of the columns and finishes the
// other. The arithmetic is symmetric, so it does not matter which of them took the first tile.
MLA_DEVICE void merge_halves(const Shared& shared, int warpgroup, const float (&o)[MLA_V_DIM / 2], float (&half)[MLA_V_DIM / 4],
                             RowSums& sums, float scale) {
  constexpr int kHalf = MLA_V_DIM / 4;
  const int thread = threadIdx.x & 127;
  bar_sync(kBarrierMerge, kConsumerThreads);  // the other one has read the previous item's
  float4* mine = shared.merge(warpgroup) + thread;
#pragma unroll
  for (int i = 0; i < kHalf / 4; i++) {
    const float4 low = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    const float4 high = make_float4(o[kHalf + 4 * i], o[kHalf + 4 * i + 1], o[kHalf + 4 * i + 2], o[kHalf + 4 * i + 3]);
    mine[i * 128] = warpgroup == 0 ? high : low;
  }
  mine[kHalf / 4 * 128] = make_float4(sums.m[0], sums.m[1], sums.l[0], sums.l[1]);
  bar_sync(kBarrierMerge, kConsumerThreads);
  const float4* other = shared.merge(1 - warpgroup) + thread;
  const float4 their_sums = other[kHalf / 4 * 128];
  const float their_m[2] = {their_sums.x, their_sums.y}, their_l[2] = {their_sums.z, their_sums.w};
  float a[2], b[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float m = fmaxf(sums.m[r], their_m[r]);
    a[r] = sums.m[r] == m ? 1.0f : ex2_approx_ftz((sums.m[r] - m) * scale);
    b[r] = their_m[r] == m ? 1.0f : ex2_approx_ftz((their_m[r] - m) * scale);
    sums.m[r] = m;
    sums.l[r] = __fadd_rn(__fmul_rn(sums.l[r], a[r]), __fmul_rn(their_l[r], b[r]));
  }
#pragma unroll
  for (int i = 0; i < kHalf / 4; i++) {
    const float4 theirs = other[i * 128];
    const float their_o[4] = {theirs.x, theirs.y, theirs.z, theirs.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float my_o = warpgroup == 0 ? o[4 * i + e] : o[kHalf + 4 * i + e];
      half[4 * i + e] = __fadd_rn(__fmul_rn(my_o, a[e / 2]), __fmul_rn(their_o[e], b[e / 2]));
    }
  }
}

MLA_DEVICE void finish_item(const PrefillParams& p, const Shared& shared, const Item& item, int warpgroup, int row,
                            float (&o)[MLA_V_DIM / 2], RowSums& sums, float scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sums.l[r] += __shfl_xor_sync(~0u, sums.l[r], 1);
    sums.l[r] += __shfl_xor_sync(~0u, sums.l[r], 2);
  }
  if constexpr (kSharing == 1) {
    store_rows(p, item, row, 0, o, sums, scale);
  } else {
    float half[MLA_V_DIM / 4];
    merge_halves(shared, warpgroup, o, half, sums, scale);
    store_rows(p, item, row, warpgroup * (MLA_V_DIM / 2), half, sums, scale);
  }
}
