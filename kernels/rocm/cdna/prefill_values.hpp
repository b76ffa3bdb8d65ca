// Values of one tile on their way from memory to LDS, where they lie transposed: registers of one thread.
#pragma once
#include "prefill_layout.hpp"

// Where the values of one (sequence, head) lie: rows of columns, or columns of rows (8 bits, MLA_V_TRANSPOSED).
struct ValueSource {
  const uint8_t* data;  // first key's first column
  uint32_t stride;  // from a key to the next, or from a column to the next; bytes
};

#if MLA_V_TRANSPOSED
// 16 keys of one column, any address: two chunks of LDS get half of them each.
struct ValueRegisters {
  static_assert(sizeof(Element) == 1, "8-bit values");
  static constexpr int kRuns = kBlockN / 16, kShare = kRuns * kVDim / kThreads;
  static_assert(kRuns * kVDim % kThreads == 0, "equal shares");
  u32x4 keys[kShare];

  MLA_DEVICE static int item(int i) { return thread_id() + i * kThreads; }

  // Keys first.. of the sequence; WHOLE: all of them count, else those behind first + last repeat it.
  template <bool WHOLE> MLA_DEVICE void fetch(const ValueSource& source, int first, int last) {
    const uint8_t* columns = source.data + first;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int column = item(i) / kRuns, key = item(i) % kRuns * 16;
      if constexpr (WHOLE) {
        keys[i] = load_global_unaligned(columns + lane_offset(column, source.stride, key));
      } else {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          uint32_t bits = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            bits |= uint32_t(load_global<uint8_t>(
                        columns + lane_offset(column, source.stride, smaller(key + 4 * word + j, last))))
                    << 8 * j;
          keys[i][word] = bits;
        }
      }
    }
  }

  MLA_DEVICE void commit(uint8_t* lds) const {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int column = item(i) / kRuns, run = item(i) % kRuns;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        lds_at<u32x2>(lds, value_place(column, run / 2 * 2 + half) + run % 2 * 8) =
            u32x2{keys[i][half], keys[i][2 + half]};
    }
  }
};
#else
// Blocks of 8 bytes of keys and two columns.
struct ValueRegisters {
  static constexpr int kKeys = 8 / sizeof(Element), kBlocks = kBlockN / kKeys * (kVDim / 2);
  static constexpr int kShare = kBlocks / kThreads;
  static_assert(kBlocks % kThreads == 0, "equal shares");
  using Pair = AccessOf<2 * sizeof(Element)>::type;
  uint32_t pair[kShare][kKeys];

  // Neighbouring lanes take the two halves of a 16-byte chunk.
  struct Block { int first_key, column, chunk, half; };
  MLA_DEVICE static Block block(int i) {
    const int item = thread_id() + i * kThreads, half = item & 1;
    const int column = 2 * ((item >> 1) % (kVDim / 2)), chunk = (item >> 1) / (kVDim / 2);
    return {chunk / 2 * 4 * kKeys + chunk % 2 * 4 + half * 2 * kKeys, column, chunk, half};
  }
  // Key j of a block, counted from its first.
  MLA_DEVICE static constexpr int key_of(int j) { return register_key(j); }

  // Keys first.. of the sequence; WHOLE: all of them count, else those behind first + last repeat it.
  template <bool WHOLE> MLA_DEVICE void fetch(const ValueSource& source, int first, int last) {
    const uint32_t stride = fresh(source.stride);
    const uint8_t* rows = source.data + int64_t(first) * stride;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const Block own = block(i);
      const uint32_t column = own.column * sizeof(Element), offset = lane_offset(own.first_key, source.stride, column);
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        if constexpr (WHOLE)
          pair[i][j] = load_global<Pair>(rows + int64_t(key_of(j)) * stride + offset);
        else
          pair[i][j] =
              load_global<Pair>(rows + lane_offset(smaller(own.first_key + key_of(j), last), source.stride, column));
      }
    }
  }

  MLA_DEVICE void commit(uint8_t* lds) const {
    constexpr uint32_t kLow = 0x05040100, kHigh = 0x07060302;  // both low halves, both high halves
    constexpr uint32_t kBytes = 0x05010400;  // low bytes, then high bytes, of two pairs of 8 bits
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const Block own = block(i);
      const auto pairs = [&](int j) {  // of 16 bits: one key; of 8 bits: keys j and j + 1
        if constexpr (sizeof(Element) == 2)
          return pair[i][j];
        else
          return __builtin_amdgcn_perm(pair[i][2 * j + 1], pair[i][2 * j], kBytes);
      };
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const auto word = [&](int w) {
          return __builtin_amdgcn_perm(pairs(2 * w + 1), pairs(2 * w), c ? kHigh : kLow);
        };
        lds_at<u32x2>(lds, value_place(own.column + c, own.chunk) + 8 * own.half) = u32x2{word(0), word(1)};
      }
    }
  }
};
#endif
