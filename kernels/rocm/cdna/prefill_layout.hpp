// Shape of a prefill tile, and where its keys and values lie in LDS.
//
// LDS of one stage (byte map; two stages follow each other):
//
//   keys    [kBlockN][kKeyPitch]    row = key: nope columns, then rope columns
//   values  [kVDim][kValuePitch]    transposed: row = column of V, so that the keys of a sum lie side by side
//
// All fragments are read 16 bytes a lane (ds_read_b128), which the LDS serves eight lanes at a time, 128 bytes from 32
// banks. The eight lanes are either 8i..8i+7 or, by the vendor's notes, two groups of four whose numbers are {0-3, 4-7}
// mod 8; either way they hold eight rows that differ mod 8, all at the same 16-byte chunk. Where a row is a multiple of
// 128 bytes, chunk c of row r is stored at chunk c ^ (r % 8): eight rows, eight places. Rows of 64 bytes more already
// alternate between two halves, so c ^ (r / 2 % 4); rows of 32 bytes lie in four places: c ^ (r / 4 % 2). The writes of
// keys (16 bytes a lane, neighbouring chunks of a row) meet no conflict but where rows of 12 and 4 chunks share eight lanes
// (256 columns of 8 bits); those of values (8 bytes a lane) at most one.
//
// Key order inside the values: scores leave MFMA with keys 8i..8i+3 in lanes 0-31 and 8i+4..8i+7 in lanes 32-63 (four a
// register group). The keys of a lane lie side by side: an even chunk has those of lanes 0-31, the odd one after it
// those of lanes 32-63, together 32 bytes of keys.
#pragma once
#include "cdna.hpp"

using Element = MLA_ELEMENT;  // of q, k and v
using RopeElement = MLA_ROPE;  // as Element; or 8 bits with a scale for each key; or 16 bits beside an 8-bit Element
constexpr bool kKeyScaled = sizeof(Element) == 1, kRopeScaled = sizeof(RopeElement) == 1;
constexpr bool kRopeWidened = kRopeScaled && !kKeyScaled;  // exact in 16 bits
template <bool WIDENED> struct RopeOperandOf { using type = RopeElement; };
template <> struct RopeOperandOf<true> { using type = Element; };
using RopeOperand = RopeOperandOf<kRopeWidened>::type;  // the rope as MFMA takes it

constexpr int kNopeDim = MLA_NOPE_DIM, kRopeDim = 64, kVDim = MLA_V_DIM;
constexpr int kThreads = MLA_THREADS, kWaves = kThreads / kWaveSize;
constexpr int kRowsPerWave = 32, kBlock = 32;  // a wave's scores are blocks of 32 keys and 32 queries
constexpr int kBlockM = kWaves * kRowsPerWave, kBlockN = MLA_BLOCK_N, kKeyBlocks = kBlockN / kBlock;
constexpr int kChunkBytes = 16, kFragmentBytes = 2 * kChunkBytes;  // a fragment: 16 bytes of each half of the lanes

constexpr int kNopeBytes = kNopeDim * sizeof(Element), kRopeBytes = kRopeDim * sizeof(RopeOperand);
constexpr int kKeyPitch = kNopeBytes + kRopeBytes, kValuePitch = kBlockN * sizeof(Element);
constexpr int kKeysBytes = kBlockN * kKeyPitch, kValuesBytes = kVDim * kValuePitch,
              kStageBytes = kKeysBytes + kValuesBytes;
constexpr int kNopeFragments = kNopeBytes / kFragmentBytes, kRopeFragments = kRopeBytes / kFragmentBytes,
              kKeyFragments = kNopeFragments + kRopeFragments, kValueFragments = kValuePitch / kFragmentBytes;
constexpr bool kWholeBankRows = kKeyPitch % 128 == 0;
static_assert(kKeyPitch % 64 == 0 && (kValuePitch == 64 || kValuePitch == 32), "what the swizzles assume");

MLA_DEVICE int key_place(int key, int chunk) {
  return key * kKeyPitch + (chunk ^ (kWholeBankRows ? key & 7 : key >> 1 & 3)) * kChunkBytes;
}
MLA_DEVICE int value_place(int column, int chunk) {
  return kKeysBytes + column * kValuePitch +
         (chunk ^ (kValuePitch == 64 ? column >> 1 & 3 : column >> 2 & 1)) * kChunkBytes;
}

template <typename T> MLA_DEVICE T& lds_at(uint8_t* lds, int place) { return *reinterpret_cast<T*>(lds + place); }

// row * stride + column, all below 2^24 (a quarter of the time of a 32-bit product), as an operand of the load that uses it:
// its 64-bit form, worked out ahead of the loop, would take two registers and an addition.
MLA_DEVICE uint32_t lane_offset(uint32_t row, uint32_t stride, uint32_t column) {
  uint32_t bytes = (row & 0xffffff) * (stride & 0xffffff) + column;
  asm volatile("" : "+v"(bytes));
  return bytes;
}

// A number that is the same for all lanes; what follows from it is worked out where it is used, by the scalar unit, and
// takes no registers outside of there.
MLA_DEVICE uint32_t fresh(uint32_t x) {
  asm volatile("" : "+s"(x));
  return x;
}

// Key of score register r in its block, less the lane's own part.
MLA_DEVICE constexpr int register_key(int r) { return r / 4 * 8 + r % 4; }
MLA_DEVICE int lane_key() { return lane_id() / 32 * 4; }

// A lane's own part of its fragments' places. Fragment i of the keys is chunk 2 * i + lane / 32 of row lane % 32: the
// swizzle turns the low two or three bits of the chunk, so a few offsets serve all, and those of the values, whose rows
// differ by multiples of 8.
struct FragmentPlaces {
  static constexpr int kKeyPlaces = kWholeBankRows ? 4 : 2;
  int key[kKeyPlaces], value[kValueFragments];

  MLA_DEVICE FragmentPlaces() {
    const int row = lane_id() % 32, half = lane_id() / 32;
#pragma unroll
    for (int i = 0; i < kKeyPlaces; ++i) {
      key[i] = key_place(row, 2 * i + half);
      asm volatile("" : "+v"(key[i]));  // computed once, not where it is used
    }
#pragma unroll
    for (int i = 0; i < kValueFragments; ++i) {
      value[i] = value_place(row, 2 * i + half);
      asm volatile("" : "+v"(value[i]));
    }
  }
  MLA_DEVICE int of_keys(int i, int block) const {
    return key[i % kKeyPlaces] + i / kKeyPlaces * kKeyPlaces * kFragmentBytes + block * kBlock * kKeyPitch;
  }
  MLA_DEVICE int of_values(int i, int block) const { return value[i] + block * 32 * kValuePitch; }
};
