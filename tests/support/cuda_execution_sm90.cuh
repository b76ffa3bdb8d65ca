// Stands in for include/ptx_sm90.cuh, wgmma_sm90.cuh and wgmma_e4m3_sm90.cuh in kernels built by cuda_execution.py: the
// same wrappers, in C++.
//
// Made to find faults: TMA boxes arrive in any order and at any time before someone has to wait for them; products read
// shared memory only when they are waited for, and want all warps of their warpgroup; what a box or a product touches is
// found by the descriptor's own words.
#pragma once
#include "ptx.cuh"
#include <map>

namespace sm90 {

// What tests/support/cuda_execution.py writes in the place of the driver's encoding.
struct Map {
  const uint8_t* data;
  uint64_t shape[3], strides[3];  // in elements, and in bytes
  uint32_t box[3], steps[3];
  uint32_t element, swizzle;  // bytes
};
struct Load {
  Map map;
  uint32_t to;
  int at[3];
  uint32_t barrier;
};
struct Barrier { int count, pending, bytes, phase; };

inline std::map<uint32_t, Barrier> barriers;
inline std::vector<Load> loads;  // in flight
inline host::Meeting named[16];
inline std::vector<std::vector<std::function<void()>>> products[host::kMostThreads];  // groups, the last one open
inline uint32_t issued[host::kMostThreads];  // a digest of all products that a thread has issued
inline host::Meeting warpgroups[host::kMostThreads / 128];

inline void reset() {
  barriers.clear();
  loads.clear();
  for (host::Meeting& meeting : named) meeting = {};
  for (host::Meeting& meeting : warpgroups) meeting = {};
  for (uint32_t& mine : issued) mine = 0;
  for (auto& mine : products) mine.assign(1, {});
}
inline const bool registered = (host::resets.push_back(reset), true);

inline void complete(Barrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  barrier.phase ^= 1;
  host::progress++;
}

// 16-byte chunks of a row change places by the row's number in its atom.
inline uint32_t swizzled(uint32_t address, uint32_t bytes) {
  if (bytes == 128) return address ^ (address >> 7 & 7) << 4;
  if (bytes == 64) return address ^ (address >> 7 & 3) << 4;
  return address;
}

inline void deliver() {
  if (loads.empty()) return;
  const uint32_t which = host::random(loads.size());
  const Load load = loads[which];
  loads.erase(loads.begin() + which);
  const Map& map = load.map;
  uint32_t to = load.to, moved = 0;
  if (load.at[0] * int(map.element) % 16 != 0) host::fault = true;  // an illegal instruction
  for (uint32_t z = 0; z < map.box[2]; z += map.steps[2])
    for (uint32_t y = 0; y < map.box[1]; y += map.steps[1])
      for (uint32_t x = 0; x < map.box[0]; x++, to += map.element, moved += map.element) {
        const uint64_t at[3] = {uint64_t(load.at[0]) + x, uint64_t(load.at[1]) + y, uint64_t(load.at[2]) + z};
        const bool inside = at[0] < map.shape[0] && at[1] < map.shape[1] && at[2] < map.shape[2];
        const uint8_t* from = map.data + at[0] * map.strides[0] + at[1] * map.strides[1] + at[2] * map.strides[2];
        uint8_t* into = host::shared + swizzled(to, map.swizzle);
        memset(into, 0, map.element);
        if (inside && host::readable(from, map.element)) memcpy(into, from, map.element);
      }
  Barrier& barrier = barriers.at(load.barrier);
  barrier.bytes -= moved;
  host::progress++;
  complete(barrier);
}

// A slow copy engine brings one box each time that all stand still.
inline void deliver_some() {
  if (host::slow != host::threads / host::kWarp) {
    if (host::random(2)) deliver();
  } else if (host::still) {
    host::still = false;
    deliver();
  }
}

}  // namespace sm90

struct alignas(64) TensorMap { uint8_t bytes[128]; };
inline void prefetch_tensormap(const TensorMap&) {}

