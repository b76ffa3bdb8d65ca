// What every part of the mma.sync prefill kernel shares: the tile, parameters, the item of a block and the plan of
// shared memory.
//
// The host defines: MLA_ELEMENT (bf16 | fp16), MLA_DATA and MLA_ROPE (the same or e4m3), MLA_OUTPUT (the same or float), MLA_NOPE_DIM,
// MLA_V_DIM, MLA_ROPE_KIND, MLA_PAGE_SIZE, MLA_ALIGNMENT, MLA_LSE, MLA_SINKS, MLA_SOFTCAP, MLA_SCALE_SCORES, MLA_ROPE_PRESCALED,
// MLA_VALUE_SCALES, MLA_V_TRANSPOSED, MLA_FP8_MMA and the tile: MLA_WARPS, MLA_WARP_ROWS, MLA_BLOCK_N, MLA_RESIDENT. "mask.cuh" is
// generated from the mask's program.
#pragma once
#include "chunk.cuh"
#include "paged.cuh"
#include "sequence.cuh"
#include "mask.cuh"

using Element = MLA_ELEMENT;  // 16 bits: of the rope's part of the scores
using Data = MLA_DATA;  // q (its nope columns), k and v: Element or e4m3
using Rope = MLA_ROPE;  // the rope of the keys as it is stored: Element or e4m3
using Output = MLA_OUTPUT;

constexpr bool kFp8Data = is_same<Data, e4m3>, kFp8Rope = is_same<Rope, e4m3>;
// fp8 nope columns: their scales come before the rope's part is added, or after it where the rope is stored divided by them.
constexpr bool kRopePrescaled = MLA_ROPE_PRESCALED;
constexpr bool kValueScales = MLA_VALUE_SCALES;  // a scale for each row of v; else one for all of a head's, if any
// fp8 operands are multiplied as such, where the architecture has tensor cores for them, or widened to 16 bits.
constexpr bool kFp8Scores = kFp8Data && MLA_FP8_MMA, kFp8Output = kFp8Scores && !kValueScales;
static_assert(kFp8Data || !(kRopePrescaled || kValueScales), "scales of fp8 data");

// ---- tile -------------------------------------------------------------------------------------------------------------------------

constexpr int kRopeDim = 64;
constexpr int kQkDim = MLA_NOPE_DIM + kRopeDim;
constexpr int kVDim = MLA_V_DIM;
constexpr int kWarps = MLA_WARPS;
constexpr int kWarpRows = MLA_WARP_ROWS;  // query rows of a warp
constexpr int kBlockM = kWarps * kWarpRows;  // query rows of a block
constexpr int kBlockN = MLA_BLOCK_N;  // keys of a tile
constexpr int kStagesK = 2;
constexpr int kMTiles = kWarpRows / 16;  // fragments of a warp's rows
constexpr int kNTiles = kBlockN / 8;  // fragments of a tile's keys
constexpr int kRows = 2 * kMTiles;  // rows of a thread: (r / 2) * 16 + (r % 2) * 8 + lane / 4 of its warp's
static_assert(MLA_THREADS == 32 * kWarps && kWarpRows % 16 == 0 && kBlockN % 16 == 0, "whole fragments");

// Scores become base-2 logits before the maxima where a plain factor in the exponent would not do.
constexpr bool kScaleScores = MLA_SCALE_SCORES;
static_assert(!(MLA_SOFTCAP || MLA_MASK_BIASES) || MLA_SCALE_SCORES, "softcap and bias act on scaled scores");

// ---- parameters -------------------------------------------------------------------------------------------------------------------

// Scales of fp8 operands, strides in elements.
struct OperandScales {
  const float* q;  // [T]
  int64_t q_stride;
  const float* k;  // [L]
  int64_t k_stride;
  const float* v;  // [L] with kValueScales, else [H] or null
  int64_t v_stride;
  PagedRows rope;  // one for each of the rope's rows
};

