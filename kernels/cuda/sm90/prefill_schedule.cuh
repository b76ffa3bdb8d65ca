// The order of work of a prefill call, from the lengths of its sequences: computed on the device, the same in every
// block.
//
// An item is up to kRowGroups blocks of 64 query rows of one head: they share its keys and values as these stream by.
// What a row computes does not depend on the rows it is grouped with: grouping and order follow the batch, results do
// not.
//   Many items: groups of neighbouring blocks. Sequences by falling key count; heads in groups whose keys and values
//   fit L2; in a group, blocks from the last (with a causal mask the longest) to the first, heads innermost. No more
//   than one item for each thread block of the grid: as few blocks an item as that takes, long ones with short ones, so
//   that all items end at about the same time.
//
//
// Where the last wave of a sequence alone would leave many multiprocessors idle, the keys of that wave's items are
// worked on in parts, an item each, and the parts combined: part i of n takes key tiles i, i + n, ..., which balances
// under any mask. Which and how many depends on the sequence's own lengths, the heads and the device, as the result does.
//
// The host defines MLA_NOPE_DIM, MLA_V_DIM, MLA_ROW_GROUPS.
#pragma once
#include "sequence.cuh"

constexpr int kRowGroups = MLA_ROW_GROUPS;
constexpr int kRowsPerGroup = 64;

// Keys and values of a head group; an H200 has 50 MiB of L2 in two halves, and a block reads from both.
constexpr int kGroupBytes = 16 << 20;
constexpr int kKeyBytes = 2 * (MLA_NOPE_DIM + MLA_V_DIM);

// How many blocks of rows an item has, and whether they are spread over the sequence.
struct Grouping {
  int size;
  int spread;
};

// One sequence, in the order of work. A table of n sequences ends with an entry for the whole: the number of items and
// the grouping.
struct alignas(16) ScheduleEntry {
  int first_item;
  int sequence;
  int q_begin, new_;
  int k_begin, n_keys;
  int offset, start;
  int whole;  // its first items, each with all of their keys; of the others
  int parts;  // of the keys of each
  int first_slot;  // of the workspace, a slot for each part of each of their blocks of rows
};
constexpr int kTableSequences = 32;  // what one warp sorts, a lane each
constexpr int kTableBytes = (kTableSequences + 1) * int(sizeof(ScheduleEntry));

// The first `whole` items of a sequence have all of their keys, of the others' keys there are `parts`.
struct Split { int whole, parts; };

MLA_DEVICE ScheduleEntry entry_of(const Sequence& s, int sequence, int first_item, Split split, int first_slot) {
  return {first_item, sequence, s.q_begin,   s.new_,      s.k_begin, s.n_keys,
          s.offset,   s.start,  split.whole, split.parts, first_slot};
}
MLA_DEVICE ScheduleEntry total_entry(int items, Grouping grouping) {
  return {items, grouping.size, grouping.spread, 0, 0, 0, 0, 0, 0, 0, 0};
}
MLA_DEVICE Grouping grouping_of(const ScheduleEntry& total) { return {total.sequence, total.q_begin}; }

MLA_DEVICE int row_blocks(int new_) { return new_ > 0 ? ceil_div(new_, kRowsPerGroup) : 0; }
// Divides by constants: a producer counts every item before it can load anything.
MLA_DEVICE int tiles_of(int new_, int group_size) {
  static_assert(kRowGroups <= 3, "all sizes");
  const int blocks = row_blocks(new_);
  return group_size == 1 ? blocks : group_size == 2 ? ceil_div(blocks, 2) : ceil_div(blocks, 3);
}

// A part has at least so many keys, and waits and writes for as long as it would take for so many others. Parts fill at
// most so many waves, and are made where they spare a share of at least 1 in kLeastGain of the time.
constexpr int kLeastPart = 2048, kPartCost = 512, kSplitWaves = 4, kLeastGain = 50;

// The split of a sequence that makes it, alone on the device, end the earliest; processors: multiprocessors of the device,
// 0 for no parts.
MLA_DEVICE Split split_of(int new_, int n_keys, int heads, int processors) {
  const int items = tiles_of(new_, kRowGroups) * heads, most = n_keys / kLeastPart;
  Split split{items, 1};
  if (processors > 0 && most > 1) {
    const int rest = items % processors;
    const int64_t all = int64_t(ceil_div(items, processors)) * n_keys;
    int least = n_keys;  // of the last wave
#pragma unroll 1
    for (int waves = 1; waves <= kSplitWaves && rest > 0; waves++) {
      const int filling = waves * processors / rest, parts = filling < most ? filling : most;
      const int cost = waves * (n_keys / parts + kPartCost);
      if (parts > 1 && cost < least && (n_keys - cost) >= all / kLeastGain) least = cost, split = {items - rest, parts};
    }
  }
  return split;
}
// Of a sequence that would have so many items without parts.
MLA_DEVICE int items_of(Split split, int items) { return split.whole + (items - split.whole) * split.parts; }
MLA_DEVICE int slots_of(Split split, int items) {
  return split.parts > 1 ? (items - split.whole) * split.parts * kRowGroups : 0;
}

