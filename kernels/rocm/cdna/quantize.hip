// Quantise: rows to fp8 with a scale for each block of g columns, with one for each token (g = 0), or with given scales.
//
//   scale = max(amax / largest, 2^-126),  stored = round(x / scale), saturating
//
// What shares a scale is a unit. 8, 16 or 64 lanes hold a block of 64, 128 or 576 columns in registers; a token takes a
// workgroup, which reads it twice, the second time out of the caches. With given scales it is read once.
//
// Budget: bf16 in, 3 bytes an element: 0.57 ns for 1,000 of them at the 5.3 TB/s of MI300X's HBM. Never run on AMD
// hardware yet.

#include "chunk.hpp"
#include "wave.hpp"

// [T, H, ...], strides in bytes; those of scales that are shared are 0.
struct HeadRows {
  uint8_t* data;
  int64_t token_stride;
  int64_t head_stride;
};

struct QuantizeParams {
  HeadRows x;
  HeadRows output;
  HeadRows scale;
  int tokens;
  int heads;
  int width;  // of a head, a multiple of 8
};

using Source = MLA_SOURCE;
using Output = MLA_OUTPUT;
constexpr int kGranularity = MLA_GRANULARITY;
constexpr bool kStatic = MLA_STATIC_SCALE;
constexpr int kWaves = MLA_THREADS / kWaveSize;
constexpr int kLanes = kGranularity == 64    ? 8
                       : kGranularity == 128 ? 16
                       : kGranularity == 576 ? kWaveSize
                                             : MLA_THREADS;
constexpr int kUnits = MLA_THREADS / kLanes;  // of a workgroup
// Chunks of a lane in flight, all of a block's.
constexpr int kAhead = kGranularity == 0 ? 4 : (kGranularity + kLanes * kChunk - 1) / (kLanes * kChunk);
static_assert(kGranularity == 0 || kGranularity == 64 || kGranularity == 128 || kGranularity == 576, "blocks of lanes");
static_assert(!kStatic || kGranularity == 0, "given scales are a head's or a token's");

MLA_DEVICE uint8_t* row_of(const HeadRows& rows, int64_t token, int head) {
  return rows.data + token * rows.token_stride + head * rows.head_stride;
}

struct Unit {
  int64_t token;
  int head;  // of its first column
  int block;  // of columns in the head
  int chunks;  // 0: past the end
};

MLA_DEVICE Unit find_unit(const QuantizeParams& p) {
  if constexpr (kGranularity == 0) {
    return {workgroup_x(), 0, 0, p.heads * (p.width / kChunk)};
  } else {
    const int64_t index = int64_t(workgroup_x()) * kUnits + thread_id() / kLanes;
    const int blocks = ceil_div(p.width, kGranularity);
    const int64_t row = index / blocks, token = row / p.heads;
    const int block = int(index - row * blocks);
    const int columns = smaller(p.width - block * kGranularity, kGranularity);
    return {token, int(row - token * p.heads), block, token < p.tokens ? columns / kChunk : 0};
  }
}

struct ChunkPlace {
  int head;
  int column;
};

MLA_DEVICE ChunkPlace place_of(const QuantizeParams& p, const Unit& unit, int chunk) {
  if constexpr (kGranularity == 0) {
    const uint32_t per_head = uint32_t(p.width) / kChunk, head = uint32_t(chunk) / per_head;
    return {int(head), int(uint32_t(chunk) - head * per_head) * kChunk};
  } else {
    return {unit.head, unit.block * kGranularity + chunk * kChunk};
  }
}

// kAhead chunks, kLanes apart; zeros past the end of the unit.
MLA_DEVICE void load_tile(Chunk<Source> (&tile)[kAhead], const QuantizeParams& p, const Unit& unit, int first) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    tile[j] = zero_chunk<Source>();
    if (first + j * kLanes >= unit.chunks) continue;
    const ChunkPlace place = place_of(p, unit, first + j * kLanes);
    tile[j] = load_chunk<Source>(row_of(p.x, unit.token, place.head) + place.column * sizeof(Source));
  }
}

MLA_DEVICE float tile_amax(const Chunk<Source> (&tile)[kAhead], float amax) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j)
#pragma unroll
    for (int i = 0; i < kChunk; ++i) amax = maximum(amax, absolute(to_float(tile[j].v[i])));
  return amax;
}

MLA_DEVICE float scale_of_unit(float amax) {
#pragma unroll
  for (int d = (kLanes < kWaveSize ? kLanes : kWaveSize) / 2; d > 0; d /= 2)
    amax = maximum(amax, shuffle(amax, lane_id() ^ d));
  if constexpr (kLanes > kWaveSize) {
    __shared__ float waves[kWaves];
    if (lane_id() == 0) waves[wave_id()] = amax;
    barrier();
#pragma unroll
    for (int i = 0; i < kWaves; ++i) amax = maximum(amax, waves[i]);
  }
  return maximum(amax / kLargest<Output>, 0x1p-126f);
}

MLA_DEVICE void store_tile(const Chunk<Source> (&tile)[kAhead], const QuantizeParams& p, const Unit& unit, int first,
                           float scale) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    if (first + j * kLanes >= unit.chunks) continue;
    const ChunkPlace place = place_of(p, unit, first + j * kLanes);
    if constexpr (kStatic) scale = load_global<float>(row_of(p.scale, unit.token, place.head));
    store_chunk(row_of(p.output, unit.token, place.head) + place.column, quantize_chunk<Output>(tile[j], scale));
  }
}

extern "C" __global__ void MLA_WORKGROUP(MLA_THREADS) mla_quantize(QuantizeParams p) {
  const Unit unit = find_unit(p);
  const int lane = thread_id() % kLanes;
  Chunk<Source> tile[kAhead];
  float scale = 1.0f;
  if constexpr (!kStatic) {
    float amax = 0.0f;
    for (int i = lane; i < unit.chunks; i += kLanes * kAhead) {
      load_tile(tile, p, unit, i);
      amax = tile_amax(tile, amax);
    }
    scale = scale_of_unit(amax);
    if (lane == 0 && unit.chunks != 0)
      store_global(row_of(p.scale, unit.token, unit.head) + unit.block * sizeof(float), scale);
  }
  for (int i = lane; i < unit.chunks; i += kLanes * kAhead) {
    if constexpr (kGranularity == 0) load_tile(tile, p, unit, i);
    store_tile(tile, p, unit, i, scale);
  }
}