// ---- mbarrier -------------------------------------------------------------------------------------------------------

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  sm90::barriers[barrier] = {int(arrivals), int(arrivals), 0, 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  sm90::Barrier& b = sm90::barriers.at(barrier);
  b.bytes += bytes;
  b.pending--;
  sm90::complete(b);
}
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_expect_tx(barrier, 0); }
inline void mbarrier_arrive_if(bool made, uint32_t barrier) {
  if (made) mbarrier_arrive(barrier);
}
inline void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
  host::fibers[host::current].site = {"mbarrier", "at byte", int(barrier)};
  if (host::is_slow()) host::yield();  // others go ahead even where it need not wait
  while (sm90::barriers.at(barrier).phase == int(parity)) {
    sm90::deliver_some();
    host::yield();
  }
  host::progress++;
}

inline bool mbarrier_test_wait_parity(uint32_t barrier, uint32_t parity) {
  return sm90::barriers.at(barrier).phase != int(parity);
}
inline void mbarrier_wait_parity_unless(bool completed, uint32_t barrier, uint32_t parity) {
  if (!completed) mbarrier_wait_parity(barrier, parity);
}

// ---- proxies, registers, grids --------------------------------------------------------------------------------------

inline void fence_proxy_async_shared() {}
template <int REGISTERS> void setmaxnreg_inc() {}
template <int REGISTERS> void setmaxnreg_dec() {}
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}
inline bool elect_sync() {
  host::exchange(0, "elect.sync");
  return host::current % 32 == 0;
}
inline void bar_sync(int barrier, int threads) { host::meet(sm90::named[barrier], threads, {"bar.sync", "", barrier}); }
inline bool bar_red_or(int barrier, int threads, bool x) {
  static bool any[16];
  any[barrier] |= x;
  bar_sync(barrier, threads);
  const bool result = any[barrier];
  bar_sync(barrier, threads);  // all have looked
  any[barrier] = false;
  bar_sync(barrier, threads);
  return result;
}
inline int tid_x() { return host::current; }
inline int nctaid_x() { return host::grid.x; }

// ---- shared memory, fragments, arithmetic ---------------------------------------------------------------------------

template <typename T> T ld_global_nc_in_order(const T* p) { return __ldg(p); }
struct uint2 { uint32_t x, y; };
inline uint2 ld_shared_v2_b32(uint32_t shared) {
  uint2 v;
  memcpy(&v, host::shared + shared, 8);
  return v;
}
inline float4 ld_shared_v4_f32(uint32_t shared) {
  float4 v;
  memcpy(&v, host::shared + shared, 16);
  return v;
}
inline void st_shared_f32(uint32_t shared, float v) { memcpy(host::shared + shared, &v, 4); }
inline void stmatrix_x4(uint32_t shared, const uint32_t (&r)[4]) {
  const host::Slot* slots = host::exchange(shared, "stmatrix");
  const int lane = host::current % 32;
  for (int i = 0; i < 4; i++)
    memcpy(host::shared + host::value<uint32_t>(slots[8 * i + lane / 4]) + lane % 4 * 4, &r[i], 4);
}
inline float e4m3_value(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return NAN;
  const float magnitude = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return bits & 0x80 ? -magnitude : magnitude;
}
inline uint8_t e4m3_rounded(float x) {
  if (x != x) return 0x7f;
  const float magnitude = fminf(fabsf(x), 448.0f);
  const int exponent = magnitude < 0x1p-6f ? -6 : ilogbf(magnitude);
  const int steps = int(rintf(ldexpf(magnitude, 3 - exponent)));  // 8 to 16 of them, fewer below 2^-6
  return uint8_t((x < 0 ? 0x80 : 0) | (magnitude < 0x1p-6f ? steps : ((exponent + 6) << 3) + steps));
}
inline uint32_t cvt_rn_satfinite_e4m3x4(float a, float b, float c, float d) {
  return e4m3_rounded(a) | e4m3_rounded(b) << 8 | e4m3_rounded(c) << 16 | uint32_t(e4m3_rounded(d)) << 24;
}

