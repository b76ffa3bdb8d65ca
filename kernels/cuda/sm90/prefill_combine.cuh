// Keys worked on in parts: every row group puts its result into the workspace, and the last to arrive combines them in
// the order of parts, so that the bits do not depend on who it is. Included behind a layout that defines PrefillParams.
#pragma once
#include "prefill_items.cuh"

// A slot, as the threads of a warpgroup hold a result: O, then m and l, four words of each thread side by side.
constexpr int kSlotO = MLA_V_DIM / 8;  // float4 of a thread's O
constexpr int kSlotWords = (kSlotO + 1) * 128;

// Returns whether this row group is the last of its block's: it then holds the result of all parts.
MLA_DEVICE bool combine_parts(const PrefillParams& p, Item& item, int group, float (&o)[MLA_V_DIM / 2], RowSums& sums,
                              float scale) {
  const int thread = tid_x() & 127;
  float4* mine = p.slots + int64_t(item.slot) * kSlotWords + thread;
#pragma unroll
  for (int i = 0; i < kSlotO; i++) mine[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
  mine[kSlotO * 128] = make_float4(sums.m[0], sums.m[1], sums.l[0], sums.l[1]);
  __threadfence();
  bar_sync(kBarrierWarpgroup + group, 128);  // all of it is written
  if (thread == 0) {
    int* arrivals = p.arrivals + (item.slot - item.part);
    item.last = atomicAdd(arrivals, 1) == item.parts - 1;
    if (item.last) *arrivals = 0;
  }
  bar_sync(kBarrierWarpgroup + group, 128);  // item.last
  if (!item.last) return false;
  __threadfence();

  const float4* first = mine - int64_t(item.part) * kSlotWords;
  sums = {{-infinity(), -infinity()}, {0.0f, 0.0f}};
#pragma unroll 4
  for (int part = 0; part < item.parts; part++) {
    const float4 theirs = __ldcg(first + int64_t(part) * kSlotWords + kSlotO * 128);
    sums.m[0] = fmaxf(sums.m[0], theirs.x);
    sums.m[1] = fmaxf(sums.m[1], theirs.y);
  }
#pragma unroll
  for (int i = 0; i < MLA_V_DIM / 2; i++) o[i] = 0.0f;
#pragma unroll 1
  for (int part = 0; part < item.parts; part++) {
    const float4* from = first + int64_t(part) * kSlotWords;
    const float4 theirs = __ldcg(from + kSlotO * 128);
    const float a = theirs.x == -infinity() ? 0.0f : ex2_approx_ftz((theirs.x - sums.m[0]) * scale),
                b = theirs.y == -infinity() ? 0.0f : ex2_approx_ftz((theirs.y - sums.m[1]) * scale);
    sums.l[0] += theirs.z * a;
    sums.l[1] += theirs.w * b;
#pragma unroll
    for (int i = 0; i < kSlotO; i++) {
      const float4 x = __ldcg(from + i * 128);
      o[4 * i] += x.x * a;
      o[4 * i + 1] += x.y * a;
      o[4 * i + 2] += x.z * b;
      o[4 * i + 3] += x.w * b;
    }
  }
  return true;
}
