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
  __syncthreads();
  griddepcontrol_wait();  // for the table, where a grid of this call writes it

  if (warpgroup == kRowGroups) {
    setmaxnreg_dec<MLA_PRODUCER_REGISTERS>();
    const int warp = (threadIdx.x - kConsumerThreads) / 32;
    if (warp == 0)
      produce(params, shared);
    else if (kRopeGather)
      gather_rope(params, shared, warp - 1);
  } else {
    setmaxnreg_inc<MLA_CONSUMER_REGISTERS>();
    consume(params, shared, warpgroup);
  }
}
