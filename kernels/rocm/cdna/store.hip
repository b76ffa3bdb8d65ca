// Store: this step's rows behind the cached ones; row i of sequence s goes to position cached[s] + i.
//
// Unquantised, a row is copied. Quantised in blocks of g columns of the 576-wide row (of the 512 latent ones when the
// rope stays 16-bit):  scale = max(amax / largest, 2^-126),  stored = round(x / scale), saturating.
//
// One wave stores a row, 8 elements a lane: the latent on all lanes, the rope on lanes 0-7. A block of columns lies in
// g / 8 neighbouring lanes, or in the whole row (g = 576).
//
// Budget: bf16 in and out, 2,304 bytes a row: 0.43 ns at the 5.3 TB/s of MI300X's HBM. Never run on AMD hardware yet.

#include "chunk.hpp"
#include "paged.hpp"
#include "ragged.hpp"
#include "wave.hpp"

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
constexpr int kRopeLanes = 64 / kChunk;
constexpr int kGranularity = MLA_GRANULARITY;  // 0: not quantised
constexpr bool kRopeScaled = kGranularity != 0 && sizeof(Rope) == 1;
constexpr int kWaves = MLA_THREADS / kWaveSize;
static_assert(kGranularity == 0 || kGranularity == 64 || kGranularity == 128 || kGranularity == 576, "blocks of lanes");
// Lanes that share a scale; a row-wide block takes all.
constexpr int kScaleLanes = kGranularity == 64 ? 8 : kGranularity == 128 ? 16 : kWaveSize;

MLA_DEVICE float chunk_amax(const Chunk<Source>& c) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) amax = maximum(amax, absolute(to_float(c.v[i])));
  return amax;
}

MLA_DEVICE float scale_of_block(float amax) {
#pragma unroll
  for (int d = kScaleLanes / 2; d > 0; d /= 2) amax = maximum(amax, shuffle(amax, lane_id() ^ d));
  return maximum(amax / kLargest<Latent>, 0x1p-126f);
}

// The destination of one row: the three parts of its token.
struct TokenRow {
  uint8_t* latent;
  uint8_t* rope;
  float* scales;
};

MLA_DEVICE TokenRow find_token(const StoreParams& p, int row) {
  const int s = sequence_of([&](int b) { return p.row_offsets[b]; }, p.batch_size, row);
  const int first = p.row_offsets[s];
  const int cached = p.lengths[s] - (p.lengths_include_new ? p.row_offsets[s + 1] - first : 0);
  const int position = cached + row - first;
  const int page = page_row(p.table, s)[position / kPageSize];
  const int slot = position % kPageSize;
  const auto part = [&](const PagedRows& rows) { return const_cast<uint8_t*>(token_row(rows, page, slot)); };
  return {part(p.latent), part(p.rope), kGranularity != 0 ? reinterpret_cast<float*>(part(p.scales)) : nullptr};
}

// The scales of this lane's chunks, written to the token by the first lane of each block.
struct RowScales {
  float latent;
  float rope;
};

// Lanes without a rope chunk hold zeros there, which change no maximum.
MLA_DEVICE RowScales quantize_scales(float* scales, const Chunk<Source>& latent, const Chunk<Source>& rope) {
  const int lane = lane_id();
  RowScales result;
  if constexpr (kGranularity == 576) {
    const float amax = kRopeScaled ? maximum(chunk_amax(latent), chunk_amax(rope)) : chunk_amax(latent);
    result.latent = result.rope = scale_of_block(amax);
    if (lane == 0) scales[0] = result.latent;
  } else {
    result.latent = scale_of_block(chunk_amax(latent));
    if (lane % kScaleLanes == 0) scales[lane / kScaleLanes] = result.latent;
    result.rope = 1.0f;
    if constexpr (kRopeScaled) {
      result.rope = scale_of_block(chunk_amax(rope));
      if (lane == 0) scales[kWaveSize / kScaleLanes] = result.rope;
    }
  }
  return result;
}

extern "C" __global__ void MLA_WORKGROUP(MLA_THREADS) mla_store(StoreParams p) {
  const int lane = lane_id(), column = lane * kChunk;
  const int64_t row = int64_t(workgroup_x()) * kWaves + wave_id();
  if (row >= p.rows || row < p.row_offsets[0] || row >= p.row_offsets[p.batch_size]) return;
  const TokenRow token = find_token(p, int(row));

  const Chunk<Source> latent = load_chunk<Source>(p.latent_source + row * p.latent_stride + column * sizeof(Source));
  Chunk<Source> rope = zero_chunk<Source>();
  if (lane < kRopeLanes) rope = load_chunk<Source>(p.rope_source + row * p.rope_stride + column * sizeof(Source));

  RowScales scales = {1.0f, 1.0f};
  if constexpr (kGranularity != 0) scales = quantize_scales(token.scales, latent, rope);
  store_chunk(token.latent + column * sizeof(Latent), quantize_chunk<Latent>(latent, scales.latent));
  if (lane < kRopeLanes) store_chunk(token.rope + column * sizeof(Rope), quantize_chunk<Rope>(rope, scales.rope));
}
