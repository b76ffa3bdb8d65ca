// From a block's number to its item, and the key tiles of that item from the last to the first.
#pragma once
#include "prefill_layout.cuh"

// Blocks come in slots, one block a head. Sequence b has the slots from slot_begin(b) to slot_begin(b + 1): enough for
// its query tiles wherever it begins, at most one too many, found without sums over the batch. The slots of the whole
// batch are at most T / kBlockM + B.
MLA_DEVICE int slot_begin(const int* cu_seqlens_q, int b) { return (cu_seqlens_q[b] - cu_seqlens_q[0]) / kBlockM + b; }

// The last of `batch` sequences whose first slot is not past `slot`; called by one warp, a 32-ary search.
MLA_DEVICE int sequence_of_slot(const int* cu_seqlens_q, int batch, int slot) {
  const int lane = threadIdx.x & 31;
  int low = 0;
  while (batch > 1) {
    const int step = ceil_div(batch, 32), mine = lane * step;
    const bool before = mine < batch && slot_begin(cu_seqlens_q, low + mine) <= slot;
    const int last = (__popc(__ballot_sync(~0u, before)) - 1) * step;
    low += last;
    batch = batch - last < step ? batch - last : step;
  }
  return low;
}

// Heads whose tiles of one height are neighbours: blocks that run together share keys in L2, and a sequence's longest
// tiles (its last, under a causal mask) start early.
constexpr int kHeadsTogether = 16;

// Called by one warp.
MLA_DEVICE Item find_item(const PrefillParams& p) {
  const int b = sequence_of_slot(p.sequences.cu_seqlens_q, p.batch, blockIdx.x / p.heads);
  const Sequence s = sequence_of(p.sequences, b);
  const int tiles = ceil_div(s.new_, kBlockM);
  const int index = int(blockIdx.x) - slot_begin(p.sequences.cu_seqlens_q, b) * p.heads;
  const int first_head = index / (tiles > 0 ? tiles * kHeadsTogether : 1) * kHeadsTogether;
  const int heads = p.heads - first_head < kHeadsTogether ? p.heads - first_head : kHeadsTogether;
  const int rest = index - first_head * tiles;
  const int row = (tiles - 1 - rest / (heads > 0 ? heads : 1)) * kBlockM, left = s.new_ - row;
  Item item;
  item.q_row = s.q_begin + row;
  item.rows = index >= tiles * p.heads ? 0 : left < kBlockM ? left : kBlockM;
  item.head = first_head + rest % (heads > 0 ? heads : 1);
  item.sequence = b;
  item.q_position = s.start + row;
  item.k_position = s.offset;
  item.n_keys = s.n_keys;
  item.start = s.start;
  item.k_row = s.k_begin;
  return item;
}

// Class of a key tile for the rows [row, row + rows) of an item.
MLA_DEVICE int class_of_tile(const PrefillParams& p, const Item& item, int tile, int row, int rows) {
  const int first = tile * kBlockN, past = first + kBlockN;
  const int end = past < item.n_keys ? past : item.n_keys;
  if (rows <= 0 || first >= end) return kTileHidden;
  const int q = item.q_position + row;
  const int type = mask_tile_class(p.mask, item.sequence, item.head, q, q + rows - 1, item.k_position + first,
                                   item.k_position + end - 1);
  return type == kTileVisible && end < past ? kTilePartial : type;
}

// Tiles that some row of the item sees, from the last to the first; a warp classes 32 at a time, a lane each, and every
// warp finds the same.
struct TileWalk {
  int group;         // of 32 tiles
  uint32_t pending;  // its tiles that are not yet taken

  MLA_DEVICE explicit TileWalk(const Item& item) : group(ceil_div(item.n_keys, 32 * kBlockN)), pending(0) {}

  // The next tile; negative when there are no more.
  MLA_DEVICE int next(const PrefillParams& p, const Item& item) {
    while (pending == 0) {
      if (group == 0) return -1;
      group--;
      pending =
          __ballot_sync(~0u, class_of_tile(p, item, group * 32 + (threadIdx.x & 31), 0, item.rows) != kTileHidden);
    }
    const int top = 31 - __clz(pending);
    pending &= ~(1u << top);
    return group * 32 + top;
  }
};
