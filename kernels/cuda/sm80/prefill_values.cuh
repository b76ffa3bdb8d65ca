// The values of a tile. Rows of v are copied asynchronously. An fp8 v that is contiguous along its rows (V^T) goes through
// registers and is transposed there, 4 keys by 4 columns at a time: loaded while the tile before is multiplied, stored
// when that one's values are no longer read.
//
//   rows   ... barrier 1, start: copied asynchronously ... barrier 2
//   V^T    load ... barrier 1, start: stored ... barrier 2
#pragma once
#include "prefill_load.cuh"

constexpr bool kTransposed = MLA_V_TRANSPOSED;
static_assert(kFp8Data || !kTransposed, "V^T is a form of fp8 values");

struct ValueCopy {
  static constexpr int kBlocks = kBlockN / 4 * (kVDim / 4) / MLA_THREADS;
  static_assert(kBlockN % 32 == 0 && kBlockN / 4 * (kVDim / 4) % MLA_THREADS == 0, "whole blocks for every thread");
  uint32_t columns[kTransposed ? kBlocks : 1][4];  // four keys each

  // First key and column of this thread's block: eight lanes read 32 keys of a column.
  MLA_DEVICE static int key(int block) {
    const int n = block * MLA_THREADS + thread_id();
    return n % 8 * 4 + n / 32 % (kBlockN / 32) * 32;
  }
  MLA_DEVICE static int column(int block) {
    const int n = block * MLA_THREADS + thread_id();
    return (n / 32 / (kBlockN / 32) * 4 + n / 8 % 4) * 4;
  }

  // Without a tile zeros: what was loaded before need not be kept.
  MLA_DEVICE void load(const PrefillParams& p, const Item& item, int tile) {
    if constexpr (kTransposed) {
      const int first = tile * kBlockN, count = tile >= 0 ? item.n_keys - first : 0;
      const uint8_t* keys = reinterpret_cast<const uint8_t*>(p.v) + item.head * p.v_stride_h + item.k_row + first;
      const bool whole = MLA_ALIGNMENT >= 4 && item.k_row % 4 == 0 && count >= kBlockN;
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint8_t* from = keys + (column(block) + i) * p.v_stride_t + key(block);
          uint32_t& four = columns[block][i];
          if (whole) {
            four = __ldg(reinterpret_cast<const uint32_t*>(from));
          } else {
            four = 0;
#pragma unroll
            for (int j = 0; j < 4; j++)
              if (key(block) + j < count) four |= uint32_t(__ldg(&from[j])) << 8 * j;
          }
        }
    }
  }

  MLA_DEVICE void start(const PrefillParams& p, const Item& item, int tile, uint32_t to) const {
    if constexpr (kTransposed) {
#pragma unroll
      for (int block = 0; block < kBlocks; block++) {
        const uint32_t (&c)[4] = columns[block];
        const uint32_t even[2] = {prmt(c[0], c[1], 0x5140), prmt(c[0], c[1], 0x7362)},
                       odd[2] = {prmt(c[2], c[3], 0x5140), prmt(c[2], c[3], 0x7362)};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int row = key(block) + i;
          st_shared(to + row * kVRowBytes + (column(block) ^ swizzle<kVRowBytes>(row)),
                    prmt(even[i / 2], odd[i / 2], i % 2 ? 0x7632 : 0x5410));
        }
      }
    } else {
      const int first = tile * kBlockN;
      copy_rows<kBlockN, kVRowBytes, kVRowBytes>(
          to, p.v + (item.k_row + first) * p.v_stride_t + item.head * p.v_stride_h, p.v_stride_t, item.n_keys - first);
    }
  }
};
