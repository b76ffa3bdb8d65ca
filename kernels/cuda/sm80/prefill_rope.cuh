// The roped keys of a tile, in steps: the look-up of pages does not hold up the copy, nor the conversion the products.
//
//   16-bit rope   find pages ... start: copied asynchronously
//   fp8 rope      find pages ... load: into registers, with the scales ... store: widened, into shared memory
//
// Beside 16-bit keys a roped element is exact and its scale is left to the scores, as a scale of the key. Beside fp8 keys,
// which have a scale of their own, it is multiplied by its scale and rounded to 16 bits.
#pragma once
#include "prefill_load.cuh"

// Eight lanes copy a row in each pass. What all of them need of a row, its page and its scale, is held by one: the n-th
// lane has that of the n-th pass's row.
struct RopeCopy {
  uint32_t page;
  float scale;
  Chunk<e4m3> elements[kTilePasses];

  // Row of a key in the cache or the rope tensor. Past the last key it is the last one's again, which is there.
  MLA_DEVICE static uint32_t token(const Item& item, int key) {
    return (MLA_ROPE_KIND == kRopeRagged ? item.k_row : item.k_position) + (key < item.n_keys ? key : item.n_keys - 1);
  }
  MLA_DEVICE static Place place(const Item& item, int key, uint32_t page) {
    const uint32_t row = token(item, key);
    if constexpr (MLA_ROPE_KIND == kRopePaged) return {int(page), int(row % kPageSize)};
    return {MLA_ROPE_KIND == kRopeBatched ? item.sequence : 0, int(row)};
  }
  static_assert(kLanesPerRow % kTilePasses == 0, "a lane of a row for each pass");
  MLA_DEVICE static int held_key(int tile) {
    return tile * kBlockN + CopyPart().row + thread_id() % kTilePasses * kRowsPerPass;
  }
  template <typename T> MLA_DEVICE static T of_pass(T held, int pass) {
    return __shfl_sync(~0u, held, (threadIdx.x & 24) + pass);
  }

  MLA_DEVICE void find(const PrefillParams& p, const Item& item, int tile) {
    if (MLA_ROPE_KIND == kRopePaged && tile >= 0)
      page = __ldg(&page_row(p.page_table, item.sequence)[token(item, held_key(tile)) / kPageSize]);
  }

  MLA_DEVICE void start(const PrefillParams& p, const Item& item, int tile, uint32_t stage) const {
    if constexpr (!kFp8Rope) {
      const CopyPart part;
      const int first = tile * kBlockN + part.row;
      const uint32_t to = stage + kNopeBytes + part.offset<kQkRowBytes>();
#pragma unroll
      for (int pass = 0; pass < kTilePasses; pass++) {
        const int key = first + pass * kRowsPerPass;
        const uint8_t* from = token_row(p.rope, place(item, key, of_pass(page, pass))) + part.column;
        copy_chunk<Element>(to + pass * kRowsPerPass * kQkRowBytes, from, key < item.n_keys);
      }
    }
  }

  // Without a tile zeros: what was loaded before need not be kept.
  MLA_DEVICE void load(const PrefillParams& p, const Item& item, int tile) {
    if constexpr (kFp8Rope) {
      const CopyPart part;
      const int first = tile * kBlockN + part.row;
      scale = 0.0f;
#pragma unroll
      for (int pass = 0; pass < kTilePasses; pass++) elements[pass] = {};
      if (tile < 0) return;
#pragma unroll
      for (int pass = 0; pass < kTilePasses; pass++) {
        const uint8_t* row = token_row(p.rope, place(item, first + pass * kRowsPerPass, of_pass(page, pass)));
        elements[pass] = load_chunk_nc(reinterpret_cast<const e4m3*>(row + part.column / int(sizeof(Element))));
      }
      const Place at = place(item, held_key(tile), page);
      scale = __ldg(reinterpret_cast<const float*>(token_row(p.scales.rope, at)));
    }
  }

  MLA_DEVICE void store(uint32_t stage) const {
    if constexpr (kFp8Rope) {
      const CopyPart part;
      const uint32_t to = stage + kNopeBytes + part.offset<kQkRowBytes>();
#pragma unroll
      for (int pass = 0; pass < kTilePasses; pass++)
        store_widened(to + pass * kRowsPerPass * kQkRowBytes, elements[pass], kFp8Data ? of_pass(scale, pass) : 1.0f);
      if (!kFp8Data && part.column / 16 < kTilePasses) st_shared(stage + kKeyScalesAt + 4 * held_key(0), scale);
    }
  }
};
