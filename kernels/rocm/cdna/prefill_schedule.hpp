// Order of work of a prefill call, worked out by each wave from the lengths of the sequences: no table, no kernel
// before this one.
//
// A slot is a tile of kBlockM queries of one sequence; the grid has heads along x, slots along y and z. Heads are
// innermost: neighbouring workgroups go to different XCDs, so a head's keys stay in one XCD's L2 when the heads are a
// multiple of 8. The tiles of a sequence go from the last, with a causal mask the longest, to the first. Up to 64
// sequences are taken by falling key count, a lane each; more in the order of the batch. Results do not depend on the
// order.
#pragma once
#include "prefill_tile.hpp"
#include "ragged.hpp"

struct Slot {
  int sequence;
  int tile;  // counted from the last; negative: the slot has none
};

// Sequences by falling key count; a lane counts the tiles of those before its own.
MLA_DEVICE Slot sorted_slot(const SequenceArgs& args, int batch_size, int slot) {
  const int lane = lane_id();
  int keys = -1, tiles = 0, first = 0;
  if (lane < batch_size) {
    const Sequence s = geometry_of(args, lane);
    keys = s.n_keys;
    tiles = ceil_div(s.new_, kBlockM);
  }
  for (int other = 0; other < batch_size; ++other) {
    const int other_keys = __builtin_amdgcn_readlane(keys, other),
              other_tiles = __builtin_amdgcn_readlane(tiles, other);
    first += other_keys > keys || (other_keys == keys && other < lane) ? other_tiles : 0;
  }
  const uint64_t owner = ballot(first <= slot && slot < first + tiles);
  if (owner == 0) return {0, -1};
  const int sequence = __builtin_ctzll(owner);
  return {sequence, slot - __builtin_amdgcn_readlane(first, sequence)};
}

// Sequence b owns the slots from (rows of q before it) / kBlockM + b on, which are never fewer than its tiles.
MLA_DEVICE Slot batch_slot(const SequenceArgs& args, int batch_size, int slot) {
  const int* rows = args.cu_seqlens_q;
  const int base = rows[0];
  const auto first_slot = [&](int b) { return (rows[b] - base) / kBlockM + b; };
  if (slot >= first_slot(batch_size)) return {0, -1};
  const int sequence = sequence_of(first_slot, batch_size, slot);
  const int tile = slot - first_slot(sequence);
  return {sequence, tile < ceil_div(rows[sequence + 1] - rows[sequence], kBlockM) ? tile : -1};
}

MLA_DEVICE Slot find_slot(const SequenceArgs& args, int batch_size, int slot) {
  return batch_size <= kWaveSize ? sorted_slot(args, batch_size, slot) : batch_slot(args, batch_size, slot);
}
