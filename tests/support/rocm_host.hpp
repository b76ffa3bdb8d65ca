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
typedef float f32x2 __attribute__((vector_size(8)));

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

// float8_e4m3fnuz, gfx942's: exponent bias 8, 0x80 is NaN.
inline float widened(unsigned char x) {
  if (x == 0x80) return __builtin_nanf("");
  const int exponent = x >> 3 & 15, fraction = x & 7;
  const float size = exponent ? __builtin_ldexpf(8 + fraction, exponent - 11) : __builtin_ldexpf(fraction, -10);
  return x & 0x80 ? -size : size;
}
// To nearest even; beyond the largest, 240, lies NaN.
inline unsigned char narrowed(float x) {
  const float size = __builtin_fabsf(x);
  if (!(size < 248)) return 0x80;
  int exponent;  // size = [0.5, 1) * 2^exponent
  __builtin_frexpf(size, &exponent);
  if (size < 0x1p-7f) exponent = -6;  // subnormals share the step of the smallest normals
  const int steps = int(__builtin_rintf(__builtin_ldexpf(size, 4 - exponent)));  // 8..16; subnormals 0..8
  const int code = ((exponent + 6) << 3) + steps;
  return x < 0 && code ? 0x80 | code : code;
}

// D[32, 32] = A[32, 2 N] B[2 N, 32] + C. Lane l gives A[l % 32][N * (l / 32) + i] and B[N * (l / 32) + i][l % 32], i < N,
// and gets D[(r / 4) * 8 + (l / 32) * 4 + r % 4][l % 32], r < 16 (CDNA3 ISA, "Dense Matrix Layouts").
template <int N, typename V> f32x16 mfma_32x32(V a, V b, f32x16 c) {
  struct Operands { float a[N], b[N]; } mine;
  for (int i = 0; i < N; i++) mine.a[i] = widened(a[i]), mine.b[i] = widened(b[i]);
  const Slot* slots = exchange(mine, "mfma");
  const int column = current % 32, half = current % 64 / 32;
  for (int k = 0; k < 2; k++) {
    const Operands y = value<Operands>(slots[column + 32 * k]);
    for (int r = 0; r < 16; r++) {
      const Operands x = value<Operands>(slots[r / 4 * 8 + half * 4 + r % 4 + 32 * k]);
      for (int i = 0; i < N; i++) c[r] += x.a[i] * y.b[i];
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
  return host::mfma_32x32<4>(a, b, c);
}
inline f32x16 __builtin_amdgcn_mfma_f32_32x32x8f16(h16x4 a, h16x4 b, f32x16 c, int, int, int) {
  return host::mfma_32x32<4>(a, b, c);
}
inline f32x16 __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(long long a, long long b, f32x16 c, int, int, int) {
  typedef unsigned char u8x8 __attribute__((vector_size(8)));
  return host::mfma_32x32<8>(reinterpret_cast<u8x8&>(a), reinterpret_cast<u8x8&>(b), c);
}

inline unsigned __builtin_amdgcn_cvt_pk_fp8_f32(float a, float b, int old, bool high) {
  const unsigned pair = host::narrowed(a) | host::narrowed(b) << 8;
  return high ? pair << 16 | (old & 0xffff) : pair | (unsigned(old) & 0xffff0000);
}
inline f32x2 __builtin_amdgcn_cvt_pk_f32_fp8(int word, bool high) {
  const unsigned pair = unsigned(word) >> (high ? 16 : 0);
  return f32x2{host::widened((unsigned char)pair), host::widened((unsigned char)(pair >> 8))};
}
// Only row_newbcast: lane 16 * (lane / 16) + N of each row of 16.
inline int __builtin_amdgcn_update_dpp(int, int x, int control, int, int, bool) {
  return host::of_lane(x, (host::current & 63 & ~15) + control - 0x150, "row_newbcast");
}
