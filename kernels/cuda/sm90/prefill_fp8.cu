// MLA prefill in fp8 (e4m3) for Hopper (sm_90a): TMA, wgmma, specialised warps, one persistent thread block an SM.
//
//   s[i,j] = softmax_scale * row[i] * (nope[j] * q_nope[i,h] . k[j,h] + rope[j] * q_rope[i,h] . rope[pos(j)])
//   out[i,h] = sum_j softmax_j(s[i,j]) * v_scale[j,h] * v[j,h]   and its LSE; the factors: prefill_fp8_layout.cuh
//
// Items, key tiles of 128, their classes and tags are those of prefill.cu. Tiling: an item is three blocks of 64 query
// rows of one head, a consumer warpgroup for each.
//
//           K tile [128 x (128 nope | 64 rope)], 4 stages      V^T tile [128 columns (| 8: ones, zeros) x 128 keys], 2
//   Q 64 rows  warpgroup 0: S = Q K^T (6 wgmma m64n128k32)   softmax in registers   T = P V (4 wgmma), O += T in fp32
//   Q 64 rows  warpgroup 1: the same; the three drift apart and fill each other's softmax with products
//   Q 64 rows  warpgroup 2
//
// Roles           registers (setmaxnreg)     waits for                       signals
//   consumers     160 (O 64, S or T 64, P 16) q_full, k_full, v_full          k_empty, v_empty, q_empty
//   producer      32, one warp               q_empty, k_empty, v_empty       q_full, k_full, v_full, raw_full, job_full
//   key warps     32, three; one beside      job_full                        k_full (v_full)
//   transposers   32, two, where V is rows   raw_full, v_empty               v_full, raw_empty
// With a bf16 rope the rope part is 4 wgmma m64n128k16 of bf16 into the same accumulators, and K has 3 stages beside
// transposers. Softcap and bias: two row groups of 216 registers, 72 for the others.
//
// P never leaves its registers: the accumulators of S are its A fragments, because TMA lays the keys of K in another
// order (prefill_fp8_layout.cuh); V^T keeps its own. Shared memory, bytes from a 1024-byte boundary (fp8, V^T, no LSE):
//        0  K ring       4 x (128 rows of 128 B, 128-byte swizzle; 128 rows of 64 B, 64-byte swizzle)
//    98304  V^T ring     2 x (128 + 8) rows of 128 B; where V is rows, 2 x 16384 more for them
//   133120  Q            3 x (64 rows of 128 B; 64 rows of 64 B)
//   169984  scales       4 x 2 x 512, a word a key
//   174080  q_scale of rows, heads of K tiles, items, table, jobs, known scales of
//                      tiles, 24 mbarriers
//
// Numerics: the accumulators of an fp8 product truncate, so each tile's P V stands alone and is added in fp32. A tile
// of which every key is visible takes its exponentials by the references of before, the first of several by its maxima; a
// P of 2^8 or more (with an LSE: a sum of kLargest) makes that row, and it alone, take its maximum and the tile begin
// anew. Without an LSE sums of P are a column of the product, of what was rounded. LSE formed once at the end. Nothing of
// a row depends on the rest of the batch.
//
// Budget of a tile of 192 x 128: 15.7 MFLOP, 1,920 cycles of the tensor cores, 1,536 of the units for exponentials; 40
// KB from L2. The power limit (700 W) sets the clock. docs/perf-log.md tells what was measured and tried.
#include "prefill_fp8_layout.cuh"
#include "prefill_fp8_prefetch.cuh"
#include "prefill_fp8_producer.cuh"
#include "prefill_fp8_helpers.cuh"
#include "prefill_fp8_consumer.cuh"

extern "C" __global__ void __launch_bounds__(MLA_THREADS, 1)
    mla_prefill_fp8(const __grid_constant__ PrefillParams params) {
  extern __shared__ uint8_t dynamic[];
  const Shared shared(dynamic);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == kConsumerThreads) {
    prefetch_tensormap(params.q);
    prefetch_tensormap(params.q_rope);
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
      mbarrier_init(shared.k_full(stage), 2);  // the producer and a key warp
      mbarrier_init(shared.k_empty(stage), kWarps * kRowGroups);
      mbarrier_init(shared.job_full(stage), 1);
    }
    for (int stage = 0; stage < kStagesV; stage++) {
      mbarrier_init(shared.v_full(stage), kTransposeV ? kTransposers : 1);
      mbarrier_init(shared.v_empty(stage), kWarps * kRowGroups);
      mbarrier_init(shared.v_free(stage), 1);
    }
    for (int stage = 0; stage < kStagesRaw; stage++) {
      mbarrier_init(shared.raw_full(stage), 1);
      mbarrier_init(shared.raw_empty(stage), kTransposers);
    }
    *shared.no_more_v() = 0;
    fence_mbarrier_init();
  }
  if constexpr (kSumByProduct) {
    constexpr uint32_t kOnes = 0x38383838;  // four times 1.0 in e4m3
    constexpr int kWords = kOnesBytes / 4;
    for (int i = threadIdx.x; i < kStagesV * kWords; i += MLA_THREADS)
      *reinterpret_cast<uint32_t*>(shared.v_bytes(i / kWords) + kVTileBytes + i % kWords * 4) =
          i % kWords < kBlockN / 4 ? kOnes : 0;
  }
  for (int i = threadIdx.x; i < kKnownTiles; i += MLA_THREADS) shared.known(i * kBlockN)->k_row = -1;
  fence_proxy_async_shared();
  // Needs no barrier, and nothing can be loaded before it.
  if (threadIdx.x / 32 == kConsumerThreads / 32 && params.table == nullptr)
    build_table(params.sequences, params.batch, params.heads, nctaid_x(), shared.table(), params.processors);
  __syncthreads();
  griddepcontrol_wait();  // for the table, where a grid of this call writes it

  if (warpgroup == kRowGroups) {
    setmaxnreg_dec<MLA_PRODUCER_REGISTERS>();
    const int warp = (threadIdx.x - kConsumerThreads) / 32 - 1;
    if (warp == kKeyWarps + kTransposers - 1) prefetch_operands(params);
    if (warp < 0)
      produce(params, shared);
    else if (warp < kKeyWarps)
      help_with_keys(params, shared, warp);
    else if constexpr (kTransposeV)
      transpose_values(shared, warp - kKeyWarps);
  } else {
    setmaxnreg_inc<MLA_CONSUMER_REGISTERS>();
    consume(params, shared, warpgroup);
  }
}