inline void compute_here(uint32_t&) {}

constexpr uint64_t kEvictFirst = 0, kEvictLast = 0;
inline void cp_async_bulk_tensor_3d(uint32_t shared, const TensorMap& map, int c0, int c1, int c2, uint32_t barrier,
                                    uint64_t) {
  sm90::Load load;
  memcpy(&load.map, map.bytes, sizeof(load.map));
  load.to = shared, load.barrier = barrier;
  load.at[0] = c0, load.at[1] = c1, load.at[2] = c2;
  sm90::loads.push_back(load);
}

inline void cp_async_bulk(uint32_t shared, const void* from, uint32_t bytes, uint32_t barrier) {
  if (shared % 16 != 0 || uint64_t(from) % 16 != 0 || bytes % 16 != 0) host::fault = true;
  sm90::Load load{};
  load.map.data = const_cast<uint8_t*>(static_cast<const uint8_t*>(from)), load.map.element = 1;
  for (int i = 0; i < 3; i++) load.map.shape[i] = load.map.box[i] = i == 0 ? bytes : 1, load.map.steps[i] = 1;
  load.map.strides[0] = 1;
  load.to = shared, load.barrier = barrier;
  sm90::loads.push_back(load);
}

inline void st_global_f32_if(bool made, float* to, float x) {
  if (made) *to = x;
}
inline void st_global_v2_f32_if(bool made, void* to, float x, float y) {
  const float pair[2] = {x, y};
  if (made) memcpy(to, pair, 8);
}
inline void st_global_v4_b32_if(bool made, void* to, const uint32_t (&words)[4]) {
  if (made) memcpy(to, words, 16);
}

