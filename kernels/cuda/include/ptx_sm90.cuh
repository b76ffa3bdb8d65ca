// One wrapper per PTX instruction, named as the ISA names it: what Hopper adds.
#pragma once
#include "ptx.cuh"

// TMA descriptor as a kernel parameter; the host places it at a multiple of 64 bytes.
struct alignas(64) TensorMap { uint8_t bytes[128]; };

MLA_DEVICE void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- mbarrier -------------------------------------------------------------------------------------------------------

MLA_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes fresh barriers visible to the copy engine.
MLA_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MLA_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same if `made`, without a branch of the source.
MLA_DEVICE void mbarrier_arrive_if(bool made, uint32_t barrier) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n @p mbarrier.arrive.shared::cta.b64 _, [%1];\n}" ::"r"(
                   uint32_t(made)),
               "r"(barrier)
               : "memory");
}
MLA_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
MLA_DEVICE bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
// Returns once the phase of the given parity has completed. The loop is in PTX, so that ptxas sees no branch of the
// source between products in flight.
MLA_DEVICE void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred p;\nWAIT_%=:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra DONE_%=;\n"
      " bra WAIT_%=;\nDONE_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Whether the phase of the given parity has completed; waits for nothing.
MLA_DEVICE bool mbarrier_test_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
// mbarrier_wait_parity, unless that test has told that the phase has completed.
MLA_DEVICE void mbarrier_wait_parity_unless(bool completed, uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p bra DONE_%=;\nWAIT_%=:\n"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra DONE_%=;\n bra WAIT_%=;\nDONE_%=:\n}" ::"r"(
          barrier),
      "r"(parity), "r"(uint32_t(completed))
      : "memory");
}
// This thread's cp.async copies so far arrive on the barrier when they land, without counting as one more arrival.
MLA_DEVICE void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- proxies, registers, grids --------------------------------------------------------------------------------------

// Shared memory written by ordinary stores becomes visible to wgmma and TMA.
MLA_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int REGISTERS> MLA_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> MLA_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- wgmma ordering -------------------------------------------------------------------------------------------------

MLA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MLA_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> MLA_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// One thread of a converged warp.
MLA_DEVICE bool elect_sync() {
  uint32_t elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// ---- TMA ------------------------------------------------------------------------------------------------------------

// L2 cache policies as createpolicy would make them for the whole access.
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictLast = 0x14F0000000000000;

// Loads the map's box at element coordinates (c0, c1, c2), fastest first; its bytes complete on the barrier.
MLA_DEVICE void cp_async_bulk_tensor_3d(uint32_t shared, const TensorMap& map, int c0, int c1, int c2, uint32_t barrier,
                                        uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
      : "memory");
}

// The same for `bytes` in a row, a multiple of 16, as both addresses are.
MLA_DEVICE void cp_async_bulk(uint32_t shared, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Brings the line of an address into L2.
MLA_DEVICE void prefetch_global_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }
// Brings the map's box into L2.
MLA_DEVICE void cp_async_bulk_prefetch_tensor_3d(const TensorMap& map, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map), "r"(c0), "r"(c1),
               "r"(c2)
               : "memory");
}

// ---- shared memory --------------------------------------------------------------------------------------------------

// Loads that stay where they are written, so that they take no registers before.
MLA_DEVICE uint2 ld_shared_v2_b32(uint32_t shared) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
  return v;
}
MLA_DEVICE float4 ld_shared_v4_f32(uint32_t shared) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}
MLA_DEVICE void st_shared_f32(uint32_t shared, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(v) : "memory");
}

// ---- global memory --------------------------------------------------------------------------------------------------

// Of memory that nothing writes while the kernel runs; keeps its place among other such loads.
MLA_DEVICE int ld_global_nc_in_order(const int* p) {
  int v;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
MLA_DEVICE float ld_global_nc_in_order(const float* p) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}

// Stores that are no branches of the source; one that is not made may have any address.
MLA_DEVICE void st_global_f32_if(bool made, float* to, float x) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n @p st.global.f32 [%1], %2;\n}" ::"r"(uint32_t(made)),
               "l"(to), "f"(x)
               : "memory");
}
MLA_DEVICE void st_global_v2_f32_if(bool made, void* to, float x, float y) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n @p st.global.v2.f32 [%1], {%2, %3};\n}" ::"r"(uint32_t(made)),
      "l"(to), "f"(x), "f"(y)
      : "memory");
}
MLA_DEVICE void st_global_v4_b32_if(bool made, void* to, const uint32_t (&words)[4]) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n @p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                   uint32_t(made)),
               "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// ---- fragments ------------------------------------------------------------------------------------------------------

// Lane 8 i + r gives the address of row r of matrix i, whose elements 2 t and 2 t + 1 are the word of lane 4 r + t.
MLA_DEVICE void stmatrix_x4(uint32_t shared, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
// Four values, the first in the lowest byte, each rounded to nearest even; past +-448 it is +-448.
MLA_DEVICE uint32_t cvt_rn_satfinite_e4m3x4(float a, float b, float c, float d) {
  uint32_t y;
  asm("{\n .reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n mov.b32 %0, {low, high};\n}"
      : "=r"(y)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
}

// `x` is computed here, not where it is used.
MLA_DEVICE void compute_here(uint32_t& x) { asm volatile("" : "+r"(x)); }

// ---- named barriers, dependent grids --------------------------------------------------------------------------------

MLA_DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Whether `x` holds for any thread of the barrier; waits for all of them.
MLA_DEVICE bool bar_red_or(int barrier, int threads, bool x) {
  uint32_t any;
  asm volatile("{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n bar.red.or.pred q, %1, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"(barrier), "r"(threads), "r"(uint32_t(x))
               : "memory");
  return any != 0;
}

// The next grid of the stream may start once every block has said so or ended.
MLA_DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits until the grids this one was launched behind have ended and their writes are visible.
MLA_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- special registers, read where they are asked for instead of kept in a register of the thread -------------------

MLA_DEVICE int tid_x() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
MLA_DEVICE int nctaid_x() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}
