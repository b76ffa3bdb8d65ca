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
  // Eight lanes read 32 keys of four columns, a warp of 16; all blocks of a thread have the same keys.
  static constexpr int kColumns = MLA_THREADS / (kBlockN / 4) * 4;  // of all threads in a block each
  static constexpr int kBlocks = kVDim / kColumns;
  static_assert(kBlockN % 32 == 0 && MLA_THREADS % kBlockN == 0 && kVDim % kColumns == 0,
                "whole blocks for every thread");
  uint32_t columns[kTransposed ? kBlocks : 1][4];  // four keys each

  // First key and column of this thread's first block.
  MLA_DEVICE static int key() { return thread_id() % 8 * 4 + thread_id() / 32 % (kBlockN / 32) * 32; }
  MLA_DEVICE static int column() { return (thread_id() / kBlockN * 4 + thread_id() / 8 % 4) * 4; }

  // Without a tile zeros: what was loaded before need not be kept.
  MLA_DEVICE void load(const PrefillParams& p, const Item& item, int tile) {
    if constexpr (kTransposed) {
      const int first = tile * kBlockN, count = tile >= 0 ? item.n_keys - first - key() : 0;
      const bool whole = MLA_ALIGNMENT >= 4 && item.k_row % 4 == 0 && tile >= 0 && item.n_keys - first >= kBlockN;
      const uint8_t* from = reinterpret_cast<const uint8_t*>(p.v) + item.head * p.v_stride_h + item.k_row + first +
                            column() * p.v_stride_t + key();
      const int64_t next_block = (kColumns - 4) * p.v_stride_t;
#pragma unroll
      for (int block = 0; block < kBlocks; block++, from += next_block)
#pragma unroll
        for (int i = 0; i < 4; i++, from += p.v_stride_t) {
          uint32_t& four = columns[block][i];
          if (whole) {
            four = __ldg(reinterpret_cast<const uint32_t*>(from));
          } else {
            four = 0;
#pragma unroll
            for (int j = 0; j < 4; j++)
              if (j < count) four |= uint32_t(__ldg(&from[j])) << 8 * j;
          }
        }
    }
  }

  MLA_DEVICE void start(const PrefillParams& p, const Item& item, int tile, uint32_t to) const {
    if constexpr (kTransposed) {
      to += key() * kVRowBytes;
#pragma unroll
      for (int block = 0; block < kBlocks; block++) {
        const uint32_t (&c)[4] = columns[block];
        const uint32_t low[2] = {prmt(c[0], c[1], 0x5140), prmt(c[2], c[3], 0x5140)},  // of keys 0 and 1
            high[2] = {prmt(c[0], c[1], 0x7362), prmt(c[2], c[3], 0x7362)};  // of keys 2 and 3
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32_t (&pair)[2] = i < 2 ? low : high;
          st_shared(to + i * kVRowBytes + (column() + block * kColumns ^ swizzle<kVRowBytes>(key() + i)),
                    prmt(pair[0], pair[1], i % 2 ? 0x7632 : 0x5410));
        }
      }
    } else {
      const int first = tile * kBlockN;
      copy_rows<kBlockN, kVRowBytes, kVRowBytes>(
          to, p.v + (item.k_row + first) * p.v_stride_t + item.head * p.v_stride_h, p.v_stride_t, item.n_keys - first);
    }
  }
};
