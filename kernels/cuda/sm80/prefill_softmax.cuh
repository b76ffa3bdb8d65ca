// Scores to probabilities, online: a thread holds kRows rows of a score tile, columns 8j + 2 * (lane % 4) + e.
// Where a product meets a sum the rounding is spelt out: tall and short tiles give the same bits.
#pragma once
#include "prefill_layout.cuh"

// A row keeps an older maximum as its reference while p stays below 2^kGrowth of it: sums and P only scale, nothing is
// lost. Decided for each row by itself, so that its bits do not depend on its neighbours. At the reference P is
// 2^kReferenceBits: e4m3, which ends at 448, then has as many bits more for what is small.
constexpr float kGrowth = kFp8Output ? 4.0f : 8.0f, kReferenceBits = kFp8Output ? 4.0f : 0.0f;

using Scores = float[kMTiles][kNTiles][4];
using Accumulator = float[kMTiles][kVDim / 8][4];

// m is the reference of the exponent, l this thread's share of the denominator.
struct RowSums { float m[kRows], l[kRows]; };

MLA_DEVICE float score_scale(const PrefillParams& p) { return kScaleScores ? 1.0f : p.logit_scale; }

// Row and column of this thread's first element in the item and in a tile.
MLA_DEVICE int first_row() {
  const int id = thread_id();
  return id / 32 * kWarpRows + id % 32 / 4;
}
MLA_DEVICE int first_column() { return thread_id() % 4 * 2; }
// Rows and columns from there to element e of fragments i, j.
MLA_DEVICE constexpr int row_step(int i, int e) { return i * 16 + (e & 2) * 4; }
MLA_DEVICE constexpr int column_step(int j, int e) { return j * 8 + (e & 1); }

// Each score times the scale of its query, of its key; arrays of f32 in shared memory.
MLA_DEVICE void scale_queries(Scores& s, uint32_t scales) {
  const uint32_t first = scales + 4 * first_row();
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const float scale = ld_shared_f32(first + 4 * row_step(r / 2, r % 2 * 2));
#pragma unroll
    for (int j = 0; j < kNTiles; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) s[r / 2][j][r % 2 * 2 + e] *= scale;
  }
}
MLA_DEVICE void scale_keys(Scores& s, uint32_t scales) {
  const uint32_t first = scales + 4 * first_column();
#pragma unroll
  for (int j = 0; j < kNTiles; j++) {
    const float2 scale = ld_shared_v2_f32(first + 4 * column_step(j, 0));
#pragma unroll
    for (int i = 0; i < kMTiles; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[i][j][e] *= e % 2 ? scale.y : scale.x;
  }
}

// Scores become base-2 logits, softcapped and biased; hidden keys stay to be masked. `first`: key of column 0.
MLA_DEVICE void scale_scores(Scores& s, const PrefillParams& p, const Item& item, int first) {
#if MLA_MASK_BIASES
  const int row = item.q_position - item.start + first_row(), column = item.k_position + first + first_column();
#endif
#pragma unroll
  for (int i = 0; i < kMTiles; i++)
#pragma unroll
    for (int j = 0; j < kNTiles; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& x = s[i][j][e];
#if MLA_SOFTCAP
        // softcap * tanh(x / softcap) by tanh(y) = 1 - 2 / (1 + exp(2y)), whose absolute error stays near fp32's
        x = __fmaf_rn(-2.0f * p.softcap_logit, rcp_approx_ftz(1.0f + ex2_approx_ftz(x * p.softcap_scale)),
                      p.softcap_logit);
#else
        x = __fmul_rn(x, p.logit_scale);
#endif
#if MLA_MASK_BIASES
        const float bias =
            mask_bias(p.mask, item.sequence, item.head, row + row_step(i, e), column + column_step(j, e));
        x = __fmaf_rn(kLog2e, bias, x);
#endif
      }
}

// Hides by select what the mask hides and what lies past the last key.
MLA_DEVICE void mask_scores(Scores& s, const PrefillParams& p, const Item& item, int first) {
  const int key = first + first_column(), k_position = item.k_position + key;
  // Positions relative to the first column, hidden from the compiler's algebra: `k <= q` then compares a constant with
  // a register.
  int ahead = item.q_position + first_row() - k_position;
  asm volatile("" : "+r"(ahead));
  const int limit = item.n_keys - key;
#pragma unroll
  for (int i = 0; i < kMTiles; i++)
#pragma unroll
    for (int j = 0; j < kNTiles; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        bool visible = column_step(j, e) < limit;
#if !MLA_MASK_ALWAYS
        visible &= mask_visible(p.mask, item.sequence, item.head, k_position + (ahead + row_step(i, e)),
                                k_position + column_step(j, e));
#endif
        s[i][j][e] = visible ? s[i][j][e] : -infinity();
      }
}

// Takes a tile's scores in: they become probabilities, O and the sums move to the new references.
MLA_DEVICE void softmax(Scores& s, RowSums& sums, Accumulator& o, float scale) {
  float alpha[kRows];
  bool moved = false;
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    float most = sums.m[r];
#pragma unroll
    for (int j = 0; j < kNTiles; j++) most = fmaxf(most, fmaxf(s[r / 2][j][r % 2 * 2], s[r / 2][j][r % 2 * 2 + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const bool grown = (most - sums.m[r]) * scale > kGrowth;  // from -inf: true; -inf from -inf: NaN, false
    alpha[r] = grown ? ex2_approx_ftz((sums.m[r] - most) * scale) : 1.0f;
    sums.m[r] = grown ? most : sums.m[r];
    sums.l[r] = __fmul_rn(sums.l[r], alpha[r]);
    moved |= grown;
  }
  if (__any_sync(~0u, moved)) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++)
#pragma unroll
      for (int j = 0; j < kVDim / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) o[i][j][e] *= alpha[2 * i + e / 2];
  }
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const float reference = sums.m[r] == -infinity() ? 0.0f : __fmaf_rn(sums.m[r], scale, -kReferenceBits);
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int j = 0; j < kNTiles; j++) {
      float &x = s[r / 2][j][r % 2 * 2], &y = s[r / 2][j][r % 2 * 2 + 1];
      x = ex2_approx_ftz(__fmaf_rn(x, scale, -reference));
      y = ex2_approx_ftz(__fmaf_rn(y, scale, -reference));
      a += x;
      b += y;
    }
    sums.l[r] = __fadd_rn(sums.l[r], a + b);
  }
}
