// CUDA C++ as host C++, on the fibers of host_fibers.hpp: every PTX wrapper of include/ptx.cuh has a function here that
// does what the instruction does. Kernels run as they are written; timing and compilers apart.
//
// Made to find faults, beside those that the fibers find: shared memory starts as NaN, an asynchronous copy reads and
// writes only when it is waited for.
#include <deque>
#include <functional>
#include <map>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes)

// What kernels declare as `extern __shared__ uint8_t dynamic[]`.
extern "C" {
alignas(1024) unsigned char dynamic[256 << 10];
}

static host::Index &threadIdx = host::thread_index, &blockIdx = host::block_index, &gridDim = host::grid;

namespace host {

unsigned char* const shared = dynamic;

struct Copy {
  unsigned to;
  const void* from;
  int bytes, read;
};
struct Copies {
  std::vector<Copy> open;  // of no group yet
  std::deque<std::vector<Copy>> groups;  // committed, the oldest first
};
Copies copies[kMostThreads];

inline std::vector<void (*)()> resets;  // of state that a block begins without

inline void start_block() {
  for (void (*reset)() : resets) reset();
  for (unsigned i = 0; i < sizeof(dynamic) / 4; i++) memcpy(shared + 4 * i, "\xff\xff\xff\x7f", 4);
}
inline void start_thread(int thread) { copies[thread] = {}; }

}  // namespace host

// ---- CUDA's own functions -------------------------------------------------------------------------------------------

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

template <typename To, typename From> To bit_cast(From from) {
  To to;
  static_assert(sizeof(To) == sizeof(From), "bits for bits");
  memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __int_as_float(int x) { return bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return bit_cast<float>(x); }
inline int __float_as_int(float x) { return bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return bit_cast<unsigned>(x); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
template <typename T> T __ldg(const T* p) { return host::readable(p, sizeof(T)) ? *p : T(); }

template <typename T> T __ldcg(const T* p) { return *p; }  // of what the kernel itself wrote

inline void __syncthreads() { host::meet(host::block, host::threads, {"__syncthreads", "", 0}); }
inline bool __syncthreads_or(bool x) {
  static int any;
  any = 0;
  __syncthreads();
  any |= x;
  __syncthreads();
  const bool all = any;
  __syncthreads();
  return all;
}
template <typename T> T __shfl_sync(unsigned, T x, int lane) { return host::value<T>(host::exchange(x)[lane & 31]); }
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask) {
  return host::value<T>(host::exchange(x)[(host::current ^ mask) & 31]);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const host::Slot* slots = host::exchange(x);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= unsigned(host::value<bool>(slots[lane])) << lane;
  return bits;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
template <typename T> T __shfl_up_sync(unsigned, T x, int step) {
  const int lane = host::current & 31;
  return host::value<T>(host::exchange(x)[lane < step ? lane : lane - step]);
}
inline unsigned __reduce_or_sync(unsigned, unsigned x) {
  const host::Slot* slots = host::exchange(x);
  unsigned all = 0;
  for (int lane = 0; lane < 32; lane++) all |= host::value<unsigned>(slots[lane]);
  return all;
}
inline void __syncwarp() { host::exchange(0, "__syncwarp"); }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }
inline void __threadfence() {}
template <typename T, typename U> T atomicAdd(T* at, U more) {
  const T before = *at;
  *at = before + T(more);
  return before;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((unsigned long long)(high) << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selectors) {
  const unsigned long long bytes = (unsigned long long)(high) << 32 | low;
  unsigned picked = 0;
  for (int i = 0; i < 4; i++) picked |= unsigned(bytes >> (selectors >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return picked;
}
