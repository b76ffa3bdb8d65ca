// The up-projection to fp8 for Hopper (sm_90a): TMA, wgmma, specialised warps, one persistent thread block an SM.
//
//   output[r,c] = e4m3(sum_k a[r,k] b[c,k] / scale[r]),  k < 512
//
// Keys are latents times weight, V^T is the weight times latents. Tiling: a tile is 192 rows by 128 columns, three
// consumer warpgroups of 64 rows. Every thread block works through as many tiles as the others, one after the other along
// the columns: rows of a stay in shared memory as long as their tiles last, b streams by in slices of 32 of k.
//
//   a [192 x 512]  8 sub-tiles, loaded for the next rows as the last tile has done with them
//   b [128 x 32]   4 stages     warpgroup: S += A B^T (2 wgmma m64n128k16 a slice) into one of two accumulators, the
//                               other, of the tile before, being stored meanwhile
//
// Roles        registers a thread (setmaxnreg)   waits for           signals
//   consumers  160 (two accumulators of 64)      a_full, b_full      a_empty, b_empty
//   producer   32, one thread of a warpgroup     a_empty, b_empty    a_full, b_full
//
// Shared memory, bytes from a 1024-byte boundary:
//        0  a         8 x [192 rows][128 B], 128-byte swizzle
//   196608  b         4 x [128 columns][64 B], 64-byte swizzle
//   229376  24 mbarriers
//
// Numerics: products of 16 bits added in fp32 in the order of k, rounded once; e4m3 saturates.
//
// Budget of a tile: 25.2 MFLOP, 6,144 cycles of the tensor cores; 128 KB of b from L2, 21 B a cycle; 24 KB stored.
#include "wgmma_e4m3_sm90.cuh"
#include "quad.cuh"

using Element = bf16;
using Output = e4m3;

constexpr int kGroups = 3, kRows = 64 * kGroups, kColumns = 128, kDepth = 512;
constexpr int kBlocks = kDepth / 64, kBlockBytes = kRows * 128;  // sub-tiles of 64 of k
constexpr int kSlices = kDepth / 32, kStages = 4, kStageBytes = kColumns * 64;
// Slices by which a sub-tile is asked for before its first one: after the last use of what it replaces.
constexpr int kLead = 10;
static_assert(kLead < kSlices - 2, "else the producer waits for consumers that wait for it");
constexpr int kOffsetB = kBlocks * kBlockBytes, kOffsetBarriers = kOffsetB + kStages * kStageBytes;
static_assert(kSlices % (2 * kStages) == 0, "stage and phase follow from the slice");
static_assert(MLA_SHARED_BYTES == 1024 + kOffsetBarriers + 8 * 2 * (kBlocks + kStages), "the host counts other bytes");
static_assert(MLA_THREADS == 128 * (kGroups + 1), "three consumers and the producer");

struct ProjectParams {
  TensorMap a, b;
  void* output;
  int64_t output_stride;  // elements
  const float* scale;  // [ceil(rows / scale_rows)]; scale_rows is a multiple of 64, or all rows
  int rows, columns, scale_rows;
  int column_tiles, tiles;
};

// Addresses of the plan above, and mbarriers with who arrives and who waits.
struct Shared {
  uint32_t base;
  MLA_DEVICE uint32_t a(int block) const { return base + block * kBlockBytes; }
  MLA_DEVICE uint32_t b(int stage) const { return base + kOffsetB + stage * kStageBytes; }
  // producer and TMA -> consumers
  MLA_DEVICE uint32_t a_full(int block) const { return base + kOffsetBarriers + 8 * block; }
  MLA_DEVICE uint32_t b_full(int stage) const { return a_full(kBlocks + stage); }
  // consumers' warps -> producer
  MLA_DEVICE uint32_t a_empty(int block) const { return a_full(kBlocks + kStages + block); }
  MLA_DEVICE uint32_t b_empty(int stage) const { return a_full(2 * kBlocks + kStages + stage); }
};

