// One tile of keys on its way from memory to LDS: addresses, registers in flight, LDS layout, fragments for MFMA.
//
// LDS of one stage (byte map; two stages follow each other):
//
//   keys    [kBlockN][kQDepth]   16-bit, row = key: nope columns, then rope columns
//   values  [kVDim][kBlockN]     16-bit, transposed: row = column of V, so that the keys of a sum lie side by side
//
// All fragments are read 16 bytes a lane (ds_read_b128), which the LDS serves eight lanes at a time, 128 bytes from 32
// banks. The eight lanes are either 8i..8i+7 or, by the vendor's notes, two groups of four whose numbers are {0-3, 4-7}
// mod 8; either way they hold eight rows that differ mod 8, all at the same 16-byte chunk. A row of keys is a multiple
// of 128 bytes, so chunk c of row r is stored at chunk c ^ (r % 8): eight rows, eight places. A row of values is 64
// bytes: chunk c ^ (r / 2 % 4). The writes of keys (16 bytes a lane, neighbouring chunks of one row) meet no conflict;
// those of values (8 bytes a lane) at most one.
//
// Key order inside the values: the scores of 16 keys leave MFMA with keys 0-3, 8-11 in lanes 0-31 and 4-7, 12-15 in
// lanes 32-63 (four a register group). A lane's eight keys are stored side by side: block of four keys j lies at block
// (j % 2) * 2 + j / 2.
#pragma once
#include "cdna.hpp"
#include "paged.hpp"
#include "sequence.hpp"

using Element = MLA_ELEMENT;
using RopeElement = MLA_ROPE;  // as Element, or 8 bits with a scale for each key
constexpr bool kRopeScaled = sizeof(RopeElement) == 1;
constexpr int kNopeDim = MLA_NOPE_DIM, kRopeDim = 64, kQDepth = kNopeDim + kRopeDim, kVDim = MLA_V_DIM;
constexpr int kThreads = MLA_THREADS, kWaves = kThreads / kWaveSize;
constexpr int kRowsPerWave = 32;
constexpr int kBlockM = kWaves * kRowsPerWave, kBlockN = 32;  // a wave's scores are one 32 x 32 block
constexpr int kChunkBytes = 16, kElementBytes = 2;

constexpr int kKeyPitch = kQDepth * kElementBytes, kValuePitch = kBlockN * kElementBytes;
constexpr int kKeysBytes = kBlockN * kKeyPitch, kValuesBytes = kVDim * kValuePitch,
              kStageBytes = kKeysBytes + kValuesBytes;
static_assert(sizeof(Element) == kElementBytes, "16-bit elements");
static_assert(kKeyPitch % 128 == 0 && kValuePitch == 64, "what the swizzles assume");

// A row of a tensor [rows, heads, width], width contiguous; strides in bytes.
struct HeadRows {
  const uint8_t* data;
  int64_t token_stride;
  int64_t head_stride;
};

MLA_DEVICE int key_place(int key, int chunk) { return key * kKeyPitch + ((chunk ^ (key & 7)) * kChunkBytes); }
MLA_DEVICE int value_place(int column, int chunk) {
  return kKeysBytes + column * kValuePitch + ((chunk ^ (column >> 1 & 3)) * kChunkBytes);
}

// A lane's own part of its fragments' places. Fragment i of the keys is chunk 2 * i + lane / 32 of row lane % 32: the
// swizzle turns the low three bits of the chunk, so four offsets serve all; two serve the values, whose rows differ by
// multiples of 8.
struct FragmentPlaces {
  int key[4], value[2];

  MLA_DEVICE FragmentPlaces() {
    const int row = lane_id() % 32, half = lane_id() / 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      key[i] = key_place(row, 2 * i + half);
      asm volatile("" : "+v"(key[i]));  // computed once, not where it is used
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      value[i] = value_place(row, 2 * i + half);
      asm volatile("" : "+v"(value[i]));
    }
  }
  MLA_DEVICE int of_keys(int i) const { return key[i % 4] + i / 4 * 8 * kChunkBytes; }
  MLA_DEVICE int of_values(int block, int i) const { return value[i] + block * 32 * kValuePitch; }
};

template <typename T> MLA_DEVICE T& lds_at(uint8_t* lds, int place) { return *reinterpret_cast<T*>(lds + place); }

