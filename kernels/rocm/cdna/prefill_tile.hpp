// One tile of keys on its way from memory to LDS: addresses and registers in flight.
#pragma once
#include "paged.hpp"
#include "prefill_values.hpp"
#include "sequence.hpp"

// A row of a tensor [rows, heads, width], width contiguous; strides in bytes.
struct HeadRows {
  const uint8_t* data;
  int64_t token_stride;
  int64_t head_stride;
};

// One f32 a row; stride in bytes, 0 where one number stands for all.
struct RowScales {
  const uint8_t* data;
  int64_t stride;
};
MLA_DEVICE const uint8_t* row_scale(const RowScales& scales, int64_t row) { return scales.data + row * scales.stride; }

// Chunk of rope on its way to LDS, 16 bytes there; 8-bit elements beside 16-bit ones are widened.
template <typename T, bool WIDENED> struct RopeChunk {
  static constexpr int kBytes = kChunkBytes;
  u32x4 bits;
  MLA_DEVICE void load(const uint8_t* p) { bits = load_global<u32x4>(p); }
  MLA_DEVICE u32x4 operand() const { return bits; }
};
template <typename T> struct RopeChunk<T, true> {
  static constexpr int kBytes = kChunkBytes / 2;
  u32x2 bits;
  MLA_DEVICE void load(const uint8_t* p) { bits = load_global<u32x2>(p); }
  MLA_DEVICE u32x4 operand() const {
    return u32x4{widened_pair<RopeOperand, T, 0>(bits[0]), widened_pair<RopeOperand, T, 1>(bits[0]),
                 widened_pair<RopeOperand, T, 0>(bits[1]), widened_pair<RopeOperand, T, 1>(bits[1])};
  }
};

// Where the keys of one (sequence, head) lie. Row strides are below 2^24 bytes, page strides below 2^32 (the host sees to
// it), so that a tile's own offsets take 32 bits; what leads to the tile takes 64.
struct KeySource {
  const uint8_t* k;  // first key's nope columns
  const uint8_t* rope;  // batched, ragged: first key's rope
  uint32_t k_stride, rope_stride;
  ValueSource v;
  PagedRows rope_rows;  // paged
  PagedRows rope_scales;  // of an 8-bit rope: paged; else `data` is the first key's
  RowScales k_scales, v_scales;  // from the first key on; v_scales with one for each key
  const int* rope_pages;  // paged: pages of the sequence
  int offset;  // paged: position of the first key
  int n_keys;  // > 0
};

MLA_DEVICE const uint8_t* page_start(const PagedRows& rows, int page) {
  return rows.data + uint64_t(uint32_t(page)) * uint32_t(rows.page_stride);
}

// Scales of a tile's keys. Lane l has, of each block, that of the key in score register l % 16 of its half.
struct KeyScales {
  float key[kKeyBlocks], rope[kKeyBlocks], value[kKeyBlocks];

  MLA_DEVICE static int key_of(int block) { return block * kBlock + register_key(lane_id() % 16) + lane_key(); }
};

// Registers of one thread: its share of a tile. Rows at or past n_keys repeat the last key: finite, and hidden later,
// so that nothing of what lies there is read.
struct TileRegisters {
  static constexpr int kRowChunks = kNopeBytes / kChunkBytes, kRopeRowChunks = kRopeBytes / kChunkBytes;
  static constexpr int kNopeChunks = kBlockN * kRowChunks, kRopeChunks = kBlockN * kRopeRowChunks;
  static constexpr int kNope = ceil_div(kNopeChunks, kThreads), kRope = ceil_div(kRopeChunks, kThreads);
  static_assert(kNopeChunks % kWaveSize == 0 && kRopeChunks % kWaveSize == 0, "whole waves have a share, or none");

  u32x4 nope[kNope];
  RopeChunk<RopeElement, kRopeWidened> rope[kRope];
  ValueRegisters values;
  KeyScales scales;
  int page[kRope], scale_page[kKeyBlocks];  // of the rope and its scales, of the tile after this one

  MLA_DEVICE static int item(int i) { return thread_id() + i * kThreads; }
  // Whether share i of CHUNKS is this wave's.
  template <int CHUNKS> MLA_DEVICE static bool has(int i) {
    return (i + 1) * kThreads <= CHUNKS || i * kThreads + wave_id() * kWaveSize < CHUNKS;
  }

