// Eight consecutive elements of a row, the share of one lane: loaded and stored in the widest accesses that MLA_ALIGNMENT
// (bytes, a power of two up to 16 that divides every address involved) allows.
#pragma once
#include "convert.cuh"

constexpr int kChunk = 8;  // elements

template <typename T> struct Chunk { uint32_t words[kChunk / kPerWord<T>]; };

// Bytes of one access: no less than an element, whose address its type aligns.
template <typename T> constexpr int access_bytes() {
  const int most = int(sizeof(Chunk<T>)) < 16 ? int(sizeof(Chunk<T>)) : 16;
  return MLA_ALIGNMENT < int(sizeof(T)) ? int(sizeof(T)) : MLA_ALIGNMENT < most ? MLA_ALIGNMENT : most;
}

// NC: memory that nothing writes while the kernel runs and that is read once.
template <typename T, bool NC> MLA_DEVICE Chunk<T> load_chunk_by_access(const void* p) {
  constexpr int kBytes = access_bytes<T>();
  Chunk<T> c = {};
#pragma unroll
  for (int i = 0; i < int(sizeof(c)) / kBytes; ++i) {
    const Bytes<kBytes>* source = reinterpret_cast<const Bytes<kBytes>*>(p) + i;
    const Bytes<kBytes> access = NC ? ld_global_nc_no_allocate(source) : *source;
    if constexpr (kBytes >= 8) {
#pragma unroll
      for (int j = 0; j < kBytes / 4; ++j) c.words[i * (kBytes / 4) + j] = access.words[j];
    } else {
      c.words[i * kBytes / 4] |= uint32_t(access.word) << 8 * (i * kBytes % 4);
    }
  }
  return c;
}
template <typename T> MLA_DEVICE Chunk<T> load_chunk(const T* p) { return load_chunk_by_access<T, false>(p); }
template <typename T> MLA_DEVICE Chunk<T> load_chunk_nc(const T* p) { return load_chunk_by_access<T, true>(p); }

template <typename T> MLA_DEVICE void store_chunk(T* p, const Chunk<T>& c) {
  constexpr int kBytes = access_bytes<T>();
#pragma unroll
  for (int i = 0; i < int(sizeof(c)) / kBytes; ++i) {
    Bytes<kBytes> access;
    if constexpr (kBytes >= 8) {
#pragma unroll
      for (int j = 0; j < kBytes / 4; ++j) access.words[j] = c.words[i * (kBytes / 4) + j];
    } else {
      access.word = decltype(access.word)(c.words[i * kBytes / 4] >> 8 * (i * kBytes % 4));
    }
    reinterpret_cast<Bytes<kBytes>*>(p)[i] = access;
  }
}

template <typename T> MLA_DEVICE void unpack_chunk(const Chunk<T>& c, float (&x)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; i += kPerWord<T>) {
    float elements[kPerWord<T>];
    unpack<T>(c.words[i / kPerWord<T>], elements);
#pragma unroll
    for (int j = 0; j < kPerWord<T>; ++j) x[i + j] = elements[j];
  }
}

template <typename T> MLA_DEVICE Chunk<T> pack_chunk(const float (&x)[kChunk]) {
  Chunk<T> c;
#pragma unroll
  for (int i = 0; i < kChunk; i += kPerWord<T>) {
    float elements[kPerWord<T>];
#pragma unroll
    for (int j = 0; j < kPerWord<T>; ++j) elements[j] = x[i + j];
    c.words[i / kPerWord<T>] = pack<T>(elements);
  }
  return c;
}

// From quantised elements, each times `scale`; unquantised ones (To = From) keep their bits.
template <typename To, typename From> MLA_DEVICE Chunk<To> dequantize_chunk(const Chunk<From>& c, float scale) {
  if constexpr (is_same<To, From>) {
    return c;
  } else {
    float x[kChunk];
    unpack_chunk(c, x);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] *= scale;
    return pack_chunk<To>(x);
  }
}

// x / divisor, rounded once: the quotient by the rounded reciprocal, corrected by its exact remainder (Markstein, "Computation of
// elementary functions on the IBM RISC System/6000 processor", 1990). One reciprocal serves many quotients, and there is no
// call as in a division. `small`, the lesser of what is divided and the divisor, says whether to lift both so that remainders
// stay normal.
struct Divisor {
  float divisor, reciprocal, lift;
  MLA_DEVICE Divisor(float divisor_, float small) {
    lift = small < 0x1p-60f ? 0x1p64f : 1.0f;
    divisor = divisor_ * lift;
    reciprocal = rcp_approx_ftz(divisor);
    reciprocal = fmaf(fmaf(-divisor, reciprocal, 1.0f), reciprocal, reciprocal);
  }
  MLA_DEVICE float divide(float x) const {
    x *= lift;
    const float quotient = x * reciprocal;
    return fmaf(fmaf(-quotient, divisor, x), reciprocal, quotient);
  }
};

// To quantised elements, each divided by the scale; where nothing is quantised (To = From) the bits stay.
template <typename To, typename From> MLA_DEVICE Chunk<To> quantize_chunk(const Chunk<From>& c, float scale) {
  if constexpr (is_same<To, From>) {
    return c;
  } else {
    const Divisor divisor(scale, scale);
    float x[kChunk];
    unpack_chunk(c, x);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = divisor.divide(x[i]);
    return pack_chunk<To>(x);
  }
}
