// Eight consecutive elements of a row, the share of one lane: loaded and stored in the widest accesses that MLA_ALIGNMENT
// (bytes, a power of two up to 16 that divides every address involved) allows.
#pragma once
#include "ptx.cuh"

constexpr int kChunk = 8;  // elements

MLA_DEVICE constexpr int access_bytes(int chunk_bytes) {
  return chunk_bytes < MLA_ALIGNMENT ? chunk_bytes : MLA_ALIGNMENT < 16 ? MLA_ALIGNMENT : 16;
}

template <typename T> struct alignas(access_bytes(kChunk * sizeof(T))) Chunk {
  T v[kChunk];
};

template <typename T> MLA_DEVICE Chunk<T> load_chunk(const T* p) {
  using Access = Bytes<access_bytes(sizeof(Chunk<T>))>;
  Chunk<T> c;
#pragma unroll
  for (int i = 0; i < int(sizeof(c) / sizeof(Access)); ++i)
    reinterpret_cast<Access*>(&c)[i] = reinterpret_cast<const Access*>(p)[i];
  return c;
}

// The same from memory that nothing writes while the kernel runs and that is read once.
template <typename T> MLA_DEVICE Chunk<T> load_chunk_nc(const T* p) {
  using Access = Bytes<access_bytes(sizeof(Chunk<T>))>;
  Chunk<T> c;
#pragma unroll
  for (int i = 0; i < int(sizeof(c) / sizeof(Access)); ++i)
    reinterpret_cast<Access*>(&c)[i] = ld_global_nc_no_allocate(reinterpret_cast<const Access*>(p) + i);
  return c;
}

template <typename T> MLA_DEVICE void store_chunk(T* p, const Chunk<T>& c) {
  using Access = Bytes<access_bytes(sizeof(Chunk<T>))>;
#pragma unroll
  for (int i = 0; i < int(sizeof(c) / sizeof(Access)); ++i)
    reinterpret_cast<Access*>(p)[i] = reinterpret_cast<const Access*>(&c)[i];
}

// From quantised elements, each times `scale`; unquantised ones (To = From) keep their bits.
template <typename To, typename From> MLA_DEVICE Chunk<To> dequantize_chunk(const Chunk<From>& c, float scale) {
  if constexpr (is_same<To, From>) {
    return c;
  } else {
    Chunk<To> result;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) result.v[i] = from_float<To>(to_float(c.v[i]) * scale);
    return result;
  }
}

// To quantised elements, each divided by `scale`; where nothing is quantised (To = From) the bits stay.
template <typename To, typename From> MLA_DEVICE Chunk<To> quantize_chunk(const Chunk<From>& c, float scale) {
  if constexpr (is_same<To, From>) {
    return c;
  } else {
    Chunk<To> result;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) result.v[i] = from_float<To>(to_float(c.v[i]) / scale);
    return result;
  }
}
