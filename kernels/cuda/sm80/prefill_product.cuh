// The two products of a warp by mma.sync. Addresses follow from the swizzle: within what it permutes, every row that a
// lane addresses has the same permutation, so a step along the columns is one exclusive or.
//
// fp8 operands are read as pairs of bytes and widened to fp16, which holds them exactly, in registers: a lane then has
// other columns of q and k than the fragment of the product names, but the same of both, and a sum has no order. Of v it
// has the even and the odd columns of 16 in a fragment each, and so has O.
#pragma once
#include "prefill_softmax.cuh"

// Byte offset of SPAN bytes, the `step`-th of a row, from an address whose lane has its chunk of the first SPAN.
template <int ROW_BYTES, int SPAN = 32> MLA_DEVICE uint32_t step_address(uint32_t at, int step) {
  constexpr int kSteps = kSwizzleBytes<ROW_BYTES> / SPAN;
  return (at ^ step % kSteps * SPAN) + step / kSteps * kSwizzleBytes<ROW_BYTES>;
}

// S += Q K^T over the 16-bit columns from byte FIRST to byte LAST of the rows.
template <int FIRST, int LAST> MLA_DEVICE void multiply_qk_16_bit(Scores& s, uint32_t q, uint32_t k) {
  const int id = thread_id(), lane = id % 32, row = lane % 8;
  const uint32_t q_at =
      q + (id / 32 * kWarpRows + lane % 16) * kQkRowBytes + (lane / 16 << 4 ^ swizzle<kQkRowBytes>(row));
  const uint32_t k_at = k + (row + lane / 16 * 8) * kQkRowBytes + (lane / 8 % 2 << 4 ^ swizzle<kQkRowBytes>(row));
#pragma unroll 4  // all steps at once would have more fragments under way than there are registers
  for (int step = FIRST / 32; step < LAST / 32; step++) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int i = 0; i < kMTiles; i++) ldmatrix_x4(a[i], step_address<kQkRowBytes>(q_at, step) + i * 16 * kQkRowBytes);
#pragma unroll
    for (int j = 0; j < kNTiles; j += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, step_address<kQkRowBytes>(k_at, step) + j * 8 * kQkRowBytes);
#pragma unroll
      for (int i = 0; i < kMTiles; i++) {
        mma_m16n8k16<Element>(s[i][j], a[i], b[0], b[1]);
        mma_m16n8k16<Element>(s[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// S += Q K^T over the fp8 columns, the first kNopeBytes of the rows. A lane has four neighbouring columns of a row.
MLA_DEVICE void multiply_qk_fp8(Scores& s, uint32_t q, uint32_t k) {
  const int id = thread_id(), lane = id % 32, flip = swizzle<kQkRowBytes>(lane % 8);
  const uint32_t q_at = q + (id / 32 * kWarpRows + lane % kWarpRows) * kQkRowBytes + flip;
  const uint32_t k_at = k + lane * kQkRowBytes + flip;
#pragma unroll 4
  for (int step = 0; step < kNopeBytes / 16; step++) {
    uint32_t a[4], wide[kMTiles][4];
    ldmatrix_x4(a, step_address<kQkRowBytes, 16>(q_at, step));
#pragma unroll
    for (int i = 0; i < kMTiles; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) wide[i][e] = widen_e4m3_x2<fp16>(a[2 * i + e % 2] >> e / 2 * 16);
#pragma unroll
    for (int j = 0; j < kNTiles; j += 4) {
      uint32_t b[4];
      ldmatrix_x4(b, step_address<kQkRowBytes, 16>(k_at, step) + j * 8 * kQkRowBytes);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const uint32_t low = widen_e4m3_x2<fp16>(b[n]), high = widen_e4m3_x2<fp16>(b[n] >> 16);
#pragma unroll
        for (int i = 0; i < kMTiles; i++) mma_m16n8k16<fp16>(s[i][j + n], wide[i], low, high);
      }
    }
  }
}

// S = Q K^T, scales included; `q` and `q_scales` of the item, `k` a stage.
MLA_DEVICE void multiply_qk(Scores& s, uint32_t q, uint32_t q_scales, uint32_t k) {
  const uint32_t k_scales = k + kKeyScalesAt;
#pragma unroll
  for (int i = 0; i < kMTiles; i++)
#pragma unroll
    for (int j = 0; j < kNTiles; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[i][j][e] = 0.0f;
  if constexpr (kFp8Data) {
    multiply_qk_fp8(s, q, k);
    if constexpr (kRopePrescaled) multiply_qk_16_bit<kNopeBytes, kQkRowBytes>(s, q, k);
    scale_queries(s, q_scales);
    scale_keys(s, k_scales);
    if constexpr (!kRopePrescaled) multiply_qk_16_bit<kNopeBytes, kQkRowBytes>(s, q, k);
  } else if constexpr (kFp8Rope) {
    multiply_qk_16_bit<kNopeBytes, kQkRowBytes>(s, q, k);
    scale_keys(s, k_scales);
    multiply_qk_16_bit<0, kNopeBytes>(s, q, k);
  } else {
    multiply_qk_16_bit<0, kQkRowBytes>(s, q, k);
  }
}

// What P and V are multiplied in: fp16 holds P up to 2^kGrowth, but not times any scale.
template <bool FP8> struct ValueType { using type = Element; };
template <> struct ValueType<true> { using type = fp16; };
using Value = typename ValueType<kFp8Data && !kValueScales>::type;

// P rounded: an accumulator's fragments are those of the A operand.
using Probabilities = uint32_t[kMTiles][kNTiles / 2][4];
MLA_DEVICE void round_probabilities(Probabilities& probability, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kMTiles; i++)
#pragma unroll
    for (int j = 0; j < kNTiles / 2; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float (&x)[4] = s[i][2 * j + e / 2];
        probability[i][j][e] = cvt_rn_x2<Value>(x[e % 2 * 2], x[e % 2 * 2 + 1]);
      }
}

// O += P V
MLA_DEVICE void multiply_pv(Accumulator& o, const Probabilities& probability, uint32_t v) {
  const int lane = thread_id() % 32;
  const uint32_t v_at = v + lane % 16 * kVRowBytes + (lane / 16 << 4 ^ swizzle<kVRowBytes>(lane % 8));
#pragma unroll
  for (int j = 0; j < kNTiles / 2; j++)
#pragma unroll
    for (int step = 0; step < kVRowBytes / 32; step++) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, step_address<kVRowBytes>(v_at, step) + j * 16 * kVRowBytes);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if constexpr (kFp8Data) {
          // Bytes of two columns of two keys; the two keys of each column side by side.
          const uint32_t low = prmt(b[2 * half], 0, 0x3120), high = prmt(b[2 * half + 1], 0, 0x3120);
#pragma unroll
          for (int odd = 0; odd < 2; odd++) {
            const uint32_t b0 = widen_e4m3_x2<Value>(low >> 16 * odd), b1 = widen_e4m3_x2<Value>(high >> 16 * odd);
#pragma unroll
            for (int i = 0; i < kMTiles; i++)
              mma_m16n8k16<Value>(o[i][4 * step + 2 * half + odd], probability[i][j], b0, b1);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kMTiles; i++)
            mma_m16n8k16<Value>(o[i][2 * step + half], probability[i][j], b[2 * half], b[2 * half + 1]);
        }
      }
    }
}
