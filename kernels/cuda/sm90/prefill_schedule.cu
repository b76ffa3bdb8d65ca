// Orders the sequences of a large batch for prefill.cu: one block writes a table of entries by falling key count.
//
// A counting sort in two passes over the sequences, O(B). Buckets are eight to an octave of key counts, so entries are
// sorted within 12 %; within a bucket the order is that of arrival, on which no result depends. A bucket counts
// sequences (upper half) and items (lower half) in one word: one atomic gives a sequence both its place and its first
// item.
#include "prefill_schedule.cuh"
#include "ptx_sm90.cuh"

struct ScheduleParams {
  SequenceArgs sequences;
  ScheduleEntry* table;  // [batch + 1]
  int batch;
  int heads;
  int grid;  // thread blocks of the grid that works
  int processors;  // of the device
  int* arrivals;  // zeroed as far as the work needs them
};

constexpr int kBuckets = 256;

MLA_DEVICE int bucket_of(int n_keys) {
  constexpr int kMantissaBits = 3, kOne = 0x3f800000 >> (23 - kMantissaBits);
  const int octave = (__float_as_int(float(n_keys > 0 ? n_keys : 1)) >> (23 - kMantissaBits)) - kOne;
  return kBuckets - 1 - octave;
}

extern "C" __global__ void __launch_bounds__(MLA_THREADS)
    mla_prefill_schedule(const __grid_constant__ ScheduleParams params) {
  __shared__ unsigned long long buckets[kBuckets];
  __shared__ int counts[kRowGroups], slots;
  griddepcontrol_launch_dependents();
  if (threadIdx.x < kBuckets) buckets[threadIdx.x] = 0;
  if (threadIdx.x < kRowGroups) counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) slots = 0;
  __syncthreads();

  int mine[kRowGroups] = {};
  bool in_parts = false;
  for (int b = threadIdx.x; b < params.batch; b += MLA_THREADS) {
    const Sequence s = sequence_of(params.sequences, b);
    in_parts |= split_of(s.new_, s.n_keys, params.heads, params.processors).parts > 1;
#pragma unroll
    for (int i = 0; i < kRowGroups; i++) mine[i] += tiles_of(s.new_, i + 1);
  }
#pragma unroll
  for (int i = 0; i < kRowGroups; i++) {
    const int sum = warp_sum(mine[i]);
    if (threadIdx.x % 32 == 0) atomicAdd(&counts[i], sum * params.heads);
  }
  const Grouping grouping = choose_grouping(counts, params.grid, __syncthreads_or(in_parts));

  for (int b = threadIdx.x; b < params.batch; b += MLA_THREADS) {
    const Sequence s = sequence_of(params.sequences, b);
    const Split split = split_of(s.new_, s.n_keys, params.heads, params.processors);
    const int items = items_of(split, tiles_of(s.new_, grouping.size) * params.heads);
    atomicAdd(&buckets[bucket_of(s.n_keys)], 1ull << 32 | uint32_t(items));
  }
  __syncthreads();
  if (threadIdx.x < 32) {  // exclusive sums, eight buckets a lane
    constexpr int kEach = kBuckets / 32;
    unsigned long long sum = 0, before_in_lane[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      before_in_lane[i] = sum;
      sum += buckets[threadIdx.x * kEach + i];
    }
    unsigned long long before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned long long other = __shfl_up_sync(~0u, before, step);
      if (int(threadIdx.x) >= step) before += other;
    }
    if (threadIdx.x == 31) params.table[params.batch] = total_entry(int(uint32_t(before)), grouping);
    before -= sum;
#pragma unroll
    for (int i = 0; i < kEach; i++) buckets[threadIdx.x * kEach + i] = before + before_in_lane[i];
  }
  __syncthreads();
  for (int b = threadIdx.x; b < params.batch; b += MLA_THREADS) {
    const Sequence s = sequence_of(params.sequences, b);
    const Split split = split_of(s.new_, s.n_keys, params.heads, params.processors);
    const int unsplit = tiles_of(s.new_, grouping.size) * params.heads, own_slots = slots_of(split, unsplit);
    const unsigned long long place =
        atomicAdd(&buckets[bucket_of(s.n_keys)], 1ull << 32 | uint32_t(items_of(split, unsplit)));
    const int first_slot = own_slots > 0 ? atomicAdd(&slots, own_slots) : 0;
    params.table[place >> 32] = entry_of(s, b, int(uint32_t(place)), split, first_slot);
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < slots; slot += MLA_THREADS) params.arrivals[slot] = 0;
}
