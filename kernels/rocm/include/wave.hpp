// A wave of 64 lanes and a workgroup of waves: identifiers, lane exchange, barrier.
#pragma once
#include "types.hpp"

constexpr int kWaveSize = 64;

MLA_DEVICE int thread_id() { return __builtin_amdgcn_workitem_id_x(); }
MLA_DEVICE int lane_id() { return thread_id() % kWaveSize; }
// The same for all lanes, and known to be: what follows from it stays in scalar registers.
MLA_DEVICE int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }
MLA_DEVICE int wave_id() { return uniform(thread_id() / kWaveSize); }
MLA_DEVICE int workgroup_x() { return __builtin_amdgcn_workgroup_id_x(); }
MLA_DEVICE int workgroup_y() { return __builtin_amdgcn_workgroup_id_y(); }
MLA_DEVICE int workgroup_z() { return __builtin_amdgcn_workgroup_id_z(); }

// All waves of the workgroup arrive and see each other's LDS and global writes.
MLA_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Value of another lane, which has to be active.
MLA_DEVICE int shuffle(int x, int lane) { return __builtin_amdgcn_ds_bpermute(lane * 4, x); }
MLA_DEVICE float shuffle(float x, int lane) { return as_float(uint32_t(shuffle(int(as_uint(x)), lane))); }
MLA_DEVICE int64_t shuffle(int64_t x, int lane) {
  const uint32_t low = uint32_t(shuffle(int(uint32_t(x)), lane));
  const uint32_t high = uint32_t(shuffle(int(uint32_t(x >> 32)), lane));
  return int64_t(uint64_t(high) << 32 | low);
}
template <typename T> MLA_DEVICE T* shuffle(T* pointer, int lane) {
  return reinterpret_cast<T*>(shuffle(reinterpret_cast<int64_t>(pointer), lane));
}

// One bit a lane.
MLA_DEVICE uint64_t ballot(bool x) {
#if __has_builtin(__builtin_amdgcn_ballot_w64)
  return __builtin_amdgcn_ballot_w64(x);
#else
  return __builtin_amdgcn_uicmp(uint32_t(x), 0u, 33);  // 33: not equal
#endif
}
MLA_DEVICE bool any_lane(bool x) { return ballot(x) != 0; }
