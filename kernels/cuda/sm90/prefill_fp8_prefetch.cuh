// What a short call reads is brought into L2 by a helper warp of each block, ahead of those who wait for it.
#pragma once
#include "prefill_fp8_layout.cuh"

// For so many boxes a thread block and no more, a lane each; and where pages and scales begin.
constexpr int kShortCall = 32;
MLA_DEVICE void prefetch_operands(const PrefillParams& p) {
  constexpr int kBoxesOfRows = 2 * kBlockN / kKeyBlock;  // every second row each
  constexpr int kBoxesOfTile = kBoxesOfRows + (kTransposeV ? kBoxesOfRows : 1), kBoxesOfBlock = 2;
  const int lane = threadIdx.x & 31, box = blockIdx.x + nctaid_x() * lane;
  const int tiles = ceil_div(p.rows, kBlockN) * kBoxesOfTile,
            blocks = ceil_div(p.rows_q, kRowsPerGroup) * kBoxesOfBlock;
  const int64_t boxes = int64_t(tiles + blocks) * p.heads;
  if (boxes > kShortCall * nctaid_x()) return;
  if (MLA_ROPE_KIND == kRopePaged && p.page_table.pages != nullptr && p.page_table.indptr == nullptr && lane < p.batch)
    prefetch_global_l2(page_row(p.page_table, lane));
  constexpr int kScalesOfLine = 32;
  const int row = kScalesOfLine * box;
  if (row < p.rows_q) prefetch_global_l2(p.q_scale + row * p.q_scale_stride);
  if (row < p.rows) prefetch_global_l2(p.k_scales + row * p.k_scales_stride);
  if (p.v_scale != nullptr && lane == 0) prefetch_global_l2(p.v_scale);
  if (box >= boxes) return;
  const int head = box % p.heads, i = box / p.heads, part = i % kBoxesOfTile, key = i / kBoxesOfTile * kBlockN,
            boxes_of_rows = part % kBoxesOfRows;
  if (i >= tiles) {
    const int of_block = i - tiles, q_row = of_block / kBoxesOfBlock * kRowsPerGroup;
    cp_async_bulk_prefetch_tensor_3d(of_block % kBoxesOfBlock == 0 ? p.q : p.q_rope, 0, head, q_row);
  } else if (part < kBoxesOfRows || kTransposeV) {
    const int k_row = key + boxes_of_rows / 2 * kKeyBlock + boxes_of_rows % 2;
    if (k_row < p.rows) cp_async_bulk_prefetch_tensor_3d(part < kBoxesOfRows ? p.k : p.v, 0, head, k_row);
  } else {
    cp_async_bulk_prefetch_tensor_3d(p.v, key, 0, head);
  }
}
