// Which key tiles an item works on, and what each block of its rows does with them. Included behind a layout that defines
// PrefillParams and kBlockN.
#pragma once
#include "prefill_items.cuh"

// Number of the next item that no thread block has taken; the first ones are theirs by their own numbers.
MLA_DEVICE int claim(const PrefillParams& p) {
  int item = 0;
  if ((threadIdx.x & 31) == 0) item = atomicAdd(&p.counters[0], 1) + nctaid_x();
  return __shfl_sync(~0u, item, 0);
}

// Visible key tiles of an item from the last to the first, 32 of its own classed at a time, a lane each.
struct TileWalk {
  int chunk;  // of 32 tiles; the one in `pending`
  uint32_t pending;  // its visible tiles not yet taken
  uint32_t word;  // this lane's tile and its classes
};

// Class of keys [first, end) for one row group.
MLA_DEVICE uint32_t class_of_keys(const PrefillParams& p, const Item& item, int first, int end) {
  return mask_tile_class(p.mask, item.sequence, item.head, item.q_position, item.q_position + item.rows - 1,
                         item.k_position + first, item.k_position + end - 1);
}

// A tile and its classes for all row groups; without classes it is hidden from all.
MLA_DEVICE uint32_t class_tile(const PrefillParams& p, const Item* items, int tile) {
  const int first = tile * kBlockN, middle = first + kBlockN / 2, past = first + kBlockN;
  const int end = past < items->n_keys ? past : items->n_keys;
  uint32_t word = tile & kTileMask;
#pragma unroll 1
  for (int group = 0; group < kRowGroups; group++) {
    const Item& item = items[group];
    if (item.rows <= 0 || first >= end) continue;
    uint32_t type = class_of_keys(p, item, first, end);
    if (type == kVisible && end < past) type = kPartial;
    if (type == kPartial && (middle >= end || class_of_keys(p, item, middle, end) == kHidden)) type = kHalf;
    word |= type << class_shift(group);
  }
  return word;
}

MLA_DEVICE TileWalk walk_of(const Item& item) {
  constexpr int kChunk = 32 * kBlockN;
  return {item.parts == 1 ? ceil_div(item.n_keys, kChunk) : ceil_div(item.n_keys, kChunk * item.parts), 0, 0};
}

// The next tile, or kEndOfAll.
MLA_DEVICE uint32_t next_tile(const PrefillParams& p, const Item* items, TileWalk& walk) {
  while (walk.pending == 0) {
    if (walk.chunk == 0) return kEndOfAll;
    walk.chunk--;
    walk.word = class_tile(p, items, (walk.chunk * 32 + (threadIdx.x & 31)) * items->parts + items->part);
    walk.pending = __ballot_sync(~0u, (walk.word & kClassesMask) != 0);
  }
  const int top = 31 - __clz(walk.pending);
  walk.pending &= ~(1u << top);
  return __shfl_sync(~0u, walk.word, top);
}
