// Copies of rows from global to shared memory: asynchronous in pieces as wide as MLA_ALIGNMENT allows, direct where
// that is 2 bytes. Rows that do not count become zeros without being read: what lies past the last key never meets a
// probability, not even a zero one.
#pragma once
#include "prefill_layout.cuh"

constexpr int kLanesPerRow = kSwizzleBytes / 16;  // threads that copy the chunks of one row's 128 bytes
constexpr int kRowsPerPass = MLA_THREADS / kLanesPerRow;
constexpr int kTilePasses = kBlockN / kRowsPerPass;
static_assert(kRowsPerPass % 8 == 0 && kBlockN % kRowsPerPass == 0 && kBlockM % kRowsPerPass == 0,
              "a thread's chunk keeps its place");

MLA_DEVICE void copy_chunk(uint32_t to, const uint8_t* from, bool counts) {
  if constexpr (MLA_ALIGNMENT >= 16) {
    cp_async_cg_16(to, from, counts ? 16 : 0);
  } else if constexpr (MLA_ALIGNMENT >= 4) {
#pragma unroll
    for (int i = 0; i < 16; i += MLA_ALIGNMENT)
      cp_async_ca<MLA_ALIGNMENT>(to + i, from + i, counts ? MLA_ALIGNMENT : 0);
  } else {
    Chunk<Element> chunk = {};
    if (counts) chunk = load_chunk_nc(reinterpret_cast<const Element*>(from));
    st_shared(to, {{chunk.words[0], chunk.words[1], chunk.words[2], chunk.words[3]}});
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
  MLA_DEVICE uint32_t offset(int row_bytes) const { return row * row_bytes + (column ^ (row & 7) << 4); }
};

// ROWS rows of BYTES, of which the first `count` count.
template <int ROWS, int ROW_BYTES, int BYTES>
MLA_DEVICE void copy_rows(uint32_t to, const Element* from, int64_t stride, int count) {
  const CopyPart part;
  const uint8_t* source = reinterpret_cast<const uint8_t*>(from + part.row * stride) + part.column;
  const int64_t step = kRowsPerPass * stride * int(sizeof(Element));
  to += part.offset(ROW_BYTES);
#pragma unroll
  for (int row = 0; row < ROWS; row += kRowsPerPass, source += step)
#pragma unroll
    for (int column = 0; column < BYTES; column += kSwizzleBytes)
      copy_chunk(to + row * ROW_BYTES + column, source + column, part.row + row < count);
}

MLA_DEVICE void copy_q(const PrefillParams& p, const Item& item, uint32_t to) {
  copy_rows<kBlockM, kQkRowBytes, kQkRowBytes>(to, p.q + item.q_row * p.q_stride_t + item.head * p.q_stride_h,
                                               p.q_stride_t, item.rows);
}
MLA_DEVICE void copy_nope(const PrefillParams& p, const Item& item, int tile, uint32_t to) {
  const int first = tile * kBlockN;
  copy_rows<kBlockN, kQkRowBytes, kRopeColumnBytes>(
      to, p.k + (item.k_row + first) * p.k_stride_t + item.head * p.k_stride_h, p.k_stride_t, item.n_keys - first);
}
MLA_DEVICE void copy_v(const PrefillParams& p, const Item& item, int tile, uint32_t to) {
  const int first = tile * kBlockN;
  copy_rows<kBlockN, kVRowBytes, kVRowBytes>(to, p.v + (item.k_row + first) * p.v_stride_t + item.head * p.v_stride_h,
                                             p.v_stride_t, item.n_keys - first);
}

// The roped keys of a tile in two steps, so that the look-up of pages does not hold up the copy.
struct RopeCopy {
  int page[kTilePasses];

  // Row of a key in the cache or the rope tensor; pages past the last key are never looked at.
  MLA_DEVICE static int token(const Item& item, int key) {
    return (MLA_ROPE_KIND == kRopeRagged ? item.k_row : item.k_position) + (key < item.n_keys ? key : item.n_keys - 1);
  }
  MLA_DEVICE void find(const PrefillParams& p, const Item& item, int tile) {
    if (MLA_ROPE_KIND == kRopePaged && tile >= 0) {
      const int first = tile * kBlockN + CopyPart().row;
      const int* pages = page_row(p.page_table, item.sequence);
#pragma unroll
      for (int pass = 0; pass < kTilePasses; pass++)
        page[pass] = __ldg(&pages[token(item, first + pass * kRowsPerPass) / kPageSize]);
    }
  }
  MLA_DEVICE void copy(const PrefillParams& p, const Item& item, int tile, uint32_t to) const {
    const CopyPart part;
    const int first = tile * kBlockN + part.row;
    to += part.offset(kQkRowBytes) + kRopeColumnBytes;
#pragma unroll
    for (int pass = 0; pass < kTilePasses; pass++) {
      const int key = first + pass * kRowsPerPass;
      Place place = {0, token(item, key)};
      if constexpr (MLA_ROPE_KIND == kRopePaged) place = {page[pass], place.slot % kPageSize};
      if constexpr (MLA_ROPE_KIND == kRopeBatched) place.page = item.sequence;
      copy_chunk(to + pass * kRowsPerPass * kQkRowBytes, token_row(p.rope, place) + part.column, key < item.n_keys);
    }
  }
};
