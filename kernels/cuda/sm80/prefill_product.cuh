// The two products of a warp by mma.sync. Addresses follow from the swizzle: within what it permutes, every row that a
// lane addresses has the same permutation, so a step along the columns is one exclusive or.
//
// Fragments are read two bytes wide. A lane that widens fp8 elements to 16 bits has other columns of q and k than the
// fragment of a 16-bit product names, but the same of both, and a sum has no order. Of fp8 values it has the even and the
// odd columns of 16 in a fragment each, and so has O.
#pragma once
#include "prefill_softmax.cuh"

// Byte offset of SPAN bytes, the `step`-th of a row, from an address whose lane has its chunk of the first SPAN.
template <int ROW_BYTES, int SPAN = 32> MLA_DEVICE uint32_t step_address(uint32_t at, int step) {
  constexpr int kSteps = kSwizzleBytes<ROW_BYTES> / SPAN;
  return (at ^ step % kSteps * SPAN) + step / kSteps * kSwizzleBytes<ROW_BYTES>;
}

// A product over 32 bytes of T.
template <typename T> MLA_DEVICE void mma_32_bytes(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (is_same<T, e4m3>)
    mma_m16n8k32_e4m3(d, a, b0, b1);
  else
    mma_m16n8k16<T>(d, a, b0, b1);
}

// S += Q K^T over the columns of T from byte FIRST to byte LAST of the rows.
template <typename T, int FIRST, int LAST> MLA_DEVICE void multiply_qk_columns(Scores& s, uint32_t q, uint32_t k) {
  const int id = thread_id(), lane = id % 32, row = lane % 8;
  const uint32_t q_at =
      q + (id / 32 * kWarpRows + lane % 16) * kQkRowBytes + (lane / 16 << 4 ^ swizzle<kQkRowBytes>(row));
  const uint32_t k_at = k + (row + lane / 16 * 8) * kQkRowBytes + (lane / 8 % 2 << 4 ^ swizzle<kQkRowBytes>(row));
#pragma unroll( \
    is_same<T, e4m3> ? 2 : 4)  // all steps at once would have more fragments under way than there are registers
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
        mma_32_bytes<T>(s[i][j], a[i], b[0], b[1]);
        mma_32_bytes<T>(s[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// S += Q K^T over the fp8 columns, the first kNopeBytes of the rows, widened. A lane has four neighbouring columns.
MLA_DEVICE void multiply_qk_widened(Scores& s, uint32_t q, uint32_t k) {
  const int id = thread_id(), lane = id % 32, flip = swizzle<kQkRowBytes>(lane % 8);
  const uint32_t q_at = q + (id / 32 * kWarpRows + lane % kWarpRows) * kQkRowBytes + flip;
  const uint32_t k_at = k + lane * kQkRowBytes + flip;
#pragma unroll 1  // the widened fragments of one step are as many as there are registers for
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
    if constexpr (kFp8Scores)
      multiply_qk_columns<e4m3, 0, kNopeBytes>(s, q, k);
    else
      multiply_qk_widened(s, q, k);
    if constexpr (kRopePrescaled) multiply_qk_columns<Element, kNopeBytes, kQkRowBytes>(s, q, k);
    scale_queries(s, q_scales);
    scale_keys(s, k_scales);
    if constexpr (!kRopePrescaled) multiply_qk_columns<Element, kNopeBytes, kQkRowBytes>(s, q, k);
  } else if constexpr (kFp8Rope) {
    multiply_qk_columns<Element, kNopeBytes, kQkRowBytes>(s, q, k);
    scale_keys(s, k_scales);
    multiply_qk_columns<Element, 0, kNopeBytes>(s, q, k);
  } else {
    multiply_qk_columns<Element, 0, kQkRowBytes>(s, q, k);
  }
}

// What P and V are multiplied in. P stays below 2^(kReferenceBits + kGrowth), which e4m3 and fp16 hold, but not times any scale.
template <bool FP8, bool WIDENED> struct ValueType { using type = Element; };
template <> struct ValueType<true, false> { using type = e4m3; };
template <> struct ValueType<true, true> { using type = fp16; };
using Value = typename ValueType<kFp8Data && !kValueScales, !kFp8Output>::type;

// P rounded: an accumulator's fragments are those of the A operand, in e4m3 with the keys of 16 in another order: a lane
// has 2t, 2t + 1, 8 + 2t and 9 + 2t where t = lane % 4.
constexpr int kKeysPerStep = 32 / int(sizeof(Value));
using Probabilities = uint32_t[kMTiles][kBlockN / kKeysPerStep][4];
template <typename T = Value> MLA_DEVICE void round_probabilities(Probabilities& probability, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kMTiles; i++)
#pragma unroll
    for (int j = 0; j < kBlockN / kKeysPerStep; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int first = e % 2 * 2, n = kKeysPerStep / 8 * j + kKeysPerStep / 16 * (e / 2);
        const float (&x)[4] = s[i][n];
        if constexpr (is_same<T, e4m3>) {
          const float (&y)[4] = s[i][n + 1];
          const float four[4] = {x[first], x[first + 1], y[first], y[first + 1]};
          probability[i][j][e] = pack<e4m3>(four);
        } else {
          probability[i][j][e] = cvt_rn_x2<T>(x[first], x[first + 1]);
        }
      }
}

// O += P V in e4m3. The sum of a tile is added in fp32: what the tensor cores add up they may truncate.
MLA_DEVICE void multiply_pv_fp8(Accumulator& o, const Probabilities& probability, uint32_t v) {
  const int lane = thread_id() % 32;
  const uint32_t v_at = v + lane * kVRowBytes + swizzle<kVRowBytes>(lane % 8);
#pragma unroll
  for (int chunk = 0; chunk < kVRowBytes / 16; chunk++) {
    float sum[kMTiles][2][4] = {};
#pragma unroll
    for (int j = 0; j < kBlockN / 32; j++) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, step_address<kVRowBytes, 16>(v_at, chunk) + j * 32 * kVRowBytes);
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        // Of two columns of two keys each, one column of four keys.
        const uint32_t selector = odd ? 0x7531 : 0x6420;
        const uint32_t b0 = prmt(b[0], b[1], selector), b1 = prmt(b[2], b[3], selector);
#pragma unroll
        for (int i = 0; i < kMTiles; i++) mma_m16n8k32_e4m3(sum[i][odd], probability[i][j], b0, b1);
      }
    }
#pragma unroll
    for (int i = 0; i < kMTiles; i++)
#pragma unroll
      for (int e = 0; e < 8; e++) {
        float& x = o[i][2 * chunk + e / 4][e % 4];
        x = __fadd_rn(x, sum[i][e / 4][e % 4]);
      }
  }
}

// O += P V
template <typename T = Value> MLA_DEVICE void multiply_pv(Accumulator& o, const Probabilities& probability,
                                                          uint32_t v) {
  if constexpr (is_same<T, e4m3>) {
    multiply_pv_fp8(o, probability, v);
  } else {
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
              const uint32_t b0 = widen_e4m3_x2<T>(low >> 16 * odd), b1 = widen_e4m3_x2<T>(high >> 16 * odd);
#pragma unroll
              for (int i = 0; i < kMTiles; i++)
                mma_m16n8k16<T>(o[i][4 * step + 2 * half + odd], probability[i][j], b0, b1);
            }
          } else {
#pragma unroll
            for (int i = 0; i < kMTiles; i++)
              mma_m16n8k16<T>(o[i][2 * step + half], probability[i][j], b[2 * half], b[2 * half + 1]);
          }
        }
      }
  }
}