// items[i]: items of the batch with i + 1 blocks each. Parts want all of the row groups.
MLA_DEVICE Grouping choose_grouping(const int (&items)[kRowGroups], int grid, bool in_parts) {
#pragma unroll
  for (int i = 0; i < kRowGroups; i++)
    if (items[i] <= grid && !in_parts) return {i + 1, 1};
  return {kRowGroups, 0};
}

MLA_DEVICE int warp_sum(int x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Builds the table of up to 32 sequences; called by one warp.
MLA_DEVICE void build_table(const SequenceArgs& args, int batch, int heads, int grid, ScheduleEntry* table,
                            int processors = 0) {
  const int lane = threadIdx.x & 31;
  Sequence s{};
  s.n_keys = -1;  // after all others
  if (lane < batch) s = sequence_of(args, lane);
  const Split split = split_of(s.new_, s.n_keys, heads, processors);
  int counts[kRowGroups];
#pragma unroll
  for (int i = 0; i < kRowGroups; i++) counts[i] = warp_sum(tiles_of(s.new_, i + 1)) * heads;
  const Grouping grouping = choose_grouping(counts, grid, __any_sync(~0u, split.parts > 1));
  const int unsplit = tiles_of(s.new_, grouping.size) * heads, items = items_of(split, unsplit),
            slots = slots_of(split, unsplit);
  int rank = lane < batch ? 0 : lane - batch, first = 0, first_slot = 0;
#pragma unroll 2
  for (int other = 0; other < batch; other++) {
    const int other_keys = __shfl_sync(~0u, s.n_keys, other), other_items = __shfl_sync(~0u, items, other),
              other_slots = __shfl_sync(~0u, slots, other);
    const bool before = other_keys > s.n_keys || (other_keys == s.n_keys && other < lane);
    rank += before;
    first += before ? other_items : 0;
    first_slot += before ? other_slots : 0;
  }
  table[rank] = entry_of(s, lane, first, split, first_slot);
  if (rank == 31) table[kTableSequences] = total_entry(first + items, grouping);
  __syncwarp();
}

// The last of `count` entries whose first item is not past `item`; called by one warp, a 32-ary search.
MLA_DEVICE int find_entry(const ScheduleEntry* table, int count, int item) {
  const int lane = threadIdx.x & 31;
  int low = 0;
  while (count > 1) {
    const int step = ceil_div(count, 32), mine = lane * step;
    const bool before = mine < count && table[low + mine].first_item <= item;
    const int last = (__popc(__ballot_sync(~0u, before)) - 1) * step;
    low += last;
    count = count - last < step ? count - last : step;
  }
  return low;
}

struct TilePosition {
  int tile;  // counted from the end of the sequence
  int head;
};

// Tile and head of the `index`-th item of a sequence.
MLA_DEVICE TilePosition tile_position(int index, int tiles, int n_keys, int heads) {
  const int fitting = kGroupBytes / kKeyBytes / (n_keys > 0 ? n_keys : 1);
  const int group = fitting < 1 ? 1 : fitting < heads ? fitting : heads;
  const int first_head = group == heads ? 0 : index / (tiles * group) * group;
  const int heads_here = heads - first_head < group ? heads - first_head : group;
  const int rest = index - first_head * tiles;
  return {rest / heads_here, first_head + rest % heads_here};
}

// The `index`-th item of a sequence: which it would be without parts, and its part.
struct Share { int item, parts, part; };
MLA_DEVICE Share share_of(const ScheduleEntry& entry, int index) {
  const int beyond = index - entry.whole;
  if (beyond < 0) return {index, 1, 0};
  return {entry.whole + beyond / entry.parts, entry.parts, beyond % entry.parts};
}

// Slot of the workspace for a row group of an item that has a part; those of the other parts lie beside it.
MLA_DEVICE int slot_of(const ScheduleEntry& entry, Share share, int row_group) {
  return entry.first_slot + ((share.item - entry.whole) * kRowGroups + row_group) * share.parts + share.part;
}

// Block of 64 rows that a row group of an item works on; negative: none.
MLA_DEVICE int block_of(int row_group, int tile, int tiles, int blocks, Grouping grouping) {
  if (row_group >= grouping.size) return -1;
  if (!grouping.spread) return blocks - (tile + 1) * grouping.size + row_group;  // what is left over lies at the start
  const int from_end = row_group % 2 == 0 ? row_group * tiles + tile : (row_group + 1) * tiles - 1 - tile;
  return blocks - 1 - from_end;
}
