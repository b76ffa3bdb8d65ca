// CUDA C++ as host C++: the threads of a block are fibers of one host thread, and every PTX wrapper of include/ptx.cuh
// has a function here that does what the instruction does. Kernels run as they are written; timing and compilers apart.
//
// Made to find faults: shared memory starts as NaN, an asynchronous copy reads and writes only when it is waited for,
// warps take turns in a random order, global memory outside the given tensors is a fault, a barrier that not all reach
// ends the run.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <deque>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__
#define __align__(bytes)

// What kernels declare as `extern __shared__ uint8_t dynamic[]`.
extern "C" {
alignas(1024) unsigned char dynamic[256 << 10];
}

namespace host {

unsigned char* const shared = dynamic;
constexpr int kWarp = 32, kMostThreads = 1024, kStackBytes = 128 << 10;
enum Result { kDone = 0, kDeadlock = 1, kFault = 2 };

struct Index { int x, y, z; };
struct Range { const unsigned char *begin, *end; };
struct Copy {
  unsigned to;
  const void* from;
  int bytes, read;
};
struct Fiber {
  ucontext_t context;
  std::vector<unsigned char> stack;
  bool ended;
  std::vector<Copy> open;  // copies of no group yet
  std::deque<std::vector<Copy>> groups;  // committed, the oldest first
};
struct Slot { alignas(8) unsigned char bytes[64]; };
struct Meeting {
  int arrived;
  unsigned generation;
};
struct Warp : Meeting { Slot slots[2][kWarp]; };

Fiber fibers[kMostThreads];
Warp warps[kMostThreads / kWarp];
Meeting block;
ucontext_t scheduler;
int current, threads;
unsigned long long progress, random_state;
bool fault;
std::vector<Range> ranges;

inline unsigned random(unsigned below) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return unsigned(random_state >> 33) % below;
}

// Waits until `count` fibers have come.
inline void meet(Meeting& meeting, int count) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    meeting.generation++;
    progress++;
  }
  while (meeting.generation == generation) swapcontext(&fibers[current].context, &scheduler);
}

// What every lane of the warp gave; stays until the next but one call.
template <typename T> const Slot* exchange(const T& mine) {
  Warp& warp = warps[current / kWarp];
  Slot* slots = warp.slots[warp.generation & 1];
  static_assert(sizeof(T) <= sizeof(Slot), "a slot holds it");
  memcpy(slots[current % kWarp].bytes, &mine, sizeof(T));
  meet(warp, kWarp);
  return slots;
}
template <typename T> T value(const Slot& slot) {
  T x;
  memcpy(&x, slot.bytes, sizeof(T));
  return x;
}

inline bool readable(const void* from, int bytes) {
  const unsigned char* p = static_cast<const unsigned char*>(from);
  for (const Range& range : ranges)
    if (p >= range.begin && p + bytes <= range.end) return true;
  fault = true;
  return false;
}

void call_kernel(const void* params);  // made for the kernel

inline const void* kernel_params;
inline void enter() {
  call_kernel(kernel_params);
  fibers[current].ended = true;
  progress++;
}

Result run_block(const void* params);

}  // namespace host

static host::Index threadIdx, blockIdx;

namespace host {

inline Result run_block(const void* params) {
  kernel_params = params;
  for (unsigned i = 0; i < sizeof(dynamic) / 4; i++) memcpy(shared + 4 * i, "\xff\xff\xff\x7f", 4);
  block = {};
  for (int t = 0; t < threads; t++) {
    Fiber& fiber = fibers[t];
    fiber.ended = false;
    fiber.open.clear();
    fiber.groups.clear();
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
    if (t % kWarp == 0) static_cast<Meeting&>(warps[t / kWarp]) = {};
  }
  for (int alive = threads; alive > 0;) {
    const unsigned long long before = progress;
    const int count = threads / kWarp, first = random(count);
    alive = 0;
    for (int i = 0; i < count; i++) {
      const int turns = 1 + random(3);  // a warp may run ahead of the others
      for (int turn = 0; turn < turns; turn++)
        for (int lane = 0; lane < kWarp; lane++) {
          current = (first + i) % count * kWarp + lane;
          threadIdx.x = current;
          if (!fibers[current].ended) swapcontext(&scheduler, &fibers[current].context);
          if (turn == 0) alive += !fibers[current].ended;
        }
    }
    if (fault) return kFault;
    if (alive > 0 && progress == before) return kDeadlock;
  }
  return kDone;
}

}  // namespace host

extern "C" int host_run(const void* params, int grid, int threads, unsigned seed, const host::Range* ranges,
                        int count) {
  host::threads = threads;
  host::random_state = seed;
  host::fault = false;
  host::ranges.assign(ranges, ranges + count);
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
    if (const int result = host::run_block(params)) return result;
  return host::kDone;
}

// ---- CUDA's own functions -------------------------------------------------------------------------------------------

struct float2 { float x, y; };
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

inline void __syncthreads() { host::meet(host::block, host::threads); }
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
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }
