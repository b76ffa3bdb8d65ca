// Stands in for include/ptx.cuh in kernels built by cuda_execution.py: the same wrappers, in C++.
#pragma once
#include "types.cuh"

inline uint32_t cvta_shared(const void* pointer) {
  return uint32_t(static_cast<const uint8_t*>(pointer) - host::shared);
}

template <int BYTES> struct Bytes;
template <> struct Bytes<1> { uint8_t word; };
template <> struct Bytes<2> { uint16_t word; };
template <> struct Bytes<4> { uint32_t word; };
template <> struct alignas(8) Bytes<8> { uint32_t words[2]; };
template <> struct alignas(16) Bytes<16> { uint32_t words[4]; };

template <int BYTES> Bytes<BYTES> ld_global_nc_no_allocate(const Bytes<BYTES>* p) { return __ldg(p); }

inline void cp_async(uint32_t shared, const void* global, int bytes, int source_bytes) {
  host::copies[host::current].open.push_back({shared, global, bytes, source_bytes});
}
inline void cp_async_cg_16(uint32_t shared, const void* global, int source_bytes) {
  cp_async(shared, global, 16, source_bytes);
}
template <int BYTES> void cp_async_ca(uint32_t shared, const void* global, int source_bytes) {
  cp_async(shared, global, BYTES, source_bytes);
}
inline void cp_async_commit_group() {
  host::Copies& copies = host::copies[host::current];
  copies.groups.push_back(copies.open);
  copies.open.clear();
}
template <int N> void cp_async_wait_group() {
  host::Copies& copies = host::copies[host::current];
  while (copies.groups.size() > N) {
    for (const host::Copy& copy : copies.groups.front()) {
      memset(host::shared + copy.to, 0, copy.bytes);
      if (copy.read > 0 && host::readable(copy.from, copy.read)) memcpy(host::shared + copy.to, copy.from, copy.read);
    }
    copies.groups.pop_front();
  }
}

inline void st_shared(uint32_t shared, const Bytes<16>& v) { memcpy(host::shared + shared, v.words, 16); }
inline void st_shared(uint32_t shared, float x) { memcpy(host::shared + shared, &x, 4); }
inline void st_shared(uint32_t shared, uint32_t word) { memcpy(host::shared + shared, &word, 4); }
inline float ld_shared_f32(uint32_t shared) {
  float x;
  memcpy(&x, host::shared + shared, 4);
  return x;
}
inline float2 ld_shared_v2_f32(uint32_t shared) { return {ld_shared_f32(shared), ld_shared_f32(shared + 4)}; }

// Lane 8 i + r gives the address of row r of matrix i; lane l gets elements 2 (l % 4) and the next of row l / 4.
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  const host::Slot* slots = host::exchange(shared);
  const int lane = host::current % 32;
  for (int i = 0; i < 4; i++)
    memcpy(&r[i], host::shared + host::value<uint32_t>(slots[8 * i + lane / 4]) + lane % 4 * 4, 4);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) {
  const host::Slot* slots = host::exchange(shared);
  const int lane = host::current % 32;
  for (int i = 0; i < 4; i++) {
    uint16_t halves[2];
    for (int e = 0; e < 2; e++)
      memcpy(&halves[e], host::shared + host::value<uint32_t>(slots[8 * i + lane % 4 * 2 + e]) + lane / 4 * 2, 2);
    r[i] = uint32_t(halves[1]) << 16 | halves[0];
  }
}

inline float ex2_approx_ftz(float x) { return exp2f(x); }
inline float rcp_approx_ftz(float x) { return 1.0f / x; }
inline float lg2_approx_ftz(float x) { return log2f(x); }
inline float cvt_f32_f16(uint16_t bits) { return float(bit_cast<_Float16>(bits)); }

inline uint32_t prmt(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t picked = 0;
  for (int i = 0; i < 4; i++) picked |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return picked;
}
inline uint32_t pack_halves(_Float16 low, _Float16 high) {
  return uint32_t(bit_cast<uint16_t>(high)) << 16 | bit_cast<uint16_t>(low);
}
inline _Float16 half_of(uint32_t word, int half) { return bit_cast<_Float16>(uint16_t(word >> 16 * half)); }
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  return pack_halves(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1));
}
inline uint32_t fma_rn_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto fused = [&](int i) {
    return _Float16(double(half_of(a, i)) * double(half_of(b, i)) + double(half_of(c, i)));
  };
  return pack_halves(fused(0), fused(1));
}

template <typename T> uint16_t rounded(float x);
template <> inline uint16_t rounded<fp16>(float x) { return bit_cast<uint16_t>(_Float16(x)); }
template <> inline uint16_t rounded<bf16>(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <typename T> uint32_t cvt_rn_x2(float low, float high) {
  return uint32_t(rounded<T>(high)) << 16 | rounded<T>(low);
}

template <typename T> float element(uint32_t word, int half);
template <> inline float element<fp16>(uint32_t word, int half) { return cvt_f32_f16(uint16_t(word >> 16 * half)); }
template <> inline float element<bf16>(uint32_t word, int half) {
  return __uint_as_float(half ? word & 0xffff0000 : word << 16);
}

// Row g, column 2 t of A lie with lane 4 g + t; so do column g, row 2 t of B (PTX ISA, "Matrix Fragments for
// mma.m16n8k16").
template <typename T> void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands { uint32_t a[4], b[2]; };
  const host::Slot* slots = host::exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = host::current % 32, row = lane / 4;
  for (int e = 0; e < 4; e++) {
    const int column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; k++) {
      const Operands x = host::value<Operands>(slots[row * 4 + k % 8 / 2]),
                     y = host::value<Operands>(slots[column * 4 + k % 8 / 2]);
      d[e] += element<T>(x.a[e / 2 + k / 8 * 2], k % 2) * element<T>(y.b[k / 8], k % 2);
    }
  }
}

// Row g, columns 4 t to 4 t + 3 of A lie with lane 4 g + t; so do column g, rows 4 t to 4 t + 3 of B (PTX ISA, "Matrix
// Fragments for mma.m16n8k32").
inline float e4m3_value(uint32_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = (code & 0x7f) == 0x7f ? NAN
                          : exponent == 0       ? ldexpf(mantissa, -9)
                                                : ldexpf(8 + mantissa, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}
inline void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands { uint32_t a[4], b[2]; };
  const host::Slot* slots = host::exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = host::current % 32, row = lane / 4;
  for (int e = 0; e < 4; e++) {
    const int column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 32; k++) {
      const Operands x = host::value<Operands>(slots[row * 4 + k % 16 / 4]),
                     y = host::value<Operands>(slots[column * 4 + k % 16 / 4]);
      d[e] += e4m3_value(x.a[e / 2 + k / 16 * 2] >> k % 4 * 8 & 0xff) * e4m3_value(y.b[k / 16] >> k % 4 * 8 & 0xff);
    }
  }
}
