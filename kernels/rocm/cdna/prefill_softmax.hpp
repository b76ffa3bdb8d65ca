// Online softmax of one wave: a lane holds one query (lane % 32) and half of the keys of a tile: register r of a block is
// key (r / 4) * 8 + (lane / 32) * 4 + r % 4.
//
// A row keeps an older maximum as its reference m while its largest p = 2^(s - m) stays within 2^kLargestP: sums and P only
// scale. Decided for each row by itself, so that its bits do not depend on its neighbours. 16-bit P lose nothing below
// that. 8-bit P have the range from their largest number down to 2^-9 (2^-10): a new reference puts the largest p at
// 2^(kLargestP - kGrowth) and leaves the rest above it to grow into.
#pragma once
#include "prefill_products.hpp"

template <typename T> constexpr int kLargestLog2 = 8;
template <> constexpr int kLargestLog2<e4m3fnuz> = 7;  // 240 is its largest number; e4m3 has 448
constexpr int kLargestP = kLargestLog2<Element>, kGrowth = kKeyScaled ? 4 : kLargestP;
constexpr float kUnitWeight = 1 << (kLargestP - kGrowth), kLeastWeight = 0x1p-100f;  // whose inverse is a number

// What one lane knows of its row: m the reference of the exponent, l this lane's share of the denominator.
struct RowState {
  float m = -infinity();
  float l = 0.0f;
  float weight = 0.0f;  // with a scale for each value: the |p * scale| that kUnitWeight stands for
};

using Scores = f32x16[kKeyBlocks];  // of one wave and one tile

struct ScoreScale {
  float logit;  // base-2 logit of a raw score
  float softcap_scale;  // 2 * log2e * scale / softcap
  float softcap_logit;  // log2e * softcap
};

// Raw scores to base-2 logits, softcapped; hidden keys stay to be masked.
MLA_DEVICE void scale_scores(Scores& scores, const ScoreScale& scale) {
#pragma unroll
  for (auto& s : scores) {
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
}

// Hides by select. b, h: sequence and head; q: the lane's position; k: position of the tile's first key; keys: keys that
// count in it; start: position of the sequence's first query.
MLA_DEVICE void mask_scores(Scores& scores, const MaskArgs& mask, int b, int h, int q, int k, int keys, int start) {
  const int own = lane_key();
  if (keys < kBlockN) {
    const int limit = keys - own;
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block)
#pragma unroll
      for (int r = 0; r < 16; ++r)
        scores[block][r] = block * kBlock + register_key(r) < limit ? scores[block][r] : -infinity();
  }
#pragma unroll
  for (int block = 0; block < kKeyBlocks; ++block) {
    f32x16& s = scores[block];
    const int first = k + block * kBlock + own;
#if !MLA_MASK_ALWAYS
    // Positions relative to the lane's first key, hidden from the compiler's algebra: `k <= q` then compares a constant
    // with a register.
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
      if (s[r] != -infinity()) s[r] += kLog2e * mask_bias(mask, b, h, q - start, first + register_key(r));
#endif
  }
}

// Takes the tile's maximum into the row's reference; returns the factor of what was summed before (1: unmoved).
MLA_DEVICE float move_reference(const Scores& scores, RowState& row) {
  float top = scores[0][0];
#pragma unroll
  for (const auto& s : scores)
#pragma unroll
    for (int r = 0; r < 16; ++r) top = maximum(top, s[r]);
  top = maximum(top, other_half(top));
  const bool grown = top - row.m > kLargestP;  // from -inf: true; -inf from -inf: NaN, false
  const float reference = top - (kLargestP - kGrowth);
  const float alpha = grown ? exp2_flushed(row.m - reference) : 1.0f;
  row.m = grown ? reference : row.m;
  row.l *= alpha;
  return alpha;
}

// Scores to probabilities, summed into the row.
MLA_DEVICE void exponentials(Scores& scores, RowState& row) {
  const float less = row.m == -infinity() ? 0.0f : -row.m;
  f32x2 sum = {0.0f, 0.0f};  // two at a time: packed additions
#pragma unroll
  for (auto& s : scores)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const f32x2 x = f32x2{s[2 * i], s[2 * i + 1]} + f32x2{less, less};
      const f32x2 p = {exp2_flushed(x[0]), exp2_flushed(x[1])};
      sum += p;
      s[2 * i] = p[0];
      s[2 * i + 1] = p[1];
    }
  row.l += sum[0] + sum[1];
}

// Probabilities times the scales of their values, in the row's unit, which keeps the largest weight of the row between
// 2^(kLargestP - kGrowth) and 2^kLargestP, as `move_reference` keeps p. alpha: the factor of what was summed before;
// returns it with the change of the unit.
MLA_DEVICE float weigh_by_scales(Scores& scores, const float (&scales)[kKeyBlocks], RowState& row, float alpha) {
  float top = 0.0f;
#pragma unroll
  for (int block = 0; block < kKeyBlocks; ++block)
    for_each_lane_of_row(scales[block], [&](int r, float scale) {
      scores[block][r] = unpaired(scores[block][r] * scale);
      top = maximum(top, absolute(scores[block][r]));
    });
  top = maximum(top, other_half(top));
  const float kept = row.weight * alpha;
  row.weight = maximum(top > kept * (1 << kGrowth) ? top : kept, kLeastWeight);
  const float inverse = reciprocal(row.weight);
#pragma unroll
  for (auto& s : scores) s *= kUnitWeight * inverse;
  return row.weight == kept ? 1.0f : kept * inverse;
}

// Probabilities as MFMA fragments.
MLA_DEVICE void pack(const Scores& scores, u32x4 (&fragment)[kValueFragments]) {
  constexpr int kOfWord = 4 / sizeof(Element), kWords = 16 / kOfWord;
#pragma unroll
  for (int block = 0; block < kKeyBlocks; ++block)
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const auto p = [&](int i) { return scores[block][w * kOfWord + i]; };
      uint32_t word;
      if constexpr (kOfWord == 2)
        word = pack_finite<Element>(p(0), p(1));
      else
        word = pack_finite<Element>(p(0), p(1), p(2), p(3));
      fragment[(block * kWords + w) / 4][w % 4] = word;
    }
}
