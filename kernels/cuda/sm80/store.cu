// Store: this step's rows behind the cached ones; row i of sequence s goes to position cached[s] + i.
//
// Unquantised, a row is copied. Quantised in blocks of g columns of the 576-wide row (of the 512 latent ones when the rope stays
// 16-bit):  scale = max(amax / 448, 2^-126),  stored = round(x / scale), saturating.
//
// One warp stores kRows rows: lane i < kRows finds the place of row i (binary search in row_offsets, page table), the warp then has
// all their bytes in flight at once. A row is 8 elements a lane: two sweeps of the latent, one of the rope on lanes 0-7. A block
// of columns lies in g / 8 neighbouring lanes of one sweep, or in the whole row (g = 576).
//
// Budget: bf16 in and out, 2,304 bytes a row; at a copy's 4.24 TB/s (H200) 0.54 ns a row.

#include "chunk.cuh"
#include "paged.cuh"
#include "ragged.cuh"

struct StoreParams {
  PagedRows latent;
  PagedRows rope;
  PagedRows scales;  // data null: the cache is not quantised
  PageTable table;
  const int* row_offsets;  // [B+1], cumulative new tokens
  const int* lengths;  // [B]
  const uint8_t* latent_source;  // [T, 512]
  const uint8_t* rope_source;  // [T, 64]
  int64_t latent_stride;  // in bytes
  int64_t rope_stride;
  int lengths_include_new;
  int batch_size;
  int rows;  // T
};

using Source = MLA_SOURCE;  // element of the step's rows
using Latent = MLA_LATENT;  // element of the cache's latent
using Rope = MLA_ROPE;  // and of its rope
constexpr int kSweeps = 512 / (32 * kChunk);
constexpr int kRopeLanes = 64 / kChunk;
constexpr int kGranularity = MLA_GRANULARITY;  // 0: not quantised
constexpr bool kRopeScaled = kGranularity != 0 && sizeof(Rope) == 1;
constexpr int kWarps = MLA_THREADS / 32;
constexpr int kRows = MLA_ROWS;
static_assert(kRows >= 1 && kRows <= 32, "a lane finds a row");
static_assert(kGranularity == 0 || kGranularity == 64 || kGranularity == 128 || kGranularity == 576, "blocks of lanes");
// Lanes that share a scale; a row-wide block takes all.
constexpr int kScaleLanes = kGranularity == 64 ? 8 : kGranularity == 128 ? 16 : 32;

MLA_DEVICE float chunk_amax(const Chunk<Source>& c) {
  float x[kChunk], amax = 0.0f;
  unpack_chunk(c, x);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) amax = fmaxf(amax, fabsf(x[i]));
  return amax;
}

MLA_DEVICE float scale_of_block(float amax) {
#pragma unroll
  for (int d = kScaleLanes / 2; d > 0; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffff, amax, d));
  return fmaxf(Divisor(kE4m3Max, amax).divide(amax), 0x1p-126f);
}

// The cache row that a row of the step goes to.
MLA_DEVICE Place find_row(const StoreParams& p, int row) {
  if (row < p.row_offsets[0] || row >= p.row_offsets[p.batch_size]) return {-1, 0};
  const int s = sequence_of_row(p.row_offsets, p.batch_size, row);
  const int first = p.row_offsets[s];
  const int cached = p.lengths[s] - (p.lengths_include_new ? p.row_offsets[s + 1] - first : 0);
  return place_of_token(p.table, s, cached + row - first);
}

template <typename T> MLA_DEVICE T* part_of(const PagedRows& rows, const Place& place) {
  return reinterpret_cast<T*>(const_cast<uint8_t*>(token_row(rows, place)));
}

// The scales of this lane's chunks, written to the token by the first lane of each block.
struct RowScales {
  float latent[kSweeps];
  float rope;
};

// Lanes without a rope chunk hold zeros there, which change no maximum.
MLA_DEVICE RowScales quantize_scales(float* scales, const Chunk<Source> (&latent)[kSweeps], const Chunk<Source>& rope) {
  const int lane = threadIdx.x % 32;
  RowScales result;
  if constexpr (kGranularity == 576) {
    float amax = kRopeScaled ? chunk_amax(rope) : 0.0f;
#pragma unroll
    for (int j = 0; j < kSweeps; ++j) amax = fmaxf(amax, chunk_amax(latent[j]));
    result.rope = scale_of_block(amax);
#pragma unroll
    for (int j = 0; j < kSweeps; ++j) result.latent[j] = result.rope;
    if (lane == 0) scales[0] = result.rope;
  } else {
#pragma unroll
    for (int j = 0; j < kSweeps; ++j) {
      result.latent[j] = scale_of_block(chunk_amax(latent[j]));
      if (lane % kScaleLanes == 0) scales[(j * 32 + lane) / kScaleLanes] = result.latent[j];
    }
    result.rope = 1.0f;
    if constexpr (kRopeScaled) {
      result.rope = scale_of_block(chunk_amax(rope));
      if (lane == 0) scales[kSweeps * 32 / kScaleLanes] = result.rope;
    }
  }
  return result;
}

extern "C" __global__ void __launch_bounds__(MLA_THREADS, 2) mla_store(const __grid_constant__ StoreParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (int64_t(blockIdx.x) * kWarps + threadIdx.x / 32) * kRows;
  Place target = {-1, 0};
  if (lane < kRows && first + lane < p.rows) target = find_row(p, int(first) + lane);

  Chunk<Source> latent[kRows][kSweeps], rope[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    rope[i] = {};
    if (first + i < p.rows) {
      const Source* latent_source = reinterpret_cast<const Source*>(p.latent_source + (first + i) * p.latent_stride);
      const Source* rope_source = reinterpret_cast<const Source*>(p.rope_source + (first + i) * p.rope_stride);
#pragma unroll
      for (int j = 0; j < kSweeps; ++j) latent[i][j] = load_chunk_nc(latent_source + (j * 32 + lane) * kChunk);
      if (lane < kRopeLanes) rope[i] = load_chunk_nc(rope_source + lane * kChunk);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Place place = shuffle_place(target, i);
    if (place.page >= 0) {
      RowScales scales = {};
      if constexpr (kGranularity != 0) scales = quantize_scales(part_of<float>(p.scales, place), latent[i], rope[i]);
      Latent* latent_row = part_of<Latent>(p.latent, place);
      Rope* rope_row = part_of<Rope>(p.rope, place);
#pragma unroll
      for (int j = 0; j < kSweeps; ++j)
        store_chunk(latent_row + (j * 32 + lane) * kChunk, quantize_chunk<Latent>(latent[i][j], scales.latent[j]));
      if (lane < kRopeLanes) store_chunk(rope_row + lane * kChunk, quantize_chunk<Rope>(rope[i], scales.rope));
    }
  }
}
