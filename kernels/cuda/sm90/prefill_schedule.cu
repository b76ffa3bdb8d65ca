// Orders the sequences of a large batch for prefill.cu: one block a form writes a table of entries by falling key count.
//
// A counting sort in two passes over the sequences, O(B). Buckets are eight to an octave of key counts, so entries are sorted within 12 %;
// within a bucket the order is that of arrival, on which no result depends. A bucket counts sequences (upper half) and items (lower half) in
// one word, so one atomic gives a sequence both its place in the table and its first item.
#include "prefill_schedule.cuh"
#include "ptx_sm90.cuh"

struct ScheduleParams {
  SequenceArgs sequences;
  ScheduleEntry* tables[2];  // by form, [batch + 1] entries; null: no such form
  int batch;
  int heads;
};

constexpr int kBuckets = 256;

MLA_DEVICE int bucket_of(int n_keys) {
  constexpr int kMantissaBits = 3, kOne = 0x3f800000 >> (23 - kMantissaBits);
  const int octave = (__float_as_int(float(n_keys > 0 ? n_keys : 1)) >> (23 - kMantissaBits)) - kOne;
  return kBuckets - 1 - octave;
}

extern "C" __global__ void __launch_bounds__(MLA_THREADS) mla_prefill_schedule(const __grid_constant__ ScheduleParams params) {
  __shared__ unsigned long long buckets[kBuckets];
  const Form form = Form(blockIdx.x);
  ScheduleEntry* table = params.tables[form];
  griddepcontrol_launch_dependents();
  if (threadIdx.x < kBuckets) buckets[threadIdx.x] = 0;
  __syncthreads();
  for (int b = threadIdx.x; b < params.batch; b += MLA_THREADS) {
    const Sequence s = sequence_of(params.sequences, b);
    atomicAdd(&buckets[bucket_of(s.n_keys)], 1ull << 32 | uint32_t(item_count(form, s.new_, s.n_keys, params.heads)));
  }
  __syncthreads();
  if (threadIdx.x < 32) {  // exclusive sums, eight buckets a lane
    constexpr int kEach = kBuckets / 32;
    unsigned long long sum = 0, mine[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      mine[i] = sum;
      sum += buckets[threadIdx.x * kEach + i];
    }
    unsigned long long before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned long long other = __shfl_up_sync(~0u, before, step);
      if (int(threadIdx.x) >= step) before += other;
    }
    if (threadIdx.x == 31) table[params.batch].first_item = int(uint32_t(before));
    before -= sum;
#pragma unroll
    for (int i = 0; i < kEach; i++) buckets[threadIdx.x * kEach + i] = before + mine[i];
  }
  __syncthreads();
  for (int b = threadIdx.x; b < params.batch; b += MLA_THREADS) {
    const Sequence s = sequence_of(params.sequences, b);
    const unsigned long long place =
        atomicAdd(&buckets[bucket_of(s.n_keys)], 1ull << 32 | uint32_t(item_count(form, s.new_, s.n_keys, params.heads)));
    table[place >> 32] = entry_of(s, b, int(uint32_t(place)));
  }
}
