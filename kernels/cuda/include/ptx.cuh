// One wrapper per PTX instruction, named as the ISA names it: what every architecture from sm_80 on has.
#pragma once
#include "types.cuh"

// Shared-memory address of a generic pointer into shared memory.
MLA_DEVICE uint32_t cvta_shared(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// ---- global memory: N bytes at an address aligned to N ---------------------------------------------------------------------

template <int BYTES> struct Bytes;
template <> struct Bytes<1> { uint8_t word; };
template <> struct Bytes<2> { uint16_t word; };
template <> struct Bytes<4> { uint32_t word; };
template <> struct alignas(8) Bytes<8> { uint32_t words[2]; };
template <> struct alignas(16) Bytes<16> { uint32_t words[4]; };

// Read past L1, of memory that nothing writes while the kernel runs.
MLA_DEVICE Bytes<16> ld_global_nc_no_allocate(const Bytes<16>* p) {
  Bytes<16> v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(p));
  return v;
}
MLA_DEVICE Bytes<8> ld_global_nc_no_allocate(const Bytes<8>* p) {
  Bytes<8> v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(v.words[0]), "=r"(v.words[1]) : "l"(p));
  return v;
}
// Narrower accesses touch a sector several times: these want L1.
template <int BYTES> MLA_DEVICE Bytes<BYTES> ld_global_nc_no_allocate(const Bytes<BYTES>* p) {
  return {__ldg(&p->word)};
}

// ---- cp.async ---------------------------------------------------------------------------------------------------------------

// Copy 16 bytes to shared memory past L1; `source_bytes` 0 writes zeros and reads nothing.
MLA_DEVICE void cp_async_cg_16(uint32_t shared, const void* global, int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
}
// Copy 4 or 8 bytes through L1, `source_bytes` as above.
template <int BYTES> MLA_DEVICE void cp_async_ca(uint32_t shared, const void* global, int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(BYTES), "r"(source_bytes)
               : "memory");
}
MLA_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> MLA_DEVICE void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// ---- shared memory ------------------------------------------------------------------------------------------------------------

MLA_DEVICE void st_shared(uint32_t shared, const Bytes<16>& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.words[0]), "r"(v.words[1]),
               "r"(v.words[2]), "r"(v.words[3])
               : "memory");
}

MLA_DEVICE void st_shared(uint32_t shared, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(x) : "memory");
}
MLA_DEVICE void st_shared(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}
MLA_DEVICE float ld_shared_f32(uint32_t shared) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(shared) : "memory");
  return x;
}
MLA_DEVICE float2 ld_shared_v2_f32(uint32_t shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared) : "memory");
  return x;
}

// ---- fragments ----------------------------------------------------------------------------------------------------------------

MLA_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}
MLA_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// D = A B + D for A [16 x 16], B [16 x 8], D [16 x 8] in fp32, spread over a warp.
template <typename T> MLA_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> MLA_DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> MLA_DEVICE void mma_m16n8k16<fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for A [16 x 32], B [32 x 8] in e4m3.
MLA_DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- arithmetic ---------------------------------------------------------------------------------------------------------------

MLA_DEVICE float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MLA_DEVICE float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MLA_DEVICE float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MLA_DEVICE float cvt_f32_f16(uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}
// Four of the eight bytes of `high` and `low`, by a selector's lower four nibbles.
MLA_DEVICE uint32_t prmt(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(selector));
  return y;
}
// Two fp16 values each, in one register.
MLA_DEVICE uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
MLA_DEVICE uint32_t fma_rn_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
// Two values in one register, `low` in the lower half, each rounded to nearest even.
template <typename T> MLA_DEVICE uint32_t cvt_rn_x2(float low, float high);
template <> MLA_DEVICE uint32_t cvt_rn_x2<bf16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <> MLA_DEVICE uint32_t cvt_rn_x2<fp16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
