// Prefill plan: the page-padded sequences of a batch, laid end to end and cut every N rows (exact, 64-bit inside).
//
//   A[s] = round_up(cached[s] + new[s], P)      S[s] = A[0] + ... + A[s-1]      E = S[B]
//   buffer_row_offsets[c][s] = clamp(S[s] - c*N, 0, N), s = 0..B        cache_offsets[c][s] = clamp(c*N - S[s], 0, A[s])
//   buffer_lengths[c] = c*N < E ? smaller(E - c*N, N) : -1                  required_chunks = ceil(E / N)
//
// Grid: x = tiles of sequences, y = groups of chunks (rows y, y + groups, ... of the tables).
//
//        sequences  |-- before: summed --|-- own tile: scanned --|
//        group x                         x * tile                (x+1) * tile
//
// A workgroup needs nothing from another one: it sums what lies before its tile and scans the tile itself. The host
// makes at most 64 tiles, so that is O(B) work in one launch.
//
// LDS: one 64-bit sum a wave, twice. Numerics: integers. Never run on AMD hardware yet: no measured time.

#include "wave.hpp"

struct PlanParams {
  const int* input_row_offsets;  // [B+1]
  const int* lengths;  // [B]
  int* buffer_row_offsets;  // [C, B+1]
  int* cache_offsets;  // [C, B]
  int* buffer_lengths;  // [C]
  int* required_chunks;  // [1] or null
  int batch_size;  // B
  int chunks;  // C
  int buffer_token_size;  // N
  int page_size;  // P
  int lengths_include_new;
  int tile;  // sequences of a workgroup, a multiple of the threads
  int tiles;  // workgroups along x
  int groups;  // and along y
};

constexpr int kWaves = MLA_THREADS / kWaveSize;
static_assert(MLA_THREADS % kWaveSize == 0 && kWaves <= kWaveSize, "one lane for each wave's sum");

// A[s]. Pages are counted in 32 bits: a length is below 2^32, whatever the page size.
MLA_DEVICE int64_t padded_length(const PlanParams& p, int s) {
  uint32_t length = uint32_t(p.lengths[s]);
  if (!p.lengths_include_new) length += uint32_t(p.input_row_offsets[s + 1]) - uint32_t(p.input_row_offsets[s]);
  const uint32_t page_size = uint32_t(p.page_size);
  const uint32_t full = length / page_size;
  return int64_t(full + (full * page_size != length)) * page_size;
}

MLA_DEVICE int64_t wave_inclusive_sum(int64_t x) {
  const int lane = lane_id();
#pragma unroll
  for (int d = 1; d < kWaveSize; d *= 2) {
    const int64_t below = shuffle(x, lane - d);
    if (lane >= d) x += below;
  }
  return x;
}

// Sums of a workgroup: of `total` over all threads; of `x` over the threads before this one, and over all.
struct GroupSums {
  int64_t total;
  int64_t before;
  int64_t all;
};
MLA_DEVICE GroupSums group_sums(int64_t total, int64_t x) {
  __shared__ int64_t totals[kWaves], sums[kWaves];
  const int lane = lane_id(), wave = wave_id();
  const int64_t inclusive = wave_inclusive_sum(x), wave_total = wave_inclusive_sum(total);
  barrier();  // the round before has read its sums
  if (lane == kWaveSize - 1) totals[wave] = wave_total, sums[wave] = inclusive;
  barrier();
  const int64_t waves = wave_inclusive_sum(lane < kWaves ? sums[lane] : 0);
  return {shuffle(wave_inclusive_sum(lane < kWaves ? totals[lane] : 0), kWaves - 1),
          (wave == 0 ? 0 : shuffle(waves, wave - 1)) + inclusive - x, shuffle(waves, kWaves - 1)};
}

MLA_DEVICE int clamp(int64_t x, int64_t high) { return int(x < 0 ? 0 : x < high ? x : high); }

// Entry s of every chunk of this workgroup; `start` = S[s], `padded` = A[s].
MLA_DEVICE void write_column(const PlanParams& p, int s, int64_t start, int64_t padded) {
  const int64_t n = p.buffer_token_size;
  for (int c = workgroup_y(); c < p.chunks; c += p.groups) {
    p.buffer_row_offsets[int64_t(c) * (p.batch_size + 1) + s] = clamp(start - c * n, n);
    if (s < p.batch_size) p.cache_offsets[int64_t(c) * p.batch_size + s] = clamp(c * n - start, padded);
  }
}

MLA_DEVICE void write_lengths(const PlanParams& p, int64_t end) {
  const int64_t n = p.buffer_token_size;
  for (int c = workgroup_y() + thread_id() * p.groups; c < p.chunks; c += MLA_THREADS * p.groups)
    p.buffer_lengths[c] = p.batch_size == 0 ? 0 : c * n < end ? clamp(end - c * n, n) : -1;
  if (p.required_chunks != nullptr && workgroup_y() == 0 && thread_id() == 0)
    *p.required_chunks = int((end + n - 1) / n);
}

extern "C" __global__ void MLA_WORKGROUP(MLA_THREADS) mla_plan(PlanParams p) {
  const int64_t first = int64_t(workgroup_x()) * p.tile;
  const int64_t last = first + p.tile < p.batch_size ? first + p.tile : p.batch_size;
  int64_t before = 0;
  for (int s = thread_id(); s < first; s += MLA_THREADS) before += padded_length(p, s);

  int64_t end = 0;  // S at the end of the rounds so far; the first round adds what lies before the tile
  for (int64_t round = first; round == first || round < last; round += MLA_THREADS) {
    const int64_t s = round + thread_id();
    const int64_t padded = s < last ? padded_length(p, int(s)) : 0;
    const GroupSums sums = group_sums(round == first ? before : 0, padded);
    end += sums.total;
    if (s < last) write_column(p, int(s), end + sums.before, padded);
    end += sums.all;
  }
  if (workgroup_x() == p.tiles - 1) {
    if (p.batch_size != 0 && thread_id() == 0) write_column(p, p.batch_size, end, 0);
    write_lengths(p, end);
  }
}
