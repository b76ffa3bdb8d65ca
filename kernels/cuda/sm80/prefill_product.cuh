// The two products of a warp by mma.sync. Addresses follow from the swizzle: chunk c of a row lies at c ^ (row % 8),
// and every row that a lane addresses has the same row % 8, so a step along the columns is one exclusive or.
#pragma once
#include "prefill_softmax.cuh"

// Byte offset of 16 columns, the `step`-th of a row, from an address whose lane has chunk 0 or 1 of them.
MLA_DEVICE uint32_t step_address(uint32_t at, int step) { return (at ^ (step % 4 << 5)) + step / 4 * kSwizzleBytes; }

// S = Q K^T
MLA_DEVICE void multiply_qk(Scores& s, uint32_t q, uint32_t k) {
  const int id = thread_id(), lane = id % 32, row = lane % 8;
  const uint32_t q_at = q + (id / 32 * kWarpRows + lane % 16) * kQkRowBytes + ((lane / 16 ^ row) << 4);
  const uint32_t k_at = k + (row + lane / 16 * 8) * kQkRowBytes + ((lane / 8 % 2 ^ row) << 4);
#pragma unroll
  for (int i = 0; i < kMTiles; i++)
#pragma unroll
    for (int j = 0; j < kNTiles; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[i][j][e] = 0.0f;
#pragma unroll 4  // all steps at once would have more fragments under way than there are registers
  for (int step = 0; step < kQkDim / 16; step++) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int i = 0; i < kMTiles; i++) ldmatrix_x4(a[i], step_address(q_at, step) + i * 16 * kQkRowBytes);
#pragma unroll
    for (int j = 0; j < kNTiles; j += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, step_address(k_at, step) + j * 8 * kQkRowBytes);
#pragma unroll
      for (int i = 0; i < kMTiles; i++) {
        mma_m16n8k16<Element>(s[i][j], a[i], b[0], b[1]);
        mma_m16n8k16<Element>(s[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// P rounded to the storage type: an accumulator's fragments are those of the A operand.
using Probabilities = uint32_t[kMTiles][kNTiles / 2][4];
MLA_DEVICE void round_probabilities(Probabilities& probability, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kMTiles; i++)
#pragma unroll
    for (int j = 0; j < kNTiles / 2; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float (&x)[4] = s[i][2 * j + e / 2];
        probability[i][j][e] = cvt_rn_x2<Element>(x[e % 2 * 2], x[e % 2 * 2 + 1]);
      }
}

// O += P V
MLA_DEVICE void multiply_pv(Accumulator& o, const Probabilities& probability, uint32_t v) {
  const int lane = thread_id() % 32;
  const uint32_t v_at = v + lane % 16 * kVRowBytes + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
  for (int j = 0; j < kNTiles / 2; j++)
#pragma unroll
    for (int step = 0; step < kVDim / 16; step++) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, step_address(v_at, step) + j * 16 * kVRowBytes);
#pragma unroll
      for (int i = 0; i < kMTiles; i++) {
        mma_m16n8k16<Element>(o[i][2 * step], probability[i][j], b[0], b[1]);
        mma_m16n8k16<Element>(o[i][2 * step + 1], probability[i][j], b[2], b[3]);
      }
    }
}
