// The producer warp: claims items, classes their key tiles, loads Q, K, V and the roped keys.
// The rope warps (three more of its warpgroup): gather rope rows that TMA boxes cannot fetch.
#pragma once
#include "prefill_layout.cuh"
#include "prefill_tiles.cuh"

constexpr int kBox = kRopeBox > 0 ? kRopeBox : kBlockN;

struct Producer {
  const PrefillParams& p;
  const Shared& shared;
  Item* items;  // at hand, one a row group; in shared memory, because the warp has few registers
  Ring<kStagesK> k{kStagesK};
  uint32_t q_phase = 1;  // its complement is the buffer of the item slots

  MLA_DEVICE int lane() const { return threadIdx.x & 31; }
  MLA_DEVICE bool lead() const { return lane() == 0; }
  // Rope rows come by TMA: the boxes of tiles that begin at the first key lie within pages.
  MLA_DEVICE bool rope_boxes() const { return !kRopeGather || (kRopeBox > 0 && items->k_position % kBox == 0); }

  // Fills in the items, a lane each.
  MLA_DEVICE void take(const ScheduleEntry& entry, int index, Grouping grouping) {
    if (lane() < kRowGroups) {
      Item& item = items[lane()];
      fill_item(item, entry, index, lane(), p.heads, grouping);
      item.v_stages = kSpareV && grouping.size < kRowGroups ? 2 : kStagesV;
    }
    __syncwarp();
  }

  // Hands its item to every row group, with its rows of Q.
  MLA_DEVICE void load_q() {
#pragma unroll 1
    for (int group = 0; group < kRowGroups; group++) {
      mbarrier_wait_parity(shared.q_empty(group), q_phase);
      if (lead()) {
        const Item& item = items[group];
        *shared.item(group, q_phase ^ 1) = item;
        if (item.rows == 0) {
          mbarrier_arrive(shared.q_full(group));
          continue;
        }
        mbarrier_arrive_expect_tx(shared.q_full(group), kQBytes);
#pragma unroll
        for (int block = 0; block < kQkBlocks; block++)
          cp_async_bulk_tensor_3d(shared.q(group) + block * kQBlockBytes, p.q, block * 64, item.head, item.q_row,
                                  shared.q_full(group), kEvictFirst);
      }
    }
    q_phase ^= 1;
  }

  // Loads the last V and tells every row group that there are no more items.
  MLA_DEVICE void finish() {
    load_v(1);
#pragma unroll 1
    for (int group = 0; group < kRowGroups; group++) {
      mbarrier_wait_parity(shared.q_empty(group), q_phase);
      if (lead()) {
        shared.item(group, q_phase ^ 1)->q_row = -1;
        mbarrier_arrive(shared.q_full(group));
      }
    }
    if constexpr (kRopeGather) {
#pragma unroll 1
      for (int stage = 0; stage < kStagesK; stage++, k.advance())
        mbarrier_wait_parity(shared.k_empty(k.stage()), k.phase());
      if (lead())
        for (int warp = 0; warp < kRopeWarps; warp++) post_job(warp, {0, 0, 0, kRopeNoMore});
    }
  }

  MLA_DEVICE void post_job(int warp, const RopeJob& job) {
    *shared.job(warp) = job;
    mbarrier_arrive(shared.job_full(warp));
  }

