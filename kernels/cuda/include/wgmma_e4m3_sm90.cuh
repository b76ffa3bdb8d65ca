// wgmma.mma_async of e4m3, one wrapper per shape: 64 x N x 32, fp32 accumulators in registers as those of
// wgmma_sm90.cuh. Both operands are K-major (rows of consecutive k); A may come from registers: word 2u + r of a thread
// holds row q + 8r, columns 16u + 4t to 16u + 4t + 3 (q = lane / 4, t = lane % 4).
#pragma once
#include "wgmma_sm90.cuh"

// The low word of a descriptor, all of it that depends on the operand's address.
MLA_DEVICE uint32_t wgmma_start(uint32_t shared) { return (shared & 0x3ffff) >> 4 | 1u << 16; }
// Descriptor of a K-major operand with rows of BYTES (64 or 128), swizzled by as much, in atoms of 8 rows; `step` bytes
// into its rows, which carries nothing out of the low word. From that word; from the operand's address.
template <int BYTES> MLA_DEVICE uint64_t wgmma_k_major_from(uint32_t start, int step) {
  static_assert(BYTES == 64 || BYTES == 128, "a swizzle");
  constexpr uint64_t kMode = BYTES == 128 ? 1 : 2;
  return (start + (step >> 4)) | uint64_t(8 * BYTES >> 4) << 32 | kMode << 62;
}
template <int BYTES> MLA_DEVICE uint64_t wgmma_k_major(uint32_t shared, int step) {
  return wgmma_k_major_from<BYTES>(wgmma_start(shared), step);
}

// d = a * b, plus d if `accumulate`: both operands in shared memory; a in registers.
template <int N> MLA_DEVICE void wgmma_e4m3_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate);
template <int N> MLA_DEVICE void wgmma_e4m3_rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, bool accumulate);

// clang-format off
template <> MLA_DEVICE void wgmma_e4m3_ss<64>(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
               " wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3\n"
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14,\n"
               " %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29,\n"
               " %30, %31}\n"
               " , %32, %33, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
                 "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
                 "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
                 "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "l"(a), "l"(b), "r"(int(accumulate)));
}
template <> MLA_DEVICE void wgmma_e4m3_ss<128>(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
               " wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3\n"
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14,\n"
               " %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29,\n"
               " %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44,\n"
               " %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59,\n"
               " %60, %61, %62, %63}\n"
               " , %64, %65, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
                 "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
                 "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
                 "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
                 "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                 "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
                 "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
                 "+f"(d[63])
               : "l"(a), "l"(b), "r"(int(accumulate)));
}
template <> MLA_DEVICE void wgmma_e4m3_rs<128>(float (&d)[64], const uint32_t* a, uint64_t b, bool accumulate) {
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %69, 0;\n"
               " wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3\n"
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14,\n"
               " %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29,\n"
               " %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44,\n"
               " %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59,\n"
               " %60, %61, %62, %63}\n"
               " , {%64, %65, %66, %67}, %68, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
                 "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
                 "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
                 "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
                 "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                 "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
                 "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
                 "+f"(d[63])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
}
template <> MLA_DEVICE void wgmma_e4m3_rs<136>(float (&d)[68], const uint32_t* a, uint64_t b, bool accumulate) {
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %73, 0;\n"
               " wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3\n"
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14,\n"
               " %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29,\n"
               " %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44,\n"
               " %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59,\n"
               " %60, %61, %62, %63, %64, %65, %66, %67}\n"
               " , {%68, %69, %70, %71}, %72, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
                 "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
                 "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
                 "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
                 "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                 "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
                 "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
                 "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
}
// clang-format on
