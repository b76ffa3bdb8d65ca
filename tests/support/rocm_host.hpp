// HIP C++ for CDNA2 and CDNA3 as host C++, on the fibers of host_fibers.hpp: the compiler's built-ins that the kernels
// use, each doing what its instruction does. An exchange needs every lane of the wave, a barrier every work-item of the
// workgroup at one line of the source: who has left, or waits elsewhere, is reported.
//
// LDS starts as NaN in every workgroup. A wave is in step at its exchanges and at its stores to global memory; between
// them its lanes run one after the other.
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static __attribute__((section("lds")))  // static: one workgroup runs at a time

typedef short s16x4 __attribute__((vector_size(8)));
typedef _Float16 h16x4 __attribute__((vector_size(8)));
typedef float f32x16 __attribute__((vector_size(64)));

extern "C" {  // the linker's names for the section's ends; null in a kernel without LDS
extern unsigned char __start_lds[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_lds[] __attribute__((weak, visibility("hidden")));
}

namespace host {

inline void start_block() { memset(__start_lds, 0xff, __stop_lds - __start_lds); }
inline void start_thread(int) {}

template <typename T> T load(const void* p) {
  T x{};
  if (readable(p, sizeof(T))) memcpy(&x, p, sizeof(T));
  return x;
}
// After the loads that the other lanes of the wave do before theirs.
template <typename T> void store(void* p, const T& x) {
  progress++;
  yield();
  if (readable(p, sizeof(T))) memcpy(p, &x, sizeof(T));
}

template <typename T> T of_lane(T x, int lane, const char* what) { return value<T>(exchange(x, what)[lane & 63]); }

inline float widened(short x) {
  const unsigned bits = unsigned(static_cast<unsigned short>(x)) << 16;
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}
inline float widened(_Float16 x) { return float(x); }

// D[32, 32] = A[32, 8] B[8, 32] + C. Lane l gives A[l % 32][4 * (l / 32) + i] and B[4 * (l / 32) + i][l % 32], i < 4, and
// gets D[(r / 4) * 8 + (l / 32) * 4 + r % 4][l % 32], r < 16 (CDNA3 ISA, "Dense Matrix Layouts").
template <typename V> f32x16 mfma_32x32x8(V a, V b, f32x16 c) {
  struct Operands { float a[4], b[4]; } mine;
  for (int i = 0; i < 4; i++) mine.a[i] = widened(a[i]), mine.b[i] = widened(b[i]);
  const Slot* slots = exchange(mine, "mfma");
  const int column = current % 32, half = current % 64 / 32;
  for (int k = 0; k < 2; k++) {
    const Operands y = value<Operands>(slots[column + 32 * k]);
    for (int r = 0; r < 16; r++) {
      const Operands x = value<Operands>(slots[r / 4 * 8 + half * 4 + r % 4 + 32 * k]);
      for (int i = 0; i < 4; i++) c[r] += x.a[i] * y.b[i];
    }
  }
  return c;
}

}  // namespace host

inline int __builtin_amdgcn_workitem_id_x() { return host::current; }
inline int __builtin_amdgcn_workgroup_id_x() { return host::block_index.x; }
inline int __builtin_amdgcn_workgroup_id_y() { return host::block_index.y; }
inline int __builtin_amdgcn_workgroup_id_z() { return host::block_index.z; }

inline void __builtin_amdgcn_fence(int, const char*) {}
inline void __builtin_amdgcn_s_waitcnt(int) {}
inline void __builtin_amdgcn_s_barrier(const char* file, int line) {
  host::meet(host::block, host::threads, {"a barrier", file, line});
}

// Of the lanes that are active, which need not be all: kernels ask it only for what is the same in all of them.
inline int __builtin_amdgcn_readfirstlane(int x) { return x; }
inline int __builtin_amdgcn_readlane(int x, int lane) { return host::of_lane(x, lane, "readlane"); }
inline int __builtin_amdgcn_ds_bpermute(int address, int x) { return host::of_lane(x, address / 4, "ds_bpermute"); }
// One bit a lane; 33, the one predicate that kernels use, is "not equal".
inline unsigned long long __builtin_amdgcn_uicmp(unsigned a, unsigned b, int) {
  const host::Slot* slots = host::exchange(a != b, "ballot");
  unsigned long long bits = 0;
  for (int lane = 0; lane < 64; lane++) bits |= (unsigned long long)host::value<bool>(slots[lane]) << lane;
  return bits;
}

// Byte i of the result is byte (selector >> 8 * i) % 8 of the pair, `low` being bytes 0-3.
inline unsigned __builtin_amdgcn_perm(unsigned high, unsigned low, unsigned selector) {
  const unsigned long long pair = (unsigned long long)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= unsigned(pair >> (selector >> 8 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline float __builtin_amdgcn_rcpf(float x) { return 1.0f / x; }

inline f32x16 __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(s16x4 a, s16x4 b, f32x16 c, int, int, int) {
  return host::mfma_32x32x8(a, b, c);
}
inline f32x16 __builtin_amdgcn_mfma_f32_32x32x8f16(h16x4 a, h16x4 b, f32x16 c, int, int, int) {
  return host::mfma_32x32x8(a, b, c);
}
