// The two products of one wave and one tile: scores of its queries, and probabilities times values.
#pragma once
#include "prefill_tile.hpp"

using Operand = MfmaOperand<Element>::type;  // of one product; an 8-bit kernel's rope takes as much
constexpr int kOperandFragments = sizeof(Operand) / kChunkBytes;

// Fragments that are on their way from LDS while the matrix unit works on one: 64 cycles of reads at 128 bytes a cycle.
constexpr int kFragmentsAhead = 4;

// Operand n out of 16-byte fragments.
template <typename T = Operand, typename Fragment> MLA_DEVICE T operand_of(int n, Fragment fragment) {
  if constexpr (sizeof(T) == kChunkBytes) {
    return fragment(n);
  } else {
    const u32x4 a = fragment(2 * n), b = fragment(2 * n + 1);
    return T{a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]};
  }
}

// multiply(n, read(n)) for n < PRODUCTS, the reads ahead of the products: in the order written, for compilers that keep
// it, and as a request to those that do not. T: type of the operands' elements.
template <typename T, int PRODUCTS, typename Read, typename Multiply>
MLA_DEVICE void read_ahead(Read read, Multiply multiply) {
  constexpr int kAhead = smaller(kFragmentsAhead / kOperandFragments, PRODUCTS);
  Operand ahead[kAhead];
#pragma unroll
  for (int n = 0; n < kAhead; ++n) ahead[n] = read(n);
#pragma unroll
  for (int n = 0; n < PRODUCTS; ++n) {
    const Operand operand = ahead[n % kAhead];
    if (n + kAhead < PRODUCTS) ahead[n % kAhead] = read(n + kAhead);
    multiply(n, operand);
  }
  interleave_reads_with_mfma<T, Operand, PRODUCTS, kAhead>();
}

// Queries of one wave as MFMA operands. A lane without a row repeats the last one; its results go nowhere.
struct Queries {
  u32x4 fragment[kKeyFragments];
  float scale = 1.0f;  // of an 8-bit row

  // The columns of one fragment after another, from `row` on.
  template <int FIRST, int COUNT> MLA_DEVICE void load(const uint8_t* row) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      fragment[FIRST + i] = load_global<u32x4>(row + i * kFragmentBytes + lane_id() / 32 * kChunkBytes);
  }
};

template <typename T, int FIRST, int FRAGMENTS>
MLA_DEVICE void add_products(uint8_t* lds, const FragmentPlaces& places, const Queries& q, int block, f32x16& sum) {
  const auto key_operand = [&](int n) {
    return operand_of(n, [&](int i) { return lds_at<u32x4>(lds, places.of_keys(FIRST + i, block)); });
  };
  const auto query_operand = [&](int n) { return operand_of(n, [&](int i) { return q.fragment[FIRST + i]; }); };
  read_ahead<T, FRAGMENTS / kOperandFragments>(
      key_operand, [&](int n, Operand keys) { sum = mfma_f32_32x32<T>(keys, query_operand(n), sum); });
}

// A row of scales, as KeyScales has them, times the scores of their keys.
MLA_DEVICE f32x16 scaled(f32x16 sum, float scales) {
  for_each_lane_of_row(scales, [&](int r, float scale) { sum[r] = unpaired(sum[r] * scale); });
  return sum;
}

// Raw scores of one block of keys, without what is the same for a whole row. A part of the columns is scaled before the
// others join it where their scales differ.
MLA_DEVICE f32x16 score_block(uint8_t* lds, const FragmentPlaces& places, const Queries& q, const KeyScales& scales,
                              int block) {
  f32x16 sum = {};
  const auto add_nope = [&](f32x16& to) { add_products<Element, 0, kNopeFragments>(lds, places, q, block, to); };
  const auto add_rope = [&] { add_products<RopeOperand, kNopeFragments, kRopeFragments>(lds, places, q, block, sum); };
  if constexpr (!kKeyScaled && !kRopeScaled) {
    add_products<Element, 0, kKeyFragments>(lds, places, q, block, sum);
  } else if constexpr (!kKeyScaled) {
    add_rope();
    sum = scaled(sum, scales.rope[block]);
    add_nope(sum);
  } else if constexpr (kRopeScaled) {
    add_rope();
    f32x16 others = {};
    add_nope(others);
    sum = scaled(sum, scales.rope[block]) + scaled(others, scales.key[block]);
  } else if constexpr (MLA_ROPE_PRESCALED) {
    add_nope(sum);
    add_rope();
    sum = scaled(sum, scales.key[block]);
  } else {
    add_nope(sum);
    sum = scaled(sum, scales.key[block]) * q.scale;
    add_rope();
  }
  return sum;
}

MLA_DEVICE void weigh_values(uint8_t* lds, const FragmentPlaces& places, const u32x4 (&p)[kValueFragments],
                             f32x16 (&o)[kVDim / 32]) {
  constexpr int kProducts = kValueFragments / kOperandFragments;
  const auto value_operand = [&](int n) {
    return operand_of(n % kProducts, [&](int i) { return lds_at<u32x4>(lds, places.of_values(i, n / kProducts)); });
  };
  const auto probability_operand = [&](int n) { return operand_of(n, [&](int i) { return p[i]; }); };
  read_ahead<Element, kVDim / 32 * kProducts>(value_operand, [&](int n, Operand values) {
    o[n / kProducts] = mfma_f32_32x32<Element>(values, probability_operand(n % kProducts), o[n / kProducts]);
  });
}