  MLA_DEVICE void load_k(uint32_t tile, uint32_t next) {
    const Item& item = *items;
    const int first = tile_in(tile) * kBlockN;
    const bool boxes = rope_boxes();
    // One lane a rope box looks up its page before the wait; rows past the last key repeat its box, whose page exists.
    int page = 0, last_box = 0;
    if constexpr (MLA_ROPE_KIND == kRopePaged && kRopeBox > 0) {
      last_box = (item.n_keys - 1) / kBox * kBox;
      const int key = first + lane() * kBox;
      if (boxes && lane() < kBlockN / kBox)
        page = page_row(p.page_table, item.sequence)[(item.k_position + (key < last_box ? key : last_box)) / kPageSize];
    }
    mbarrier_wait_parity(shared.k_empty(k.stage()), k.phase());
    const uint32_t full = shared.k_full(k.stage()), to = shared.k(k.stage()),
                   to_rope = to + (kQkBlocks - 1) * kKeyBlockBytes;
    if (lead()) {
      *shared.tag(k.stage()) = {tag_of(tile, v_place(k.count), next), item.head, item.k_row + first};
      mbarrier_arrive_expect_tx(full, boxes ? kKBytes : kKBytes - kRopeBytes);
#pragma unroll
      for (int block = 0; block < kQkBlocks - 1; block++)
        cp_async_bulk_tensor_3d(to + block * kKeyBlockBytes, p.k, block * 64, item.head, item.k_row + first, full,
                                kEvictLast);
      if constexpr (kRopeGather) {
        post_job(k.count % kRopeWarps,
                 {item.sequence, item.k_position + first, item.n_keys - first, boxes ? kRopeByTma : kRopeByCopy});
      }
    }
    if constexpr (MLA_ROPE_KIND == kRopePaged) {
      if constexpr (kRopeBox > 0) {
        if (boxes) {
#pragma unroll
          for (int box = 0; box < kBlockN / kBox; box++) {
            const int page_of_box = __shfl_sync(~0u, page, box), key = first + box * kBox;
            const int slot = (item.k_position + (key < last_box ? key : last_box)) % kPageSize;
            if (lead())
              cp_async_bulk_tensor_3d(to_rope + box * kBox * kSwizzleBytes, p.rope, 0, slot, page_of_box, full,
                                      kEvictLast);
          }
        }
      }
    } else if (lead()) {
      const bool batched = MLA_ROPE_KIND == kRopeBatched;
      cp_async_bulk_tensor_3d(to_rope, p.rope, 0, (batched ? item.k_position : item.k_row) + first,
                              batched ? item.sequence : 0, full, kEvictLast);
    }
    k.advance();
    __syncwarp();  // the tag
  }

  // Stage and phase of V of the tile whose K was loaded at `count`, as the tag has them.
  MLA_DEVICE uint32_t v_place(uint32_t count) const {
    const uint32_t index = count - kStagesK;
    return items->v_stages == 1 ? (index & 1) << 1 : index & 3;
  }

  // V of the tile whose K was loaded `back` stages ago, unless there is none or it is on its way.
  MLA_DEVICE void load_v(int back) {
    const uint32_t count = k.count - back, place = v_place(count);
    StageTag& of = *shared.tag(count % kStagesK);
    const bool due = of.v_row >= 0;
    __syncwarp();  // all have looked
    if (!due) return;
    const int stage = place & 1;
    mbarrier_wait_parity(shared.v_empty(stage), place >> 1 ^ 1);
    if (lead()) {
      const uint32_t full = shared.v_full(stage);
      mbarrier_arrive_expect_tx(full, kVBytes);
#pragma unroll
      for (int block = 0; block < kVBlocks; block++)
        cp_async_bulk_tensor_3d(shared.v(stage) + block * kKeyBlockBytes, p.v, block * 64, of.head, of.v_row, full,
                                kEvictLast);
      of.v_row = -1;
    }
    __syncwarp();
  }

  // All loads of the item but its last V: K runs one tile ahead of V, into the next item. The first K goes ahead of
  // Q, which has to wait for the last product of the item before. Returns the number of the next item that no thread
  // block has taken, asked for while the last tile is loaded; the first ones are theirs by their own numbers.
  MLA_DEVICE int load() {
    TileWalk walk = walk_of(*items);
    uint32_t& claimed = walk.word;  // of the first lane; a walk that has ended leaves the register
    uint32_t tile = next_tile(p, items, walk);
    if (lane() < kRowGroups) items[lane()].first_class = class_in(tile, lane());
    __syncwarp();
    if (tile == kEndOfAll) {
      load_v(1);
      load_q();
      if (lead()) claimed = atomicAdd(&p.counters[0], 1);
    }
    const uint32_t first = tile;
#pragma unroll 1
    while (tile != kEndOfAll) {
      const uint32_t next = next_tile(p, items, walk);
      if (next == kEndOfAll && lead()) claimed = atomicAdd(&p.counters[0], 1);
      load_k(tile, next);
      load_v(2);
      if (tile == first) load_q();
      tile = next;
    }
    return __shfl_sync(~0u, claimed, 0) + nctaid_x();
  }
};

// The table lies in shared memory where the block made it itself. Read anew for each item: registers are few.
MLA_DEVICE bool take_item(Producer& producer, int index) {
  const PrefillParams& p = producer.p;
  const bool own = p.table == nullptr;
  const ScheduleEntry* table = own ? producer.shared.table() : p.table;
  const int count = own ? kTableSequences : p.batch;
  const ScheduleEntry& total = table[count];
  if (index >= total.first_item) return false;
  producer.take(table[find_entry(table, count, index)], index, grouping_of(total));
  return true;
}