struct PrefillParams {
  const Data* q;  // [T, H, kQkDim], or its nope columns; strides in elements
  int64_t q_stride_t, q_stride_h;
  const Element* q_rope;  // [T, H, kRopeDim] where q is split
  int64_t q_rope_stride_t, q_rope_stride_h;
  const Data* k;  // [L, H, MLA_NOPE_DIM]
  int64_t k_stride_t, k_stride_h;
  const Data* v;  // [L, H, kVDim]; V^T: the first stride is that of columns
  int64_t v_stride_t, v_stride_h;
  Output* output;  // [T, H, kVDim]
  int64_t output_stride_t, output_stride_h;
  float* lse;  // [T, H]
  int64_t lse_stride_t, lse_stride_h;
  const float* sinks;  // [H]
  SequenceArgs sequences;
  PageTable page_table;  // paged rope
  PagedRows rope;  // paged: of the cache; batched: a sequence is a page; ragged: one page
  OperandScales scales;
  float logit_scale;  // softmax_scale * log2(e)
  float softcap_scale;  // 2 * logit_scale / softcap
  float softcap_logit;  // softcap * log2(e)
  int batch;
  int heads;
  MaskArgs mask;
};

// ---- item -------------------------------------------------------------------------------------------------------------------------

// Query rows of one head of one sequence: the work of a block.
struct alignas(16) Item {
  int q_row;  // row of q and output of its first query
  int rows;  // queries; none: the block has no work
  int head;
  int sequence;
  int q_position;  // of the first query
  int k_position;  // of key 0
  int n_keys;
  int start;  // position of the sequence's first query
  int k_row;  // row of k and v of key 0
};

// ---- shared memory ----------------------------------------------------------------------------------------------------------------
//
//   q  [kBlockM][nope | rope]   k  [kStagesK][kBlockN][nope | rope]   v  [kBlockN][kVDim]   the item
//
// Nope columns and values as they are stored, the rope in 16 bits. Rows of scales follow what they belong to: one a query, and in each
// stage of k one a key and one a value.
//
// The 16-byte chunk c of a row lies at c ^ (row % 8) within each 128 bytes, or, where a row is an odd number of 64 bytes, at
// c ^ (row / 2 % 4) within each 64: the eight rows of a matrix that ldmatrix reads are in different banks, and so are the chunks that a
// quarter warp copies.

constexpr int kNopeBytes = MLA_NOPE_DIM * int(sizeof(Data));
constexpr int kQkRowBytes = kNopeBytes + kRopeDim * int(sizeof(Element)), kVRowBytes = kVDim * int(sizeof(Data));
template <int ROW_BYTES> constexpr int kSwizzleBytes = ROW_BYTES % 128 == 0 ? 128 : 64;
// What the swizzle of a row flips in a column, in bytes; the same for all rows of equal row % 8.
template <int ROW_BYTES> MLA_DEVICE constexpr int swizzle(int row) {
  return kSwizzleBytes<ROW_BYTES> == 128 ? (row & 7) << 4 : (row >> 1 & 3) << 4;
}
static_assert(kNopeBytes % kSwizzleBytes<kQkRowBytes> == 0 && kVRowBytes % 128 == 0, "");

constexpr int kOffsetQ = 0;
constexpr int kOffsetQScales = kOffsetQ + kBlockM * kQkRowBytes;
constexpr int kOffsetK = kOffsetQScales + (kFp8Data ? kBlockM * 4 : 0);
constexpr int kKeyScalesAt = kBlockN * kQkRowBytes;  // in a stage of k
constexpr int kValueScalesAt = kKeyScalesAt + (kFp8Data || kFp8Rope ? kBlockN * 4 : 0);
constexpr int kKBytes = kValueScalesAt + (kValueScales ? kBlockN * 4 : 0);
constexpr int kOffsetV = kOffsetK + kStagesK * kKBytes;
constexpr int kOffsetItem = kOffsetV + kBlockN * kVRowBytes;
static_assert(MLA_SHARED_BYTES == kOffsetItem + int(sizeof(Item)), "the host counts other bytes");

// The thread's number, unknown to the compiler's algebra: what follows from it is computed where it is used and not
// kept in registers through the loop, which has none to spare.
MLA_DEVICE int thread_id() {
  int id = threadIdx.x;
  asm volatile("" : "+r"(id));
  return id;
}
