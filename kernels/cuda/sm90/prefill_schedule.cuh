// The order of work of a prefill call, from the lengths of its sequences: computed on the device, the same for every block.
//
// Two forms of the kernel share a call. A sequence goes to the narrow one by its own lengths and the number of heads alone
// (never by the batch: its results are bitwise the same in any company): few rows and keys that would leave most of the chip idle
// in tall tiles. Order within a form: sequences by falling key count; heads in groups whose keys and values fit L2; in a group, query
// tiles from the last (with a causal mask the longest) to the first, heads innermost.
//
// The host defines MLA_NOPE_DIM, MLA_V_DIM, MLA_WIDE_BLOCK_M, MLA_NARROW_BLOCK_M (0: one form only), MLA_NARROW_ITEMS, MLA_NARROW_KEYS.
#pragma once
#include "sequence.cuh"

constexpr int kWideBlockM = MLA_WIDE_BLOCK_M, kNarrowBlockM = MLA_NARROW_BLOCK_M;
enum Form { kWide = 0, kNarrow = 1 };

// Keys and values of a head group; an H200 has 50 MiB of L2 in two halves, and a block reads from both.
constexpr int kGroupBytes = 16 << 20;
constexpr int kKeyBytes = 2 * (MLA_NOPE_DIM + MLA_V_DIM);

// One sequence, in the order of work. A table of n sequences ends with an entry whose first_item is the number of items.
struct ScheduleEntry {
  int first_item;
  int sequence;
  int q_begin, new_;
  int k_begin, n_keys;
  int offset, start;
};
constexpr int kTableSequences = 32;                                             // what one warp sorts, a lane each
constexpr int kTableBytes = (kTableSequences + 1) * int(sizeof(ScheduleEntry)) / 16 * 16 + 16;

MLA_DEVICE int block_m(Form form) { return form == kWide ? kWideBlockM : kNarrowBlockM; }

// Both conditions grow with the lengths, so a host that knows only sums can tell when every sequence is narrow.
MLA_DEVICE Form form_of(int new_, int n_keys, int heads) {
  if constexpr (kNarrowBlockM == 0) return kWide;
  else return ceil_div(new_, kNarrowBlockM) * heads <= MLA_NARROW_ITEMS && n_keys <= MLA_NARROW_KEYS ? kNarrow : kWide;
}
MLA_DEVICE int item_count(Form form, int new_, int n_keys, int heads) {
  return new_ > 0 && form_of(new_, n_keys, heads) == form ? ceil_div(new_, block_m(form)) * heads : 0;
}
MLA_DEVICE ScheduleEntry entry_of(const Sequence& s, int sequence, int first_item) {
  return {first_item, sequence, s.q_begin, s.new_, s.k_begin, s.n_keys, s.offset, s.start};
}

// Builds the table of up to 32 sequences; called by one warp.
MLA_DEVICE void build_table(Form form, const SequenceArgs& args, int batch, int heads, ScheduleEntry* table) {
  const int lane = threadIdx.x & 31;
  Sequence s{};
  s.n_keys = -1;  // after all others
  int items = 0;
  if (lane < batch) {
    s = sequence_of(args, lane);
    items = item_count(form, s.new_, s.n_keys, heads);
  }
  int rank = 0, first = 0, total = 0;
#pragma unroll
  for (int other = 0; other < 32; other++) {
    const int other_keys = __shfl_sync(~0u, s.n_keys, other), other_items = __shfl_sync(~0u, items, other);
    const bool before = other_keys > s.n_keys || (other_keys == s.n_keys && other < lane);
    rank += before;
    first += before ? other_items : 0;
    total += other_items;
  }
  table[rank] = entry_of(s, lane, first);
  if (lane == 0) table[kTableSequences].first_item = total;
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

struct TilePosition { int tile, head; };

// Query tile and head of the `index`-th item of a sequence.
MLA_DEVICE TilePosition tile_position(int index, int tiles, int n_keys, int heads) {
  const int fitting = kGroupBytes / kKeyBytes / (n_keys > 0 ? n_keys : 1);
  const int group = fitting < 1 ? 1 : fitting < heads ? fitting : heads;
  const int first_head = index / (tiles * group) * group;
  const int heads_here = heads - first_head < group ? heads - first_head : group;
  const int rest = index - first_head * tiles;
  return {tiles - 1 - rest / heads_here, first_head + rest % heads_here};
}
