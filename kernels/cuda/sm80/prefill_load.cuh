// Copies of rows from global to shared memory: asynchronous in pieces as wide as MLA_ALIGNMENT allows, direct where
// that is less than 4 bytes. Rows that do not count become zeros without being read: what lies past the last key never
// meets a probability, not even a zero one.
#pragma once
#include "prefill_layout.cuh"

constexpr int kCopyBytes = 128;  // of a row, by eight threads
constexpr int kLanesPerRow = kCopyBytes / 16;
constexpr int kRowsPerPass = MLA_THREADS / kLanesPerRow;
constexpr int kTilePasses = kBlockN / kRowsPerPass;
static_assert(kRowsPerPass % 8 == 0 && kBlockN % kRowsPerPass == 0 && kBlockM % kRowsPerPass == 0,
              "a thread's chunk keeps its place");

template <typename T> MLA_DEVICE void copy_chunk(uint32_t to, const uint8_t* from, bool counts) {
  if constexpr (MLA_ALIGNMENT >= 16) {
    cp_async_cg_16(to, from, counts ? 16 : 0);
  } else if constexpr (MLA_ALIGNMENT >= 4) {
#pragma unroll
    for (int i = 0; i < 16; i += MLA_ALIGNMENT)
      cp_async_ca<MLA_ALIGNMENT>(to + i, from + i, counts ? MLA_ALIGNMENT : 0);
  } else {
    Bytes<16> bytes = {};
    if (counts) {
#pragma unroll
      for (int i = 0; i < 4; i += sizeof(Chunk<T>) / 4) {
        const Chunk<T> chunk = load_chunk_nc(reinterpret_cast<const T*>(from + 4 * i));
#pragma unroll
        for (int j = 0; j < int(sizeof(Chunk<T>)) / 4; j++) bytes.words[i + j] = chunk.words[j];
      }
    }
    st_shared(to, bytes);
  }
}

// This thread's part of a copy: a 16-byte column of every kRowsPerPass-th row.
struct CopyPart {
  int row, column;  // column in bytes, before the swizzle
  MLA_DEVICE CopyPart() {
    const int id = thread_id();
    row = id / kLanesPerRow;
    column = id % kLanesPerRow * 16;
  }
  template <int ROW_BYTES> MLA_DEVICE uint32_t offset() const {
    return row * ROW_BYTES + (column ^ swizzle<ROW_BYTES>(row));
  }
};

// ROWS rows of BYTES, of which the first `count` count.
template <int ROWS, int ROW_BYTES, int BYTES, typename T>
MLA_DEVICE void copy_rows(uint32_t to, const T* from, int64_t stride, int count) {
  const CopyPart part;
  const uint8_t* source = reinterpret_cast<const uint8_t*>(from + part.row * stride) + part.column;
  const int64_t step = kRowsPerPass * stride * int(sizeof(T));
  to += part.offset<ROW_BYTES>();
#pragma unroll
  for (int row = 0; row < ROWS; row += kRowsPerPass, source += step)
#pragma unroll
    for (int column = 0; column < BYTES; column += kCopyBytes)
      if (BYTES - column >= kCopyBytes || part.column < BYTES - column)
        copy_chunk<T>(to + row * ROW_BYTES + column, source + column, part.row + row < count);
}

// ROWS scales, of which the first `count` count.
template <int ROWS> MLA_DEVICE void copy_scales(uint32_t to, const float* from, int64_t stride, int count) {
  static_assert(ROWS <= MLA_THREADS, "a thread each");
  const int row = thread_id();
  if (row < ROWS) cp_async_ca<4>(to + 4 * row, from + row * stride, row < count ? 4 : 0);
}

// Eight fp8 elements times a scale, which become 16 bytes of Element.
MLA_DEVICE void store_widened(uint32_t to, const Chunk<e4m3>& chunk, float scale) {
  const Chunk<Element> wide = dequantize_chunk<Element>(chunk, scale);
  st_shared(to, {{wide.words[0], wide.words[1], wide.words[2], wide.words[3]}});
}

MLA_DEVICE void copy_q(const PrefillParams& p, const Item& item, uint32_t shared) {
  const Data* rows = p.q + item.q_row * p.q_stride_t + item.head * p.q_stride_h;
  if constexpr (!kFp8Data) {
    copy_rows<kBlockM, kQkRowBytes, kQkRowBytes>(shared + kOffsetQ, rows, p.q_stride_t, item.rows);
  } else {
    const float* scales = p.scales.q + item.q_row * p.scales.q_stride;
    copy_rows<kBlockM, kQkRowBytes, kNopeBytes>(shared + kOffsetQ, rows, p.q_stride_t, item.rows);
    copy_scales<kBlockM>(shared + kOffsetQScales, scales, p.scales.q_stride, item.rows);
    if constexpr (!kFp8Rope) {
      copy_rows<kBlockM, kQkRowBytes, kQkRowBytes - kNopeBytes>(
          shared + kOffsetQ + kNopeBytes, p.q_rope + item.q_row * p.q_rope_stride_t + item.head * p.q_rope_stride_h,
          p.q_rope_stride_t, item.rows);
    } else {
      const CopyPart part;
      const uint32_t to = shared + kOffsetQ + kNopeBytes + part.offset<kQkRowBytes>();
#pragma unroll 2
      for (int row = part.row; row < kBlockM; row += kRowsPerPass) {
        Chunk<e4m3> chunk = {};
        float scale = 0.0f;
        if (row < item.rows) {
          const Data* rope = rows + row * p.q_stride_t + MLA_NOPE_DIM + part.column / int(sizeof(Element));
          chunk = load_chunk_nc(reinterpret_cast<const e4m3*>(rope));
          scale = __ldg(&scales[row * p.scales.q_stride]);
        }
        store_widened(to + (row - part.row) * kQkRowBytes, chunk, scale);
      }
    }
  }
}

// All of a tile's keys but the roped columns, into a stage.
MLA_DEVICE void copy_nope(const PrefillParams& p, const Item& item, int tile, uint32_t to) {
  const int first = tile * kBlockN, row = item.k_row + first, count = item.n_keys - first;
  copy_rows<kBlockN, kQkRowBytes, kNopeBytes>(to, p.k + row * p.k_stride_t + item.head * p.k_stride_h, p.k_stride_t,
                                              count);
  if constexpr (kFp8Data)
    copy_scales<kBlockN>(to + kKeyScalesAt, p.scales.k + row * p.scales.k_stride, p.scales.k_stride, count);
  if constexpr (kValueScales)
    copy_scales<kBlockN>(to + kValueScalesAt, p.scales.v + row * p.scales.v_stride, p.scales.v_stride, count);
}
