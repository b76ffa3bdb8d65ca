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
struct ScheduleEntry {
  int first_item;
  int sequence;
  int q_begin, new_;
  int k_begin, n_keys;
  int offset, start;
};
constexpr int kTableSequences = 32;  // what one warp sorts, a lane each
constexpr int kTableBytes = (kTableSequences + 1) * int(sizeof(ScheduleEntry));

MLA_DEVICE ScheduleEntry entry_of(const Sequence& s, int sequence, int first_item) {
  return {first_item, sequence, s.q_begin, s.new_, s.k_begin, s.n_keys, s.offset, s.start};
}
MLA_DEVICE ScheduleEntry total_entry(int items, Grouping grouping) {
  return {items, grouping.size, grouping.spread, 0, 0, 0, 0, 0};
}
MLA_DEVICE Grouping grouping_of(const ScheduleEntry& total) { return {total.sequence, total.q_begin}; }

MLA_DEVICE int row_blocks(int new_) { return new_ > 0 ? ceil_div(new_, kRowsPerGroup) : 0; }
MLA_DEVICE int tiles_of(int new_, int group_size) { return ceil_div(row_blocks(new_), group_size); }

// items[i]: items of the batch with i + 1 blocks each.
MLA_DEVICE Grouping choose_grouping(const int (&items)[kRowGroups], int grid) {
#pragma unroll
  for (int i = 0; i < kRowGroups; i++)
    if (items[i] <= grid) return {i + 1, 1};
  return {kRowGroups, 0};
}

MLA_DEVICE int warp_sum(int x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Builds the table of up to 32 sequences; called by one warp.
MLA_DEVICE void build_table(const SequenceArgs& args, int batch, int heads, int grid, ScheduleEntry* table) {
  const int lane = threadIdx.x & 31;
  Sequence s{};
  s.n_keys = -1;  // after all others
  if (lane < batch) s = sequence_of(args, lane);
  int counts[kRowGroups];
#pragma unroll
  for (int i = 0; i < kRowGroups; i++) counts[i] = warp_sum(tiles_of(s.new_, i + 1)) * heads;
  const Grouping grouping = choose_grouping(counts, grid);
  const int items = tiles_of(s.new_, grouping.size) * heads;
  int rank = 0, first = 0;
#pragma unroll 8
  for (int other = 0; other < 32; other++) {
    const int other_keys = __shfl_sync(~0u, s.n_keys, other), other_items = __shfl_sync(~0u, items, other);
    const bool before = other_keys > s.n_keys || (other_keys == s.n_keys && other < lane);
    rank += before;
    first += before ? other_items : 0;
  }
  table[rank] = entry_of(s, lane, first);
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
  const int first_head = index / (tiles * group) * group;
  const int heads_here = heads - first_head < group ? heads - first_head : group;
  const int rest = index - first_head * tiles;
  return {rest / heads_here, first_head + rest % heads_here};
}

// Block of 64 rows that a row group of an item works on; negative: none.
MLA_DEVICE int block_of(int row_group, int tile, int tiles, int blocks, Grouping grouping) {
  if (row_group >= grouping.size) return -1;
  if (!grouping.spread) return blocks - (tile + 1) * grouping.size + row_group;  // what is left over lies at the start
  const int from_end = row_group % 2 == 0 ? row_group * tiles + tile : (row_group + 1) * tiles - 1 - tile;
  return blocks - 1 - from_end;
}
