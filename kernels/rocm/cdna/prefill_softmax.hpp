// Online softmax of one wave: a lane holds one query (lane % 32) and half of the keys of a tile: register r is key
// (r / 4) * 8 + (lane / 32) * 4 + r % 4.
#pragma once
#include "prefill_tile.hpp"

// A row keeps an older maximum as its reference while p stays below 2^kGrowth: sums and P only scale, nothing is lost.
// Decided for each row by itself, so that its bits do not depend on its neighbours.
constexpr float kGrowth = 8.0f;

// Key of register r in its tile, less the lane's own part.
MLA_DEVICE constexpr int register_key(int r) { return r / 4 * 8 + r % 4; }
MLA_DEVICE int lane_key() { return lane_id() / 32 * 4; }

// What one lane knows of its row: m the reference of the exponent, l this lane's share of the denominator.
struct RowState {
  float m = -infinity();
  float l = 0.0f;
};

struct ScoreScale {
  float logit;          // base-2 logit of a raw score
  float softcap_scale;  // 2 * log2e * scale / softcap
  float softcap_logit;  // log2e * softcap
};

// Raw scores to base-2 logits, softcapped; hidden keys stay to be masked.
MLA_DEVICE void scale_scores(f32x16& s, const ScoreScale& scale) {
#if MLA_SOFTCAP
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    // softcap * tanh(x / softcap) by tanh(y) = 1 - 2 / (1 + exp(2y)), whose absolute error stays near fp32's
    const float y = exp2_flushed(s[r] * scale.softcap_scale);
    s[r] = scale.softcap_logit * (1.0f - 2.0f * reciprocal(1.0f + y));
  }
#else
  s *= scale.logit;
#endif
}

// Hides by select. b, h: sequence and head; q: the lane's position; k: position of the tile's first key; keys: keys
// that count in it; start: position of the sequence's first query.
MLA_DEVICE void mask_scores(f32x16& s, const MaskArgs& mask, int b, int h, int q, int k, int keys, int start) {
  const int own = lane_key();
  if (keys < kBlockN) {
    const int limit = keys - own;
#pragma unroll
    for (int r = 0; r < 16; ++r) s[r] = register_key(r) < limit ? s[r] : -infinity();
  }
#if !MLA_MASK_ALWAYS
  // Positions relative to the lane's first key, hidden from the compiler's algebra: `k <= q` then compares a constant
  // with a register.
  const int first = k + own;
  int ahead = q - first;
  asm volatile("" : "+v"(ahead));
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const bool visible = mask_visible(mask, b, h, first + ahead, first + register_key(r));
    s[r] = visible ? s[r] : -infinity();
  }
#endif
#if MLA_MASK_BIASES
#pragma unroll
  for (int r = 0; r < 16; ++r)
    if (s[r] != -infinity()) s[r] += kLog2e * mask_bias(mask, b, h, q - start, k + own + register_key(r));
#endif
}

// Takes the tile's maximum into the row's reference; returns the factor of what was summed before (1: unmoved).
MLA_DEVICE float move_reference(const f32x16& s, RowState& row) {
  float top = s[0];
#pragma unroll
  for (int r = 1; r < 16; ++r) top = maximum(top, s[r]);
  top = maximum(top, other_half(top));
  const bool grown = top - row.m > kGrowth;  // from -inf: true; -inf from -inf: NaN, false
  const float alpha = grown ? exp2_flushed(row.m - top) : 1.0f;
  row.m = grown ? top : row.m;
  row.l *= alpha;
  return alpha;
}

// Scores to probabilities: 16-bit fragments, eight keys a lane and 16 keys of the tile each, summed into the row.
MLA_DEVICE void exponentials(const f32x16& s, RowState& row, u32x4 (&fragment)[kBlockN / 16]) {
  const float less = row.m == -infinity() ? 0.0f : -row.m;
  f32x2 sum = {0.0f, 0.0f};  // two at a time: packed additions
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const f32x2 x = f32x2{s[2 * i], s[2 * i + 1]} + f32x2{less, less};
    const f32x2 p = {exp2_flushed(x[0]), exp2_flushed(x[1])};
    sum += p;
    fragment[i / 4][i % 4] = pack_finite<Element>(p[0], p[1]);
  }
  row.l += sum[0] + sum[1];
}
