// Prefill plan: the page-padded sequences of a batch, laid end to end and cut every N rows (exact, 64-bit inside).
//
//   A[s] = round_up(cached[s] + new[s], P)      S[s] = A[0] + ... + A[s-1]      E = S[B]
//   buffer_row_offsets[c][s] = clamp(S[s] - c*N, 0, N), s = 0..B        cache_offsets[c][s] = clamp(c*N - S[s], 0, A[s])
//   buffer_lengths[c] = c*N < E ? min(E - c*N, N) : -1                  required_chunks = ceil(E / N)
//
// Grid: x = tiles of sequences, at most kMaxTiles; y = groups of chunks (rows y, y + gridDim.y, ... of the tables).
//
//        sequences  |-- before: summed --|-- own tile: scanned --|
//        block x                         x * tile                (x+1) * tile
//
// A block needs nothing from another one: it sums what lies before its tile and scans the tile itself. With at most 64 tiles
// that is O(B) work, and it saves the second launch or the zeroed flags that passing sums between blocks would take.
//
// Budget at B 1,024, C 16: 0.14 MB written, 8 KB read a block: 0.05 us at 4.2 TB/s. What is left is latency: the launch, one
// round of loads (~0.7 us), the scan (10 shuffles, one barrier), one round of stores.

#include "types.cuh"

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
  uint32_t page_reciprocal;  // n / P = n * page_reciprocal >> page_shift for n < 2^31
  int page_shift;
  int new_weight;  // 0 where `lengths` include this step's tokens, else 1
  int tile;  // sequences of a block, a multiple of the threads
};

constexpr int kWarps = MLA_THREADS / 32;
constexpr uint32_t kFullWarp = 0xffffffff;
static_assert(MLA_THREADS % 32 == 0 && kWarps <= 32, "one lane for each warp's sum");

// Tokens of sequence s, cached and new: without a branch, so that several loads are in flight.
MLA_DEVICE uint32_t length_of(const PlanParams& p, int s) {
  return uint32_t(p.lengths[s] + p.new_weight * (p.input_row_offsets[s + 1] - p.input_row_offsets[s]));
}

// A[s] of a length, which is below 2^31 whatever the page size.
MLA_DEVICE int64_t padded(const PlanParams& p, uint32_t length) {
  const uint32_t full = uint32_t(uint64_t(length) * p.page_reciprocal >> p.page_shift);
  return int64_t(full + (full * p.page_size != length)) * p.page_size;
}

MLA_DEVICE int64_t warp_sum(int64_t x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kFullWarp, x, d);
  return x;
}

MLA_DEVICE int64_t warp_inclusive_sum(int64_t x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int64_t below = __shfl_up_sync(kFullWarp, x, d);
    if (lane >= d) x += below;
  }
  return x;
}

// Sums of a block in one barrier: of `total` over all threads, and of `x` over the threads before this one.
struct BlockSums {
  int64_t total;
  int64_t before;
  int64_t all;  // of x over all threads
};
MLA_DEVICE BlockSums block_sums(int64_t total, int64_t x) {
  __shared__ int64_t totals[32], sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t inclusive = warp_inclusive_sum(x);
  total = warp_sum(total);
  __syncthreads();  // the round before has read its sums
  if (lane == 31) totals[warp] = total, sums[warp] = inclusive;
  __syncthreads();
  const int64_t warp_total = lane < kWarps ? sums[lane] : 0;
  const int64_t warps_inclusive = warp_inclusive_sum(warp_total);
  BlockSums result;
  result.total = warp_sum(lane < kWarps ? totals[lane] : 0);
  result.before = __shfl_sync(kFullWarp, warps_inclusive - warp_total, warp) + inclusive - x;
  result.all = __shfl_sync(kFullWarp, warps_inclusive, 31);
  return result;
}

MLA_DEVICE int clamp(int64_t x, int64_t high) { return int(x < 0 ? 0 : x < high ? x : high); }

// Entry s of every chunk of this block; `start` = S[s], `padded` = A[s], neither read for s = B but for the former.
MLA_DEVICE void write_column(const PlanParams& p, int s, int64_t start, int64_t padded) {
  const int64_t n = p.buffer_token_size;
  for (int c = blockIdx.y; c < p.chunks; c += gridDim.y) {
    p.buffer_row_offsets[int64_t(c) * (p.batch_size + 1) + s] = clamp(start - c * n, n);
    if (s < p.batch_size) p.cache_offsets[int64_t(c) * p.batch_size + s] = clamp(c * n - start, padded);
  }
}

MLA_DEVICE void write_lengths(const PlanParams& p, int64_t end) {
  const int64_t n = p.buffer_token_size;
  for (int c = blockIdx.y + threadIdx.x * gridDim.y; c < p.chunks; c += MLA_THREADS * gridDim.y)
    p.buffer_lengths[c] = p.batch_size == 0 ? 0 : c * n < end ? clamp(end - c * n, n) : -1;
  if (p.required_chunks != nullptr && blockIdx.y == 0 && threadIdx.x == 0) *p.required_chunks = int((end + n - 1) / n);
}

// This thread's share of A[0] + ... + A[first-1], kBatch loads at a time.
MLA_DEVICE int64_t sum_before(const PlanParams& p, int first) {
  constexpr int kBatch = 8;
  int64_t sum = 0;
  for (int s = threadIdx.x; s < first; s += kBatch * MLA_THREADS) {
    uint32_t lengths[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int one = s + i * MLA_THREADS;
      lengths[i] = one < first ? length_of(p, one) : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum += padded(p, lengths[i]);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(MLA_THREADS) mla_plan(const __grid_constant__ PlanParams p) {
  const int first = blockIdx.x * p.tile;
  const int last = first + p.tile < p.batch_size ? first + p.tile : p.batch_size;
  const int64_t before = sum_before(p, first);

  int64_t end = 0;  // S at the end of the rounds so far; the first round adds what lies before the tile
  for (int round = first; round == first || round < last; round += MLA_THREADS) {
    const int s = round + threadIdx.x;
    const int64_t rows = s < last ? padded(p, length_of(p, s)) : 0;
    const BlockSums sums = block_sums(round == first ? before : 0, rows);
    end += sums.total;
    if (s < last) write_column(p, s, end + sums.before, rows);
    end += sums.all;
  }
  if (blockIdx.x == gridDim.x - 1) {
    if (p.batch_size != 0 && threadIdx.x == 0) write_column(p, p.batch_size, end, 0);
    write_lengths(p, end);
  }
}
