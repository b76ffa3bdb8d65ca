// Quantise: rows to e4m3 with a scale for each block of g columns, with one for each token (g = 0), or with given scales.
//
//   scale = max(amax / 448, 2^-126),  stored = round(x / scale), saturating
//
// What shares a scale is a unit. 8, 16 or 32 lanes hold a block of 64, 128 or 576 columns in registers; a token takes a block of
// threads, which reads it twice, the second time out of the caches. With given scales it is read once.
//
// Budget: bf16 in, 3 bytes an element: 0.71 ns for 1,000 of them at a copy's 4.24 TB/s (H200).

#include "chunk.cuh"

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
constexpr int kWarps = MLA_THREADS / 32;
constexpr int kLanes = kGranularity == 64 ? 8 : kGranularity == 128 ? 16 : kGranularity == 576 ? 32 : MLA_THREADS;
constexpr int kUnits = MLA_THREADS / kLanes;  // of a block of threads
// Chunks of a lane in flight.
constexpr int kAhead = kGranularity == 0 ? 4 : ceil_div(kGranularity, kLanes* kChunk);
static_assert(kGranularity == 0 || kGranularity == 64 || kGranularity == 128 || kGranularity == 576, "blocks of lanes");
static_assert(!kStatic || kGranularity == 0, "given scales are a head's or a token's");

template <typename T> MLA_DEVICE T* row_of(const HeadRows& rows, int64_t token, int head) {
  return reinterpret_cast<T*>(rows.data + token * rows.token_stride + head * rows.head_stride);
}

struct Unit {
  int64_t token;
  int head;  // of its first column
  int block;  // of columns in the head
  int chunks;  // 0: past the end
};

MLA_DEVICE Unit find_unit(const QuantizeParams& p) {
  const int64_t index = int64_t(blockIdx.x) * kUnits + threadIdx.x / kLanes;
  if constexpr (kGranularity == 0) {
    return {index, 0, 0, p.heads * (p.width / kChunk)};
  } else {
    const int blocks = ceil_div(p.width, kGranularity);
    const int64_t row = index / blocks, token = row / p.heads;
    const int block = int(index - row * blocks), rest = p.width - block * kGranularity;
    const int columns = rest < kGranularity ? rest : kGranularity;
    return {token, int(row - token * p.heads), block, token < p.tokens ? columns / kChunk : 0};
  }
}

struct ChunkPlace {
  int head;
  int column;
};

MLA_DEVICE ChunkPlace place_of(const QuantizeParams& p, const Unit& unit, int chunk) {
  if constexpr (kGranularity == 0) {
    const unsigned per_head = unsigned(p.width) / kChunk, head = unsigned(chunk) / per_head;
    return {int(head), int(unsigned(chunk) - head * per_head) * kChunk};
  } else {
    return {unit.head, unit.block * kGranularity + chunk * kChunk};
  }
}

// kAhead chunks, kLanes apart; zeros past the end of the unit.
MLA_DEVICE void load_tile(Chunk<Source> (&tile)[kAhead], const QuantizeParams& p, const Unit& unit, int first) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    tile[j] = {};
    if (first + j * kLanes >= unit.chunks) continue;
    const ChunkPlace place = place_of(p, unit, first + j * kLanes);
    tile[j] = load_chunk(row_of<const Source>(p.x, unit.token, place.head) + place.column);
  }
}

MLA_DEVICE float tile_amax(const Chunk<Source> (&tile)[kAhead], float amax) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    float x[kChunk];
    unpack_chunk(tile[j], x);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) amax = fmaxf(amax, fabsf(x[i]));
  }
  return amax;
}

// `warps` is shared memory for a maximum of each warp, where a unit has several.
MLA_DEVICE float scale_of_unit(float amax, float* warps) {
#pragma unroll
  for (int d = (kLanes < 32 ? kLanes : 32) / 2; d > 0; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffff, amax, d));
  if constexpr (kLanes > 32) {
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) amax = fmaxf(amax, warps[i]);
  }
  return fmaxf(Divisor(kE4m3Max, amax).divide(amax), 0x1p-126f);
}

// Given scales may make a quotient infinite, whose correction would be NaN: what is far out of range is brought near first.
MLA_DEVICE Chunk<float> near_range(const Chunk<Source>& c, float scale) {
  const float most = 2.0f * kE4m3Max * scale;
  float x[kChunk];
  unpack_chunk(c, x);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = fabsf(x[i]) > most ? copysignf(most, x[i]) : x[i];
  return pack_chunk<float>(x);
}

MLA_DEVICE void store_tile(const Chunk<Source> (&tile)[kAhead], const QuantizeParams& p, const Unit& unit, int first,
                           float scale) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    if (first + j * kLanes >= unit.chunks) continue;
    const ChunkPlace place = place_of(p, unit, first + j * kLanes);
    Output* target = row_of<Output>(p.output, unit.token, place.head) + place.column;
    if constexpr (kStatic) {
      const float given = *row_of<const float>(p.scale, unit.token, place.head);
      store_chunk(target, quantize_chunk<Output>(near_range(tile[j], given), given));
    } else {
      store_chunk(target, quantize_chunk<Output>(tile[j], scale));
    }
  }
}

extern "C" __global__ void __launch_bounds__(MLA_THREADS) mla_quantize(const __grid_constant__ QuantizeParams p) {
  extern __shared__ uint8_t dynamic[];
  const Unit unit = find_unit(p);
  const int lane = threadIdx.x % kLanes;
  Chunk<Source> tile[kAhead];
  float scale = 1.0f;
  if constexpr (!kStatic) {
    float amax = 0.0f;
    for (int i = lane; i < unit.chunks; i += kLanes * kAhead) {
      load_tile(tile, p, unit, i);
      amax = tile_amax(tile, amax);
    }
    scale = scale_of_unit(amax, reinterpret_cast<float*>(dynamic));
    if (lane == 0 && unit.chunks != 0) row_of<float>(p.scale, unit.token, unit.head)[unit.block] = scale;
  }
  for (int i = lane; i < unit.chunks; i += kLanes * kAhead) {
    if constexpr (kGranularity == 0) load_tile(tile, p, unit, i);
    store_tile(tile, p, unit, i, scale);
  }
}
