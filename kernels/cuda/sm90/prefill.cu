// MLA prefill for Hopper (sm_90a): TMA, wgmma, specialised warps, one persistent thread block an SM.
//
//   out[i,h] = sum_j softmax_j(scale * (q_nope[i,h] . k[j,h] + q_rope[i,h] . rope[pos(j)])) v[j,h]   and its LSE
//
// Tiling, (q_depth, v_head_dim) = (192, 128): an item is three blocks of 64 query rows of one head, a consumer
// warpgroup for each; keys stream by in tiles of 128, from the last visible one to the first. A producer warp classes
// 32 key tiles at a time for each block of rows by the mask's own tile_class, loads those that any block sees, and tags
// each with what each warpgroup is to do: nothing, the plain body, the masked body, or the masked body for its first
// half.
//
//           K tile [128 x (128 nope | 64 rope)] 2 stages     V tile [128 x 128] 1 stage (2 while row groups are idle)
//   Q 64 rows  warpgroup 0: S = Q K^T (12 wgmma m64n128k16)   softmax in registers   O += P V (8 wgmma, P in registers)
//   Q 64 rows  warpgroup 1: the same; the three drift apart and fill each other's softmax with products
//   Q 64 rows  warpgroup 2
//
// Roles        registers a thread (setmaxnreg)   waits for                            signals
//   consumers  160 (O 64, S and P 64)            q_full, k_full, v_full               k_empty, v_empty, q_empty
//   producer   32, one warp of a warpgroup       q_empty, k_empty, v_empty            q_full, k_full, v_full, job_full
//   rope warps 32, the three others              job_full                             k_full
// The first of the rope warps brings the operands of a short call into L2 before anything else.
// The tile of (256, 256) dims is 2 x 64 rows by 64 keys, that of softcap and bias 2 x 64 by 128; 216 and 72 registers.
//
// Shared memory, bytes from a 1024-byte boundary (192, 128):
//        0  K ring       2 x 3 sub-tiles of [128 rows][128 B], 128-byte swizzle: columns 0-63, 64-127, rope
//    98304  V ring       1 x 2 sub-tiles of [128 keys][128 B]
//   131072  Q            3 x 3 sub-tiles of [64 rows][128 B]; the last and 8192 bytes more are V's second stage
//                        where no item has a third block of rows
//   212992  items        3 x 3 x 48: two slots and the draft of each row group
//   213424  table        33 x 48: the order of work of up to 32 sequences
//   215008  rope jobs, tags of K stages, 17 mbarriers
//
// Numerics: scores in fp32, base-2 exponentials with the scale as a factor of the exponent; a row keeps its reference
// until its maximum grows by 2^15 (decided row by row); hidden keys by select; P rounded to the inputs' type; rows of V
// past the last key zeroed in shared memory; l and O in fp32, LSE formed once at the end. Key tiles begin at multiples
// of 128 from a sequence's first key and are added in order by one warpgroup, or by one for each part of the keys and the
// parts in order; how many there are its own lengths say: nothing of a row depends on the rest of the batch.
//
// Budget of a tile of 192 x 128: 15.7 MFLOP, 3,840 cycles of the tensor cores; 80 KB from L2, 21 B a cycle; about 350
// issue slots of each of 12 warps beside the products, 1,050 of each scheduler. The power limit (700 W) sets the clock.
// Measured on two H200s, 2026-11-30, causal: 1 x 32,768 at 701 to 724 TFLOP/s, 1 x 8,192 at 670 to 698. docs/hopper.md
// tells why it is built like this, docs/perf-log.md what was tried.
#include "prefill_layout.cuh"
#include "prefill_producer.cuh"
#include "prefill_consumer.cuh"

extern "C" __global__ void __launch_bounds__(MLA_THREADS, 1) mla_prefill(const __grid_constant__ PrefillParams params) {
  extern __shared__ uint8_t dynamic[];
  const Shared shared(dynamic);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == kConsumerThreads) {
    prefetch_tensormap(params.q);
    prefetch_tensormap(params.k);
    prefetch_tensormap(params.v);
    prefetch_tensormap(params.rope);
  }
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4;  // arrivals of a warpgroup
    for (int group = 0; group < kRowGroups; group++) {
      mbarrier_init(shared.q_full(group), 1);
      mbarrier_init(shared.q_empty(group), kWarps);
    }
    for (int stage = 0; stage < kStagesK; stage++) {
      mbarrier_init(shared.k_full(stage), 1 + kRopeGather);
      mbarrier_init(shared.k_empty(stage), kWarps * kRowGroups);
    }
    for (int stage = 0; stage < kMostStagesV; stage++) {
      mbarrier_init(shared.v_full(stage), 1);
      mbarrier_init(shared.v_empty(stage), kWarps * kRowGroups);
    }
    for (int warp = 0; warp < kRopeWarps; warp++) mbarrier_init(shared.job_full(warp), 1);
    fence_mbarrier_init();
    fence_proxy_async_shared();
  }
  // Needs no barrier, and nothing can be loaded before it.
  if (threadIdx.x / 32 == kConsumerThreads / 32 && params.table == nullptr)
    build_table(params.sequences, params.batch, params.heads, nctaid_x(), shared.table(), params.processors);
  __syncthreads();
  griddepcontrol_wait();  // for the table, where a grid of this call writes it

  if (warpgroup == kRowGroups) {
    setmaxnreg_dec<MLA_PRODUCER_REGISTERS>();
    const int warp = (threadIdx.x - kConsumerThreads) / 32;
    if (warp == 0) {
      produce(params, shared);
    } else {
      if (warp == 1) prefetch_operands(params);
      if (kRopeGather) gather_rope(params, shared, warp - 1);
    }
  } else {
    setmaxnreg_inc<MLA_CONSUMER_REGISTERS>();
    consume(params, shared, warpgroup);
  }
}
