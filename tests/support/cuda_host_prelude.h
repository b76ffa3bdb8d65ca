// What NVRTC's front end gives a kernel, for a host C++ compiler (tests only): a thread block as pthreads, warps in lockstep
// where they exchange values. Inline PTX is taken out of the text before it is compiled.
#pragma once
#include <pthread.h>
#include <string.h>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define host_asm(...)

struct HostIndex { unsigned x = 0, y = 0, z = 0; };
struct HostWarp {
  pthread_barrier_t barrier;
  unsigned long long values[32];
};
static thread_local HostIndex threadIdx, blockIdx;
static thread_local HostWarp* host_warp;
static pthread_barrier_t host_block;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename To, typename From> static inline To host_bits(From from) {
  To to{};
  memcpy(&to, &from, sizeof(to) < sizeof(from) ? sizeof(to) : sizeof(from));
  return to;
}
static inline float __int_as_float(int x) { return host_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return host_bits<float>(x); }
static inline int __float_as_int(float x) { return host_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return host_bits<unsigned>(x); }
static inline int __float2int_rn(float x) { return __builtin_rintf(x); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
static inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
static inline float fabsf(float a) { return __builtin_fabsf(a); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned long long __cvta_generic_to_shared(const void* p) { return host_bits<unsigned long long>(p); }

template <typename T> static inline T __shfl_sync(unsigned, T mine, int from) {
  host_warp->values[threadIdx.x & 31] = host_bits<unsigned long long>(mine);
  pthread_barrier_wait(&host_warp->barrier);
  const T theirs = host_bits<T>(host_warp->values[from & 31]);
  pthread_barrier_wait(&host_warp->barrier);
  return theirs;
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T mine, int with) {
  return __shfl_sync(mask, mine, (threadIdx.x & 31) ^ with);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T mine, int step) {
  const int lane = threadIdx.x & 31;
  return __shfl_sync(mask, mine, lane < step ? lane : lane - step);
}
// What all lanes hold, joined by `join` from zero.
template <typename Join> static inline unsigned host_joined(unsigned mine, Join join) {
  host_warp->values[threadIdx.x & 31] = mine;
  pthread_barrier_wait(&host_warp->barrier);
  unsigned all = 0;
  for (int lane = 0; lane < 32; lane++) all = join(all, unsigned(host_warp->values[lane]), lane);
  pthread_barrier_wait(&host_warp->barrier);
  return all;
}
static inline unsigned __ballot_sync(unsigned, bool mine) {
  return host_joined(mine, [](unsigned all, unsigned theirs, int lane) { return all | theirs << lane; });
}
static inline unsigned __reduce_or_sync(unsigned, unsigned mine) {
  return host_joined(mine, [](unsigned all, unsigned theirs, int) { return all | theirs; });
}
static inline bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
static inline void __syncwarp() { pthread_barrier_wait(&host_warp->barrier); }
static inline void __syncthreads() { pthread_barrier_wait(&host_block); }
static inline int __syncthreads_or(int mine) {
  static int any;
  __syncthreads();
  __atomic_store_n(&any, 0, __ATOMIC_SEQ_CST);
  __syncthreads();
  if (mine) __atomic_store_n(&any, 1, __ATOMIC_SEQ_CST);
  __syncthreads();
  return __atomic_load_n(&any, __ATOMIC_SEQ_CST);
}
static inline void __threadfence() {}
template <typename T> static inline T __ldcg(const T* from) { return *from; }
template <typename T, typename U> static inline T atomicAdd(T* at, U more) {
  return __atomic_fetch_add(at, T(more), __ATOMIC_SEQ_CST);
}

// Runs `body` on every thread of a block; the count is a multiple of 32.
template <typename Body> static void host_run(int threads, Body body) {
  struct Start {
    Body* body;
    HostWarp* warp;
    unsigned thread;
  };
  std::vector<HostWarp> warps(threads / 32);
  for (HostWarp& warp : warps) pthread_barrier_init(&warp.barrier, nullptr, 32);
  pthread_barrier_init(&host_block, nullptr, threads);
  std::vector<Start> starts;
  for (int t = 0; t < threads; t++) starts.push_back({&body, &warps[t / 32], unsigned(t)});
  std::vector<pthread_t> handles(threads);
  for (int t = 0; t < threads; t++)
    pthread_create(
        &handles[t], nullptr,
        [](void* argument) -> void* {
          const Start& start = *static_cast<Start*>(argument);
          threadIdx.x = start.thread;
          host_warp = start.warp;
          (*start.body)();
          return nullptr;
        },
        &starts[t]);
  for (pthread_t handle : handles) pthread_join(handle, nullptr);
}