inline void prefetch_global_l2(const void* p) { host::readable(p, 1); }
inline void cp_async_bulk_prefetch_tensor_3d(const TensorMap& map, int c0, int c1, int c2) {
  sm90::Map of;
  memcpy(&of, map.bytes, sizeof(of));
  const int at[3] = {c0, c1, c2};
  for (int i = 0; i < 3; i++)
    if (at[i] < 0 || uint64_t(at[i]) >= of.shape[i]) host::fault = true;  // nothing to bring
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

inline void wgmma_fence() {}
// Four warps issue a product together: those of which one issues another, or none, wait for ever.
inline void wgmma_commit_group() {
  host::meet(sm90::warpgroups[host::current / 128], 128, {"wgmma", "digest", int(sm90::issued[host::current])});
  sm90::products[host::current].push_back({});
}
template <int N> void wgmma_wait_group() {
  auto& groups = sm90::products[host::current];
  while (groups.size() > N + 1) {
    for (auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
}
inline uint64_t wgmma_descriptor(uint32_t shared, uint32_t leading, uint32_t stride) {
  return uint64_t((shared & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | 1ull << 62;
}
inline uint32_t wgmma_start(uint32_t shared) { return (shared & 0x3ffff) >> 4 | 1u << 16; }
template <int BYTES> uint64_t wgmma_k_major_from(uint32_t start, int step) {
  return (start + (step >> 4)) | uint64_t(8 * BYTES >> 4) << 32 | uint64_t(BYTES == 128 ? 1 : 2) << 62;
}
template <int BYTES> uint64_t wgmma_k_major(uint32_t shared, int step) {
  return wgmma_k_major_from<BYTES>(wgmma_start(shared), step);
}
inline constexpr uint64_t descriptor_step(int bytes) { return uint64_t(bytes >> 4); }

// The element of a K-major operand's row at byte `k`: rows of one swizzle width, atoms of 8 rows, `stride` apart.
inline const uint8_t* k_major(uint64_t descriptor, int row, int k) {
  const uint32_t start = uint32_t(descriptor & 0x3fff) << 4, stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
  const uint32_t width = descriptor >> 62 == 1 ? 128 : 64;
  return host::shared + sm90::swizzled(start + row / 8 * stride + row % 8 * width + k, width);
}
template <typename T> float number(const uint8_t* at);
template <> inline float number<e4m3>(const uint8_t* at) { return e4m3_value(*at); }
template <> inline float number<bf16>(const uint8_t* at) { return element<bf16>(at[0] | at[1] << 8, 0); }
template <> inline float number<fp16>(const uint8_t* at) { return element<fp16>(at[0] | at[1] << 8, 0); }

// Rows q and q + 8 of a thread's warp against N columns, 32 bytes of k.
template <typename T, int N, typename A, typename B> void add_product(float* d, bool accumulate, A&& a, B&& b) {
  constexpr int K = 32 / sizeof(T);
  float rows[2][K];
  for (int r = 0; r < 2; r++)
    for (int k = 0; k < K; k++) rows[r][k] = a(r, k);
  const int t = host::current % 4;
  for (int j = 0; j < N / 8; j++)
    for (int e = 0; e < 2; e++) {
      float sum[2] = {};
      for (int k = 0; k < K; k++) {
        const float y = b(8 * j + 2 * t + e, k);
        for (int r = 0; r < 2; r++) sum[r] += rows[r][k] * y;
      }
      for (int r = 0; r < 2; r++) {
        float& to = d[4 * j + 2 * r + e];
        to = accumulate ? to + sum[r] : sum[r];
      }
    }
}
template <int N> void later(uint64_t b, std::function<void()> product) {
  sm90::products[host::current].back().push_back(product);
  uint32_t& digest = sm90::issued[host::current];
  for (uint32_t word : {uint32_t(N), uint32_t(b), uint32_t(b >> 32)}) digest = (digest ^ word) * 16777619;
}
inline int first_row() { return host::current / 32 % 4 * 16 + host::current % 32 / 4; }

template <typename T, int N> void product_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  float* to = d;
  later<N>(b, [=] {
    add_product<T, N>(
        to, accumulate, [=](int r, int k) { return number<T>(k_major(a, first_row() + 8 * r, k * sizeof(T))); },
        [=](int column, int k) { return number<T>(k_major(b, column, k * sizeof(T))); });
  });
}
template <typename T, int N> void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  product_ss<T, N>(d, a, b, accumulate);
}
template <int N> void wgmma_e4m3_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  product_ss<e4m3, N>(d, a, b, accumulate);
}

struct Fragment { uint32_t words[4]; };
// A fragments of the four lanes that share a thread's rows: word 2 u + r has this row's part of columns 16 bytes apart.
struct Fragments {
  Fragment of[4];
  Fragments(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
    const host::Slot* slots = host::exchange(Fragment{{a0, a1, a2, a3}}, "wgmma");
    for (int t = 0; t < 4; t++) of[t] = host::value<Fragment>(slots[host::current % 32 / 4 * 4 + t]);
  }
};
template <int N> void wgmma_e4m3_rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, bool accumulate) {
  float* to = d;
  const Fragments fragments(a[0], a[1], a[2], a[3]);
  later<N>(b, [=] {
    add_product<e4m3, N>(
        to, accumulate,
        [=](int r, int k) { return e4m3_value(uint8_t(fragments.of[k % 16 / 4].words[k / 16 * 2 + r] >> k % 4 * 8)); },
        [=](int column, int k) { return e4m3_value(*k_major(b, column, k)); });
  });
}
// B MN-major: rows of k, 64 columns each; `leading` between blocks of columns, `stride` between groups of 8 rows.
template <typename T, int N>
void wgmma_rs(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  float* to = d;
  const Fragments fragments(a0, a1, a2, a3);
  later<N>(b, [=] {
    const uint32_t start = uint32_t(b & 0x3fff) << 4, leading = uint32_t(b >> 16 & 0x3fff) << 4,
                   stride = uint32_t(b >> 32 & 0x3fff) << 4;
    add_product<T, N>(
        to, true, [=](int r, int k) { return element<T>(fragments.of[k % 8 / 2].words[k / 8 * 2 + r], k % 2); },
        [=](int column, int k) {
          const uint32_t at = start + column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2;
          return number<T>(host::shared + sm90::swizzled(at, 128));
        });
  });
}
