// Gather: rows [0, length) of the latent buffer [N, 512] out of the pages, dequantised where the cache has scales.
//
//   row r of sequence s (row_offsets[s] <= r < row_offsets[s+1]) = cache row at position r - row_offsets[s] + cache_offsets[s]
//   rows outside [row_offsets[0], row_offsets[B]) = 0
//
// One warp copies kRows rows: lane i < kRows finds the source of row i (binary search in row_offsets, page table), the warp then
// has all their bytes in flight at once, 8 elements a lane and access.
//
//        lane     0        1      ...   31   |   0    ...
//        row i  [0, 8)  [8, 16)    [248, 256) [256, ...        kSweeps = 2 sweeps of a row
//
// Budget: bf16, a row reads 1,024 bytes and writes as many; 2,048 bytes at a copy's 4.24 TB/s (H200) = 0.48 ns a row.

#include "chunk.cuh"
#include "paged.cuh"
#include "ragged.cuh"

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
constexpr int kSweeps = kWidth / (32 * kChunk);
constexpr int kRows = MLA_ROWS;
constexpr int kWarps = MLA_THREADS / 32;
constexpr bool kScaled = MLA_GRANULARITY != 0;
static_assert(kRows >= 1 && kRows <= 32, "a lane finds a row");

// The cache row that a row of the buffer is.
MLA_DEVICE Place find_row(const GatherParams& p, int row) {
  if (p.batch_size == 0 || row < p.row_offsets[0] || row >= p.row_offsets[p.batch_size]) return {-1, 0};
  const int s = sequence_of_row(p.row_offsets, p.batch_size, row);
  return place_of_token(p.table, s, row - p.row_offsets[s] + p.cache_offsets[s]);
}

extern "C" __global__ void __launch_bounds__(MLA_THREADS, 2) mla_gather(const __grid_constant__ GatherParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (int64_t(blockIdx.x) * kWarps + threadIdx.x / 32) * kRows;
  const int wanted = p.length != nullptr ? *p.length : p.rows;
  const int end = wanted < p.rows ? wanted : p.rows;
  if (first >= end) return;

  Place source = {-1, 0};
  if (lane < kRows && first + lane < end) source = find_row(p, int(first) + lane);

  Chunk<Source> chunk[kRows][kSweeps];
  float scale[kRows][kSweeps];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Place place = shuffle_place(source, i);
    const Source* latent = reinterpret_cast<const Source*>(token_row(p.latent, place));
    const float* scales = reinterpret_cast<const float*>(token_row(p.scales, place));
#pragma unroll
    for (int j = 0; j < kSweeps; ++j) {
      const int column = (j * 32 + lane) * kChunk;
      chunk[i][j] = {};
      scale[i][j] = 1.0f;
      if (place.page >= 0) {
        chunk[i][j] = load_chunk_nc(latent + column);
        if constexpr (kScaled) scale[i][j] = __ldg(scales + column / MLA_GRANULARITY);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i >= end) return;
    Output* row = reinterpret_cast<Output*>(p.output + (first + i) * p.output_stride);
#pragma unroll
    for (int j = 0; j < kSweeps; ++j) {
      const int column = (j * 32 + lane) * kChunk;
      store_chunk(row + column, dequantize_chunk<Output>(chunk[i][j], scale[i][j]));
    }
  }
}
