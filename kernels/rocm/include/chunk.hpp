// Eight consecutive elements of a row, the share of one lane, moved in the widest accesses that MLA_ALIGNMENT (bytes, a
// power of two up to 16 that divides every address involved) allows.
#pragma once
#include "types.hpp"

constexpr int kChunk = 8;  // elements

template <typename T> struct Chunk {
  static constexpr int kBytes = kChunk * sizeof(T);
  static constexpr int kAccessBytes = kBytes < MLA_ALIGNMENT ? kBytes : smaller(MLA_ALIGNMENT, 16);
  using Access = typename AccessOf<kAccessBytes>::type;
  union {
    T v[kChunk];
    Access accesses[kBytes / kAccessBytes];
  };
};

template <typename T> MLA_DEVICE Chunk<T> zero_chunk() {
  Chunk<T> c;
#pragma unroll
  for (auto& access : c.accesses) access = typename Chunk<T>::Access{};
  return c;
}

template <typename T> MLA_DEVICE Chunk<T> load_chunk(const void* p) {
  Chunk<T> c;
#pragma unroll
  for (int i = 0; i < int(sizeof(c.accesses) / sizeof(c.accesses[0])); ++i)
    c.accesses[i] = load_global<typename Chunk<T>::Access>(static_cast<const typename Chunk<T>::Access*>(p) + i);
  return c;
}

template <typename T> MLA_DEVICE void store_chunk(void* p, const Chunk<T>& c) {
#pragma unroll
  for (int i = 0; i < int(sizeof(c.accesses) / sizeof(c.accesses[0])); ++i)
    store_global(static_cast<typename Chunk<T>::Access*>(p) + i, c.accesses[i]);
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