// The tiles of this thread block; columns are innermost.
struct Range { int first, last; };
MLA_DEVICE Range range_of(const ProjectParams& p) {
  return {int(int64_t(p.tiles) * blockIdx.x / nctaid_x()), int(int64_t(p.tiles) * (blockIdx.x + 1) / nctaid_x())};
}

MLA_DEVICE void produce(const ProjectParams& p, const Shared& shared) {
  const Range range = range_of(p);
  const int slices = (range.last - range.first) * kSlices;
  int column_tile = range.first % p.column_tiles, row_tile = range.first / p.column_tiles;
  int block = 0, begin = 0, phase = 1;  // of the rows to be loaded next: sub-tile, their first slice
#pragma unroll 1
  for (int at = 0; at < slices; at++) {
    while (begin < slices && at >= begin + 2 * block - kLead) {
      mbarrier_wait_parity(shared.a_empty(block), phase);
      mbarrier_arrive_expect_tx(shared.a_full(block), kBlockBytes);
      cp_async_bulk_tensor_3d(shared.a(block), p.a, 64 * block, row_tile * kRows, 0, shared.a_full(block), kEvictFirst);
      if (++block == kBlocks) {
        block = 0, phase ^= 1, row_tile++;
        begin = (row_tile * p.column_tiles - range.first) * kSlices;
      }
    }
    const int stage = at % kStages, slice = at % kSlices;
    mbarrier_wait_parity(shared.b_empty(stage), at / kStages % 2 ^ 1);
    mbarrier_arrive_expect_tx(shared.b_full(stage), kStageBytes);
    cp_async_bulk_tensor_3d(shared.b(stage), p.b, 32 * slice, column_tile * kColumns, 0, shared.b_full(stage),
                            kEvictLast);
    if (slice == kSlices - 1 && ++column_tile == p.column_tiles) column_tile = 0;
  }
}

// Where this thread's part of a tile goes, which eighths of it there are (32 columns of a row), a bit each, and 1 / scale.
struct Place {
  Output* to;
  uint32_t parts;
  float factor;
};
// For so many rows and columns from there on.
MLA_DEVICE uint32_t parts_of(int rows, int columns) {
  const int groups = columns < 1 ? 0 : columns < kColumns ? (columns + 31) / 32 : kColumns / 32;
  return (rows > 8 ? 0xff : rows > 0 ? 0x55 : 0) & ((1u << 2 * groups) - 1);
}

// The lower or upper halves of two words.
MLA_DEVICE uint32_t halves(uint32_t a, uint32_t b, bool upper) {
  return upper ? a >> 16 | (b & 0xffff0000) : (a & 0xffff) | b << 16;
}

struct Consumer {
  const ProjectParams& p;
  const Shared& shared;
  const int group;

  MLA_DEVICE void release(uint32_t barrier) const {
    if (elect_sync()) mbarrier_arrive(barrier);
  }