// Eight elements of rope on their way to LDS. 8-bit ones are exact in 16 bits; their scales are applied to the scores.
template <typename T, bool SCALED = sizeof(T) == 1> struct RopeChunk {
  u32x4 bits;
  MLA_DEVICE void load(const uint8_t* p) { bits = load_global<u32x4>(p); }
  MLA_DEVICE u32x4 widened() const { return bits; }
};
template <typename T> struct RopeChunk<T, true> {
  u32x2 bits;
  MLA_DEVICE void load(const uint8_t* p) { bits = load_global<u32x2>(p); }
  MLA_DEVICE u32x4 widened() const {
    const auto element = [&](int j) {
      return uint32_t(from_float<Element>(to_float(__builtin_bit_cast(T, uint8_t(bits[j / 4] >> j % 4 * 8)))).bits);
    };
    u32x4 result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result[i] = element(2 * i) | element(2 * i + 1) << 16;
    return result;
  }
};

// Where the keys of one (sequence, head) lie. Row strides are below 2^25 bytes (the host sees to it), so that a tile's
// own offsets take 32 bits; what leads to the tile takes 64.
struct KeySource {
  const uint8_t* k;  // first key's nope columns
  const uint8_t* v;  // first key's values
  const uint8_t* rope;  // batched, ragged: first key's rope
  uint32_t k_stride, v_stride, rope_stride;
  PagedRows rope_rows;  // paged
  PagedRows scale_rows;  // of an 8-bit rope: paged; else `data` is the first key's
  const int* rope_pages;  // paged: pages of the sequence
  int offset;  // paged: position of the first key
  int n_keys;  // > 0
};

// Registers of one thread: its share of a tile. Rows at or past n_keys repeat the last key: finite, and hidden later,
// so that nothing of what lies there is read.
struct TileRegisters {
  static constexpr int kRowChunks = kNopeDim / 8, kRopeRowChunks = kRopeDim / 8;
  static constexpr int kNopeChunks = kBlockN * kRowChunks, kRopeChunks = kBlockN * kRopeRowChunks;
  static constexpr int kValueBlocks = (kBlockN / 4) * (kVDim / 2);  // of 4 keys and 2 columns
  static constexpr int kNope = ceil_div(kNopeChunks, kThreads), kRope = ceil_div(kRopeChunks, kThreads);
  static constexpr int kValue = kValueBlocks / kThreads;
  static_assert(kNopeChunks % kThreads == 0 && kValueBlocks % kThreads == 0, "equal shares");
  static_assert(kRopeChunks % kThreads == 0 || kThreads % kRopeChunks == 0, "equal shares, or whole waves without one");

  u32x4 nope[kNope];
  RopeChunk<RopeElement> rope[kRope];
  uint32_t value[kValue][4];
  int page[kRope];  // of the rope rows of the tile after this one
  float scale;  // of an 8-bit rope: the scale of key lane % kBlockN
  int scale_page;  // and its page

  MLA_DEVICE static int item(int i) { return thread_id() + i * kThreads; }
  MLA_DEVICE static bool has_rope() { return kRopeChunks >= kThreads || wave_id() * kWaveSize < kRopeChunks; }

  // Value block i: neighbouring lanes take the two key blocks that share a 16-byte chunk.
  struct ValueBlock { int first_key, column, chunk, half; };
  MLA_DEVICE static ValueBlock value_block(int i) {
    const int half = item(i) & 1, pair = (item(i) >> 1) % (kVDim / 2), chunk = (item(i) >> 1) / (kVDim / 2);
    return {(chunk / 2) * 16 + (chunk % 2 + 2 * half) * 4, 2 * pair, chunk, half};
  }

  // Page ids of tile `tile`, ahead of `fetch`.
  MLA_DEVICE void fetch_pages(const KeySource& source, int tile) {
    if constexpr (MLA_ROPE_KIND == kRopePaged) {
      if constexpr (kRopeScaled) {
        const int key = smaller(tile * kBlockN + lane_id() % kBlockN, source.n_keys - 1);
        scale_page = source.rope_pages[uint32_t(source.offset + key) / kPageSize];
      }
      if (!has_rope()) return;
#pragma unroll
      for (int i = 0; i < kRope; ++i) {
        const int key = smaller(tile * kBlockN + item(i) / kRopeRowChunks, source.n_keys - 1);
        page[i] = source.rope_pages[uint32_t(source.offset + key) / kPageSize];
      }
    }
  }

