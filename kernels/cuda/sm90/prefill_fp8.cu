// MLA prefill in fp8 (e4m3) for Hopper (sm_90a).
#include "prefill_fp8_layout.cuh"
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
  fence_proxy_async_shared();
  __syncthreads();
  griddepcontrol_wait();  // for the table, where a grid of this call writes it

  if (warpgroup == kRowGroups) {
    setmaxnreg_dec<MLA_PRODUCER_REGISTERS>();
    const int warp = (threadIdx.x - kConsumerThreads) / 32 - 1;
    if (warp < 0)
      produce(params, shared);
    else if (warp < kKeyWarps)
      help_with_keys(params, shared, warp);
    else
      transpose_values(shared, warp - kKeyWarps);
  } else {
    setmaxnreg_inc<MLA_CONSUMER_REGISTERS>();
    consume(params, shared, warpgroup);
  }
}