MLA_DEVICE void produce(const PrefillParams& p, const Shared& shared) {
  Producer producer{p, shared, shared.draft()};
  if (producer.lane() < kStagesK) shared.tag(producer.lane())->v_row = -1;
  __syncwarp();
#pragma unroll 1
  for (int item = blockIdx.x; take_item(producer, item);) item = producer.load();
  producer.finish();
  // The last thread block leaves the counters as it found them.
  if (producer.lead()) {
    __threadfence();
    if (atomicAdd(&p.counters[1], 1) == nctaid_x() - 1) {
      p.counters[0] = 0;
      p.counters[1] = 0;
    }
  }
}

// Brings the operands of a short call into L2 while its producers find out who works on what: for so many boxes a block
// and no more, a lane each; and where pages begin.
constexpr int kShortCall = 32;
MLA_DEVICE void prefetch_operands(const PrefillParams& p) {
  const int lane = threadIdx.x & 31;
  if (MLA_ROPE_KIND == kRopePaged && p.page_table.pages != nullptr && p.page_table.indptr == nullptr && lane < p.batch)
    prefetch_global_l2(page_row(p.page_table, lane));
  constexpr int kBoxesOfTile = kQkBlocks - 1 + kVBlocks;
  const int tiles = ceil_div(p.rows_k, kBlockN) * kBoxesOfTile, blocks = ceil_div(p.rows_q, kRowsPerGroup) * kQkBlocks;
  const int64_t boxes = int64_t(tiles + blocks) * p.heads;
  const int box = blockIdx.x + nctaid_x() * lane;
  if (boxes > kShortCall * nctaid_x() || box >= boxes) return;
  const int head = box % p.heads, i = box / p.heads;
  if (i < tiles) {
    const int column = i % kBoxesOfTile, row = i / kBoxesOfTile * kBlockN;
    if (column < kQkBlocks - 1)
      cp_async_bulk_prefetch_tensor_3d(p.k, column * 64, head, row);
    else
      cp_async_bulk_prefetch_tensor_3d(p.v, (column - kQkBlocks + 1) * 64, head, row);
  } else {
    cp_async_bulk_prefetch_tensor_3d(p.q, (i - tiles) % kQkBlocks * 64, head, (i - tiles) / kQkBlocks * kRowsPerGroup);
  }
}

// Rope rows of every third K tile, copied 16 bytes a lane into the swizzle that TMA would have made.
MLA_DEVICE void gather_rope(const PrefillParams& p, const Shared& shared, int warp) {
  const int lane = threadIdx.x & 31;
  uint32_t phase = 0;
  // Counted as the producer counts, whose ring begins a round ahead.
#pragma unroll 1
  for (uint32_t count = kStagesK + (warp + kRopeWarps - kStagesK % kRopeWarps) % kRopeWarps;;
       count += kRopeWarps, phase ^= 1) {
    const int stage = count % kStagesK;
    mbarrier_wait_parity(shared.job_full(warp), phase);
    const RopeJob job = *shared.job(warp);
    if (job.source == kRopeNoMore) return;
    if (job.source == kRopeByCopy) {
      const int* pages = page_row(p.page_table, job.sequence);
      const int rows = job.keys < kBlockN ? job.keys : kBlockN;
      const uint32_t to = shared.k(stage) + (kQkBlocks - 1) * kKeyBlockBytes;
#pragma unroll 1
      for (int first = 0; first < rows; first += 32) {
        const int row = first + lane < rows ? first + lane : rows - 1;
        const uint64_t address = reinterpret_cast<uint64_t>(token_row(p.rope_rows, pages, job.token + row));
#pragma unroll 1
        for (int i = 0; i < 8; i++) {
          const int copied = 4 * i + lane / 8, chunk = lane % 8;
          const uint64_t from = __shfl_sync(~0u, address, copied);
          const int at = first + copied;
          if (at < rows)
            cp_async_cg_16(to + at * kSwizzleBytes + ((chunk ^ (at & 7)) << 4),
                           reinterpret_cast<const uint8_t*>(from) + 16 * chunk, 16);
        }
      }
      cp_async_commit_group();
      cp_async_wait_group<0>();
      fence_proxy_async_shared();
    }
    __syncwarp();  // all have copied, and read the job
    if (lane == 0) mbarrier_arrive(shared.k_full(stage));
  }
}