  MLA_DEVICE void fetch(const KeySource& source, int tile) {
    if ((tile + 1) * kBlockN <= source.n_keys)
      fetch_rows<true>(source, tile);
    else
      fetch_rows<false>(source, tile);
  }

  // WHOLE: all keys of the tile count. The lanes' offsets then are the same for every tile.
  template <bool WHOLE> MLA_DEVICE void fetch_rows(const KeySource& source, int tile) {
    const int first = tile * kBlockN, last = source.n_keys - 1 - first;
    const auto row_of = [&](int row) { return uint32_t(WHOLE ? row : smaller(row, last)); };
    const uint8_t* k = source.k + int64_t(first) * source.k_stride;
#pragma unroll
    for (int i = 0; i < kNope; ++i)
      nope[i] =
          load_global<u32x4>(k + (row_of(item(i) / kRowChunks) * source.k_stride + item(i) % kRowChunks * kChunkBytes));
    if (has_rope()) {
#pragma unroll
      for (int i = 0; i < kRope; ++i) {
        const uint32_t row = row_of(item(i) / kRopeRowChunks), chunk = item(i) % kRopeRowChunks;
        const uint32_t column = chunk * 8 * sizeof(RopeElement), stride = source.rope_stride;
        const uint8_t* elements;
        if constexpr (MLA_ROPE_KIND == kRopePaged) {
          const uint32_t slot = (uint32_t(source.offset + first) + row) % kPageSize;
          elements = source.rope_rows.data + page[i] * source.rope_rows.page_stride + (slot * stride + column);
        } else {
          elements = source.rope + int64_t(first) * stride + (row * stride + column);
        }
        rope[i].load(elements);
      }
    }
    if constexpr (kRopeScaled) {
      const int key = first + int(row_of(lane_id() % kBlockN));
      const uint8_t* row = MLA_ROPE_KIND == kRopePaged
                               ? token_row(source.scale_rows, scale_page, uint32_t(source.offset + key) % kPageSize)
                               : source.scale_rows.data + key * source.scale_rows.token_stride;
      scale = load_global<float>(row);
    }
    const uint8_t* v = source.v + int64_t(first) * source.v_stride;
#pragma unroll
    for (int i = 0; i < kValue; ++i) {
      const ValueBlock block = value_block(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t column = block.column * kElementBytes;
        if constexpr (WHOLE)
          value[i][j] =
              load_global<uint32_t>(v + int64_t(j) * source.v_stride + (block.first_key * source.v_stride + column));
        else
          value[i][j] = load_global<uint32_t>(v + (row_of(block.first_key + j) * source.v_stride + column));
      }
    }
  }

  // Into one stage of LDS.
  MLA_DEVICE void commit(uint8_t* lds) const {
#pragma unroll
    for (int i = 0; i < kNope; ++i) lds_at<u32x4>(lds, key_place(item(i) / kRowChunks, item(i) % kRowChunks)) = nope[i];
    if (has_rope()) {
#pragma unroll
      for (int i = 0; i < kRope; ++i)
        lds_at<u32x4>(lds, key_place(item(i) / kRopeRowChunks, kRowChunks + item(i) % kRopeRowChunks)) =
            rope[i].widened();
    }
    constexpr uint32_t kLow = 0x05040100, kHigh = 0x07060302;  // both low halves, both high halves
#pragma unroll
    for (int i = 0; i < kValue; ++i) {
      const ValueBlock block = value_block(i);
      const auto& v = value[i];
      lds_at<u32x2>(lds, value_place(block.column, block.chunk) + 8 * block.half) =
          u32x2{__builtin_amdgcn_perm(v[1], v[0], kLow), __builtin_amdgcn_perm(v[3], v[2], kLow)};
      lds_at<u32x2>(lds, value_place(block.column + 1, block.chunk) + 8 * block.half) =
          u32x2{__builtin_amdgcn_perm(v[1], v[0], kHigh), __builtin_amdgcn_perm(v[3], v[2], kHigh)};
    }
  }
};
