// The roped keys of a tile, in steps: the look-up of pages does not hold up the copy, nor the conversion the products.
//
//   16-bit rope   find pages ... start: copied asynchronously
//   fp8 rope      find pages ... load: into registers, with the scales ... store: widened, into shared memory
//
// Beside 16-bit keys a roped element is exact and its scale is left to the scores, as a scale of the key. Beside fp8 keys,
// which have a scale of their own, it is multiplied by its scale and rounded to 16 bits.
#pragma once
#include "prefill_load.cuh"

struct RopeCopy {
  int page[kTilePasses];
  Chunk<e4m3> elements[kTilePasses];
  float scale[kTilePasses];  // of the elements

  // Row of a key in the cache or the rope tensor; pages past the last key are never looked at.
  MLA_DEVICE static int token(const Item& item, int key) {
    return (MLA_ROPE_KIND == kRopeRagged ? item.k_row : item.k_position) + (key < item.n_keys ? key : item.n_keys - 1);
  }
  MLA_DEVICE Place place(const Item& item, int key, int pass) const {
    Place place = {0, token(item, key)};
    if constexpr (MLA_ROPE_KIND == kRopePaged) place = {page[pass], place.slot % kPageSize};
    if constexpr (MLA_ROPE_KIND == kRopeBatched) place.page = item.sequence;
    return place;
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

  MLA_DEVICE void start(const PrefillParams& p, const Item& item, int tile, uint32_t stage) const {
    if constexpr (kFp8Rope) return;
    const CopyPart part;
    const int first = tile * kBlockN + part.row;
    const uint32_t to = stage + kNopeBytes + part.offset<kQkRowBytes>();
#pragma unroll
    for (int pass = 0; pass < kTilePasses; pass++) {
      const int key = first + pass * kRowsPerPass;
      copy_chunk<Element>(to + pass * kRowsPerPass * kQkRowBytes,
                          token_row(p.rope, place(item, key, pass)) + part.column, key < item.n_keys);
    }
  }

  // Without a tile zeros: what was loaded before need not be kept.
  MLA_DEVICE void load(const PrefillParams& p, const Item& item, int tile) {
    if constexpr (!kFp8Rope) return;
    const CopyPart part;
    const int first = tile * kBlockN + part.row;
#pragma unroll
    for (int pass = 0; pass < kTilePasses; pass++) {
      const int key = first + pass * kRowsPerPass;
      elements[pass] = {};
      scale[pass] = 0.0f;
      if (tile >= 0 && key < item.n_keys) {
        const Place at = place(item, key, pass);
        const uint8_t* row = token_row(p.rope, at) + part.column / int(sizeof(Element));
        elements[pass] = load_chunk_nc(reinterpret_cast<const e4m3*>(row));
        scale[pass] = __ldg(reinterpret_cast<const float*>(token_row(p.scales.rope, at)));
      }
    }
  }

  MLA_DEVICE void store(uint32_t stage) const {
    if constexpr (!kFp8Rope) return;
    const CopyPart part;
    const uint32_t to = stage + kNopeBytes + part.offset<kQkRowBytes>();
#pragma unroll
    for (int pass = 0; pass < kTilePasses; pass++) {
      store_widened(to + pass * kRowsPerPass * kQkRowBytes, elements[pass], kFp8Data ? scale[pass] : 1.0f);
      if (!kFp8Data && part.column == 0)
        st_shared(stage + kKeyScalesAt + 4 * (part.row + pass * kRowsPerPass), scale[pass]);
    }
  }
};
