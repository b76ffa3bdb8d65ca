// Gather: rows [0, length) of the latent buffer [N, 512] out of the pages, dequantised where the cache has scales.
//
//   row r of sequence s (row_offsets[s] <= r < row_offsets[s+1]) = cache row at position r - row_offsets[s] + cache_offsets[s]
//   rows outside [row_offsets[0], row_offsets[B]) = 0
//
// One wave copies kRows rows, 8 elements a lane: lane i < kRows finds the source of row i (bisection of row_offsets,
// page table), the wave then has all their bytes in flight at once.
//
// Budget: bf16, a row reads 1,024 bytes and writes as many: 0.39 ns a row at the 5.3 TB/s of MI300X's HBM. Never run on
// AMD hardware yet.

#include "chunk.hpp"
#include "paged.hpp"
#include "ragged.hpp"
#include "wave.hpp"

struct GatherParams {
  PagedRows latent;
  PagedRows scales;  // data null: the cache is not quantised
  PageTable table;
  const int* row_offsets;  // [B+1]
  const int* cache_offsets;  // [B]
  const int* length;  // rows to write, on the device; null: `rows`
  uint8_t* output;  // [N, 512]
  int64_t output_stride;  // in bytes
  int batch_size;
  int rows;  // rows to write, or the most there can be
};

using Source = MLA_SOURCE;  // element of the cache
using Output = MLA_OUTPUT;  // element of the buffer
constexpr int kWidth = 512;
constexpr int kRows = MLA_ROWS;
constexpr int kWaves = MLA_THREADS / kWaveSize;
constexpr bool kScaled = MLA_GRANULARITY != 0;
static_assert(kWidth == kWaveSize * kChunk, "a wave takes a row in one access a lane");
static_assert(kRows >= 1 && kRows <= kWaveSize, "a lane finds a row");

// Where a row comes from: its latent and, of a quantised cache, its scales; null for a row of zeros.
struct RowSource {
  const uint8_t* latent;
  const uint8_t* scales;
};

MLA_DEVICE RowSource find_row(const GatherParams& p, int row) {
  if (p.batch_size == 0 || row < p.row_offsets[0] || row >= p.row_offsets[p.batch_size]) return {nullptr, nullptr};
  const int s = sequence_of([&](int b) { return p.row_offsets[b]; }, p.batch_size, row);
  const int position = row - p.row_offsets[s] + p.cache_offsets[s];
  const int page = page_row(p.table, s)[position / kPageSize];
  const int slot = position % kPageSize;
  return {token_row(p.latent, page, slot), kScaled ? token_row(p.scales, page, slot) : nullptr};
}

extern "C" __global__ void MLA_WORKGROUP(MLA_THREADS) mla_gather(GatherParams p) {
  const int lane = lane_id(), column = lane * kChunk;
  const int64_t first = (int64_t(workgroup_x()) * kWaves + wave_id()) * kRows;
  const int wanted = p.length != nullptr ? *p.length : p.rows;
  const int end = smaller(wanted, p.rows);
  if (first >= end) return;

  RowSource source = {nullptr, nullptr};
  if (lane < kRows && first + lane < end) source = find_row(p, int(first) + lane);

  Chunk<Source> chunk[kRows];
  float scale[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint8_t* latent = shuffle(source.latent, i);
    const uint8_t* scales = kScaled ? shuffle(source.scales, i) : nullptr;
    chunk[i] = zero_chunk<Source>();
    scale[i] = 1.0f;
    if (latent == nullptr) continue;
    chunk[i] = load_chunk<Source>(latent + column * sizeof(Source));
    if constexpr (kScaled) scale[i] = load_global<float>(scales + column / MLA_GRANULARITY * 4);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i >= end) return;
    store_chunk(p.output + (first + i) * p.output_stride + column * sizeof(Output),
                dequantize_chunk<Output>(chunk[i], scale[i]));
  }
}
