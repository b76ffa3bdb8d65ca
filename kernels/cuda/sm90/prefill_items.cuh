// What the sm_90a prefill kernels hand from role to role: work items, key tiles and their classes, rings of stages.
#pragma once
#include "mask.cuh"
#include "prefill_schedule.cuh"

// A block of query rows of one head of one sequence, as the producer hands it to a row group.
struct alignas(16) Item {
  int q_row;  // first row of q; negative: no more items
  int rows;  // 0 to 64
  int q_position;  // of the first row
  int head;
  int sequence;
  int start;  // position of the sequence's first query
  int k_row;  // row of k and v of key 0
  int k_position;  // of key 0
  int n_keys;
  uint8_t first_class;  // TileClass of the first tile
  uint8_t v_stages;  // in use: 2 where the last row group's Q gives way
  uint8_t last;  // whether its part of the keys was the last to arrive; written by the row group
  uint16_t parts, part;  // of its key tiles it takes every parts-th, from this one on
  int slot;  // of the workspace, for its part; those of the block's other parts lie beside it
};
static_assert(sizeof(Item) == 48, "copied by a lane of few registers");

// What a row group has of the call's `index`-th item, which is of this entry; v_stages apart.
MLA_DEVICE void fill_item(Item& item, const ScheduleEntry& entry, int index, int row_group, int heads,
                          Grouping grouping) {
  const int blocks = row_blocks(entry.new_), tiles = tiles_of(entry.new_, grouping.size);
  const Share share = share_of(entry, index - entry.first_item);
  const TilePosition at = tile_position(share.item, tiles, entry.n_keys, heads);
  const int block = block_of(row_group, at.tile, tiles, blocks, grouping), row = block * kRowsPerGroup,
            left = entry.new_ - row;
  item.q_row = block < 0 ? 0 : entry.q_begin + row;  // negative would mean the end
  item.rows = block < 0 ? 0 : left < kRowsPerGroup ? left : kRowsPerGroup;
  item.q_position = entry.start + row;
  item.head = at.head;
  item.sequence = entry.sequence;
  item.start = entry.start;
  item.k_row = entry.k_begin;
  item.k_position = entry.offset;
  item.n_keys = entry.n_keys;
  item.parts = share.parts;
  item.part = share.part;
  item.slot = slot_of(entry, share, row_group);
}

// What a warpgroup does with a key tile. Values 0 to 2 are those of mask_tile_class.
enum TileClass : uint32_t {
  kHidden = kTileHidden,
  kPartial = kTilePartial,
  kVisible = kTileVisible,
  kHalf = 3,
  kEnd = 4
};

// A key tile and classes, one for each row group, in a word; between them room for the place of its V: bit 0 the stage,
// bit 1 the phase.
constexpr int kTileBits = 18, kPlaceBits = 2, kClassBits = 4;
constexpr uint32_t kTileMask = (1u << kTileBits) - 1, kClassesMask = ~0u << (kTileBits + kPlaceBits);
constexpr uint32_t kEndOfAll = 0x444u << (kTileBits + kPlaceBits);
static_assert(kTileBits + kPlaceBits + kClassBits * kRowGroups <= 32 && kRowGroups <= 3,
              "tile, place and classes fill a word");
MLA_DEVICE constexpr int class_shift(int row_group) { return kTileBits + kPlaceBits + kClassBits * row_group; }
MLA_DEVICE uint32_t class_in(uint32_t word, int row_group) {
  return word >> class_shift(row_group) & ((1 << kClassBits) - 1);
}

// What comes with a K stage: its tile, the place of that tile's V, and the classes of the tile after it.
MLA_DEVICE uint32_t tag_of(uint32_t tile, uint32_t v_place, uint32_t next) {
  return (tile & kTileMask) | v_place << kTileBits | (next & kClassesMask);
}
MLA_DEVICE int tile_in(uint32_t tag) { return tag & kTileMask; }
MLA_DEVICE int v_stage_in(uint32_t tag) { return tag >> kTileBits & 1; }
MLA_DEVICE uint32_t v_phase_in(uint32_t tag) { return tag >> (kTileBits + 1) & 1; }

// A position in a ring of stages. A producer starts one round ahead: its first wait for an empty slot passes.
template <int STAGES> struct Ring {
  uint32_t count;
  MLA_DEVICE int stage() const { return count % STAGES; }
  MLA_DEVICE uint32_t phase() const { return count / STAGES % 2; }
  MLA_DEVICE void advance() { count++; }
};

// Sums of one thread's two rows; m is the reference of the exponent, l this thread's share of the denominator.
struct RowSums { float m[2], l[2]; };