  // Page ids of tile `tile`, ahead of `fetch`.
  MLA_DEVICE void fetch_pages(const KeySource& source, int tile) {
    if constexpr (MLA_ROPE_KIND == kRopePaged) {
      const auto page_of = [&](int row) {
        const int key = smaller(tile * kBlockN + row, source.n_keys - 1);
        return source.rope_pages[uint32_t(source.offset + key) / kPageSize];
      };
      if constexpr (kRopeScaled) {
#pragma unroll
        for (int block = 0; block < kKeyBlocks; ++block) scale_page[block] = page_of(KeyScales::key_of(block));
      }
#pragma unroll
      for (int i = 0; i < kRope; ++i)
        if (has<kRopeChunks>(i)) page[i] = page_of(item(i) / kRopeRowChunks);
    }
  }

  MLA_DEVICE void fetch(const KeySource& source, int tile) {
    if ((tile + 1) * kBlockN <= source.n_keys)
      fetch_rows<true>(source, tile * kBlockN);
    else
      fetch_rows<false>(source, tile * kBlockN);
  }

  // Keys first.. of the sequence; WHOLE: all of them count. The lanes' offsets then are the same for every tile.
  template <bool WHOLE> MLA_DEVICE void fetch_rows(const KeySource& source, int first) {
    const int last = source.n_keys - 1 - first;
    const auto row_of = [&](int row) { return uint32_t(WHOLE ? row : smaller(row, last)); };
    const uint8_t* k = source.k + int64_t(first) * source.k_stride;
#pragma unroll
    for (int i = 0; i < kNope; ++i)
      if (has<kNopeChunks>(i))
        nope[i] = load_global<u32x4>(
            k + lane_offset(row_of(item(i) / kRowChunks), source.k_stride, item(i) % kRowChunks * kChunkBytes));
#pragma unroll
    for (int i = 0; i < kRope; ++i) {
      if (!has<kRopeChunks>(i)) continue;
      const uint32_t row = row_of(item(i) / kRopeRowChunks), stride = source.rope_stride;
      const uint32_t column = item(i) % kRopeRowChunks * RopeChunk<RopeElement, kRopeWidened>::kBytes;
      const uint8_t* elements;
      if constexpr (MLA_ROPE_KIND == kRopePaged) {
        const uint32_t slot = (uint32_t(source.offset + first) + row) % kPageSize;
        elements = page_start(source.rope_rows, page[i]) + lane_offset(slot, stride, column);
      } else {
        elements = source.rope + int64_t(first) * stride + lane_offset(row, stride, column);
      }
      rope[i].load(elements);
    }
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      const auto scale_of = [&](const RowScales& scales) {
        const uint32_t stride = fresh(uint32_t(scales.stride));
        const uint8_t* rows = scales.data + int64_t(first + (WHOLE ? block * kBlock : 0)) * stride;
        return load_global<float>(rows + lane_offset(row_of(KeyScales::key_of(WHOLE ? 0 : block)), stride, 0));
      };
      if constexpr (kKeyScaled) scales.key[block] = scale_of(source.k_scales);
      if constexpr (MLA_V_SCALED_ROWS) scales.value[block] = scale_of(source.v_scales);
      if constexpr (kRopeScaled && MLA_ROPE_KIND == kRopePaged) {
        const uint32_t slot = (uint32_t(source.offset + first) + row_of(KeyScales::key_of(block))) % kPageSize;
        scales.rope[block] = load_global<float>(page_start(source.rope_scales, scale_page[block]) +
                                                lane_offset(slot, uint32_t(source.rope_scales.token_stride), 0));
      } else if constexpr (kRopeScaled) {
        scales.rope[block] = scale_of({source.rope_scales.data, source.rope_scales.token_stride});
      }
    }
    values.fetch<WHOLE>(source.v, first, last);
  }

  // Into one stage of LDS.
  MLA_DEVICE void commit(uint8_t* lds) const {
#pragma unroll
    for (int i = 0; i < kNope; ++i)
      if (has<kNopeChunks>(i)) lds_at<u32x4>(lds, key_place(item(i) / kRowChunks, item(i) % kRowChunks)) = nope[i];
#pragma unroll
    for (int i = 0; i < kRope; ++i)
      if (has<kRopeChunks>(i))
        lds_at<u32x4>(lds, key_place(item(i) / kRopeRowChunks, kRowChunks + item(i) % kRopeRowChunks)) =
            rope[i].operand();
    values.commit(lds);
  }
};
