// What every part of the mma.sync prefill kernel shares: the tile, parameters, the item of a block and the plan of
// shared memory.
//
// The host defines: MLA_ELEMENT (bf16 | fp16), MLA_OUTPUT (the same or float), MLA_NOPE_DIM, MLA_V_DIM, MLA_ROPE_KIND, MLA_PAGE_SIZE,
// MLA_ALIGNMENT, MLA_LSE, MLA_SINKS, MLA_SOFTCAP, MLA_SCALE_SCORES and the tile: MLA_WARPS, MLA_WARP_ROWS, MLA_BLOCK_N,
// MLA_RESIDENT. "mask.cuh" is generated from the mask's program.
#pragma once
#include "chunk.cuh"
#include "paged.cuh"
#include "sequence.cuh"
#include "mask.cuh"

using Element = MLA_ELEMENT;
using Output = MLA_OUTPUT;

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

struct PrefillParams {
  const Element* q;  // [T, H, kQkDim]; strides in elements
  int64_t q_stride_t, q_stride_h;
  const Element* k;  // [L, H, MLA_NOPE_DIM]
  int64_t k_stride_t, k_stride_h;
  const Element* v;  // [L, H, kVDim]
  int64_t v_stride_t, v_stride_h;
  Output* output;  // [T, H, kVDim]
  int64_t output_stride_t, output_stride_h;
  float* lse;  // [T, H]
  int64_t lse_stride_t, lse_stride_h;
  const float* sinks;  // [H]
  SequenceArgs sequences;
  PageTable page_table;  // paged rope
  PagedRows rope;  // paged: of the cache; batched: a sequence is a page; ragged: one page
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
//   q  [kBlockM][kQkDim]   k  [kStagesK][kBlockN][kQkDim], the last 64 columns rope   v  [kBlockN][kVDim]   the item
//
// Within each 128 bytes of a row the 16-byte chunk c lies at c ^ (row % 8): the eight rows of a matrix that ldmatrix
// reads are in different banks, and so are the chunks that a quarter warp copies.

constexpr int kSwizzleBytes = 128;
constexpr int kQkRowBytes = kQkDim * int(sizeof(Element)), kVRowBytes = kVDim * int(sizeof(Element));
constexpr int kRopeColumnBytes = MLA_NOPE_DIM * int(sizeof(Element));
static_assert(kQkRowBytes % kSwizzleBytes == 0 && kVRowBytes % kSwizzleBytes == 0 &&
                  kRopeColumnBytes % kSwizzleBytes == 0,
              "");

constexpr int kOffsetQ = 0;
constexpr int kOffsetK = kOffsetQ + kBlockM * kQkRowBytes;
constexpr int kKBytes = kBlockN * kQkRowBytes;
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
