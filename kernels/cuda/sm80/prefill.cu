// Prefill attention by mma.sync and cp.async, for every architecture from sm_80 on and for rows of any stride:
//
//   S = scale * (Q K^T),   K = [k | rope],   O = softmax(S) V,   lse = ln(sum exp(S))
//
// A block has kBlockM queries of one head and walks over its key tiles, those that the mask hides left out, from the
// last to the first. A warp has kWarpRows of the queries to itself: S, P and O stay in its registers, Q, K and V are
// read from shared memory.
//
//   K of the next tile   |--- copied ------------------------------|         two stages
//   V of this tile       |--- copied -----------|                            one
//   warps                | S = Q K^T | softmax  | O += P V         |
//                        ^ barrier 1            ^ barrier 2
//
// Barrier 1: K of this tile is there for all, and nobody reads the other K stage or V any more. Barrier 2: V is there
// for all. Numerics: fp32 scores and sums, base-2 exponentials; see prefill_softmax.cuh. Key tile and order follow from
// the architecture alone, so a sequence's bits do not depend on its company, nor on the height of the tile.
//
// fp8 operands lie in shared memory as they are. Where mma.sync multiplies e4m3 (sm_89, sm_12x) P is rounded to it too;
// elsewhere they are widened to 16 bits, which hold them exactly, on the way to the tensor cores (what ptxas makes of
// such an mma.sync on sm_90 and sm_100, each warp's fragments once). Scales are applied to scores: see multiply_qk.
//
// Budget of a tile of 128 queries and 64 keys, (192, 128): 5.2 MFLOP; 40 KiB copied to shared memory and 208 KiB read
// from it as fragments, 1,664 cycles at 128 bytes each. Two blocks an SM take turns at products and exponentials. In
// fp8 24 and 128 KiB; a warp's 320 products then come with 320 conversions.
#include "prefill_layout.cuh"
#include "prefill_item.cuh"
#include "prefill_rope.cuh"
#include "prefill_values.cuh"
#include "prefill_softmax.cuh"
#include "prefill_product.cuh"
#include "prefill_epilogue.cuh"

extern "C" __global__ void __launch_bounds__(MLA_THREADS, MLA_RESIDENT)
    mla_prefill(const __grid_constant__ PrefillParams params) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  const uint32_t shared = cvta_shared(dynamic), k_at = shared + kOffsetK, v_at = shared + kOffsetV;
  Item* found = reinterpret_cast<Item*>(dynamic + kOffsetItem);
  if (threadIdx.x < 32) *found = find_item(params);
  __syncthreads();
  const Item& item = *found;
  if (item.rows == 0) return;

  Accumulator o = {};
  RowSums sums;
#pragma unroll
  for (int r = 0; r < kRows; r++) sums.m[r] = -infinity(), sums.l[r] = 0.0f;

  TileWalk walk(item);
  int stage = 0;  // of K; the other one is being filled
  RopeCopy rope;
  ValueCopy values;
  int tile = walk.next(params, item);
  if (tile >= 0) {
    rope.find(params, item, tile);
    copy_q(params, item, shared);
    copy_nope(params, item, tile, k_at);
    rope.start(params, item, tile, k_at);
    rope.load(params, item, tile);
    rope.store(k_at);
    values.load(params, item, tile);
  }
  cp_async_commit_group();
  int next = walk.next(params, item);
  rope.find(params, item, next);
#pragma unroll 1
  while (tile >= 0) {
    cp_async_wait_group<0>();
    __syncthreads();  // barrier 1
    values.start(params, item, tile, v_at);
    cp_async_commit_group();
    if (next >= 0) {
      copy_nope(params, item, next, k_at + (stage ^ 1) * kKBytes);
      rope.start(params, item, next, k_at + (stage ^ 1) * kKBytes);
    }
    cp_async_commit_group();
    const int row = thread_id() / 32 * kWarpRows, left = item.rows - row;
    const int type = class_of_tile(params, item, tile, row, left < kWarpRows ? left : kWarpRows);
    // Votes, so that the compiler sees a warp that does not diverge.
    const bool hidden = __all_sync(~0u, type == kTileHidden);
    const bool partial = __any_sync(~0u, type == kTilePartial);
    Probabilities probability;
    if (!hidden) {
      Scores s;
      multiply_qk(s, shared + kOffsetQ, shared + kOffsetQScales, k_at + stage * kKBytes);
      if constexpr (kScaleScores) scale_scores(s, params, item, tile * kBlockN);
      if (partial) mask_scores(s, params, item, tile * kBlockN);
      softmax(s, sums, o, score_scale(params));
      if constexpr (kValueScales) scale_keys(s, k_at + stage * kKBytes + kValueScalesAt);
      round_probabilities(probability, s);
    }
    // Here, where the scores are gone and their registers free.
    rope.load(params, item, next);
    values.load(params, item, next);
    const int after = walk.next(params, item);
    rope.find(params, item, after);
    cp_async_wait_group<1>();  // V; the next K may still be on its way
    __syncthreads();  // barrier 2
    if (!hidden) multiply_pv(o, probability, v_at);
    if (next >= 0) rope.store(k_at + (stage ^ 1) * kKBytes);
    tile = next;
    next = after;
    stage ^= 1;
  }
  finish_item(params, item, o, sums);
}