  // A quarter of a tile: 32 columns of the thread's two rows, of which a lane stores 8 of each.
  MLA_DEVICE void store(const float (&sum)[kColumns / 2], const Place& place, int part) const {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int i = 4 * (4 * part + j);
      words[j] = cvt_rn_satfinite_e4m3x4(sum[i] * place.factor, sum[i + 1] * place.factor, sum[i + 2] * place.factor,
                                         sum[i + 3] * place.factor);
    }
    transpose_quad(words);
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const uint32_t low = halves(words[0], words[1], row), high = halves(words[2], words[3], row);
      if (place.parts >> (2 * part + row) & 1)
        *reinterpret_cast<uint64_t*>(place.to + 8 * row * p.output_stride + 32 * part) = low | uint64_t(high) << 32;
    }
  }
  MLA_DEVICE void store(const float (&sum)[kColumns / 2], const Place& place) const {
#pragma unroll
    for (int part = 0; part < 4; part++) store(sum, place, part);
  }

  // One tile into `now`, while the one before is stored; `last` of its rows.
  MLA_DEVICE void multiply(float (&now)[kColumns / 2], const float (&before)[kColumns / 2], const Place& place,
                           uint32_t phase, bool last) const {
#pragma unroll
    for (int s = 0; s < kSlices; s++) {
      if (s % 2 == 0) mbarrier_wait_parity(shared.a_full(s / 2), phase);
      mbarrier_wait_parity(shared.b_full(s % kStages), s / kStages % 2);
      if (s == 0) wgmma_wait_group<0>();  // nothing is in flight; this tells ptxas that `before` may be read
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; i++)
        wgmma_ss<Element, kColumns>(now, wgmma_k_major<128>(shared.a(s / 2) + group * 64 * 128, s % 2 * 64 + 32 * i),
                                    wgmma_k_major<64>(shared.b(s % kStages), 32 * i), s > 0 || i > 0);
      wgmma_commit_group();
      if (s < 4) store(before, place, s);
      if (s > 0) {
        wgmma_wait_group<1>();
        release(shared.b_empty((s - 1) % kStages));
        if (s % 2 == 0 && last) release(shared.a_empty(s / 2 - 1));
      }
    }
    wgmma_wait_group<0>();
    release(shared.b_empty(kStages - 1));
    if (last) release(shared.a_empty(kBlocks - 1));
  }
};

MLA_DEVICE void consume(const ProjectParams& p, const Shared& shared, int group) {
  const Consumer consumer{p, shared, group};
  const Range range = range_of(p);
  const int thread = tid_x() & 127, row = group * 64 + thread / 32 * 16 + thread % 32 / 4;
  float even[kColumns / 2], odd[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; i++) odd[i] = 0.0f;
  int row_tile = range.first / p.column_tiles, column_tile = range.first % p.column_tiles;
  uint32_t phase = 0;
  Place place{nullptr, 0, 0.0f};
  auto step = [&](float (&now)[kColumns / 2], const float (&before)[kColumns / 2]) {
    const bool last = column_tile + 1 == p.column_tiles;
    consumer.multiply(now, before, place, phase, last);
    const int first_row = row_tile * kRows + row, first_column = column_tile * kColumns + 8 * (tid_x() & 3);
    place.to = static_cast<Output*>(p.output) + first_row * p.output_stride + first_column;
    place.parts = parts_of(p.rows - first_row, p.columns - first_column);
    // One scale for the 64 rows of a warpgroup.
    place.factor = first_row < p.rows ? rcp_approx_ftz(p.scale[first_row / p.scale_rows]) : 0.0f;
    column_tile = last ? 0 : column_tile + 1;
    row_tile += last;
    phase ^= last;
  };
  for (int left = range.last - range.first;;) {
    step(even, odd);
    if (--left == 0) return consumer.store(even, place);
    step(odd, even);
    if (--left == 0) return consumer.store(odd, place);
  }
}

extern "C" __global__ void __launch_bounds__(MLA_THREADS, 1) mla_project(const __grid_constant__ ProjectParams params) {
  extern __shared__ uint8_t dynamic[];
  const Shared shared{(cvta_shared(dynamic) + 1023) & ~1023u};
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * kGroups;
    for (int i = 0; i < kBlocks; i++) mbarrier_init(shared.a_full(i), 1), mbarrier_init(shared.a_empty(i), kWarps);
    for (int i = 0; i < kStages; i++) mbarrier_init(shared.b_full(i), 1), mbarrier_init(shared.b_empty(i), kWarps);
    fence_mbarrier_init();
    fence_proxy_async_shared();
  }
  __syncthreads();
  if (warpgroup == kGroups) {
    setmaxnreg_dec<32>();
    if (threadIdx.x == 128 * kGroups) produce(params, shared);
  } else {
    setmaxnreg_inc<160>();
    consume(params, shared, warpgroup);
  }
}
