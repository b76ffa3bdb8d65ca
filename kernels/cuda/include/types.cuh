// Fixed-width names, storage types and compile-time helpers. NVRTC needs no system header for them.
#pragma once

#define MLA_DEVICE __device__ __forceinline__

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;

static_assert(sizeof(uint32_t) == 4 && sizeof(uint64_t) == 8, "CUDA's data model");

// Storage types: bits that conversions alone read.
struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };  // OCP float8_e4m3fn: no infinities, 0x7f and 0xff are NaN, largest value 448

constexpr float kE4m3Max = 448.0f;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <typename A, typename B> constexpr bool is_same = false;
template <typename A> constexpr bool is_same<A, A> = true;

MLA_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
MLA_DEVICE constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

MLA_DEVICE float infinity() { return __int_as_float(0x7f800000); }
