// The producer warp: claims items, classes their key tiles, loads Q, K, V and the roped keys.
#pragma once
#include "prefill_fp8_layout.cuh"
#include "prefill_tiles.cuh"

struct Producer {
  const PrefillParams& p;
  const Shared& shared;
  Item* items;  // at hand, one a row group; in shared memory, because the warp has few registers
  Ring<kStagesK> k{kStagesK};
  Ring<kTransposeV ? kStagesRaw : kStagesV> v{kTransposeV ? kStagesRaw : kStagesV};
  uint32_t q_phase = 1;  // its complement is the buffer of the item slots
  TileWalk walk{};
  uint32_t tile = kEndOfAll;  // the next one

  MLA_DEVICE int lane() const { return threadIdx.x & 31; }
  MLA_DEVICE bool lead() const { return lane() == 0; }
  // Rope rows come by TMA: the boxes of tiles that begin at the first key lie within pages.
  MLA_DEVICE bool rope_boxes() const { return !kRopeCopy || (kRopeBox > 0 && items->k_position % kBox == 0); }

  // Fills in the items, a lane each, and finds their first tile.
  MLA_DEVICE void take(const ScheduleEntry& entry, int index, Grouping grouping) {
    if (lane() < kRowGroups) fill_item(items[lane()], entry, index, lane(), p.heads, grouping);
    __syncwarp();
    walk = walk_of(*items);
    tile = next_tile(p, items, walk);
    if (lane() < kRowGroups) items[lane()].first_class = class_in(tile, lane());
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
        const uint32_t full = shared.q_full(group);
        if (item.rows == 0) {
          mbarrier_arrive(full);
          continue;
        }
        mbarrier_arrive_expect_tx(full, kQBytes);
        cp_async_bulk_tensor_3d(shared.q(group), p.q, 0, item.head, item.q_row, full, kEvictFirst);
        cp_async_bulk_tensor_3d(shared.q(group) + kQNopeBytes, p.q_rope, 0, item.head, item.q_row, full, kEvictFirst);
      }
    }
    q_phase ^= 1;
  }

  // Tells every other role that there are no more items.
  MLA_DEVICE void finish() {
#pragma unroll 1
    for (int group = 0; group < kRowGroups; group++) {
      mbarrier_wait_parity(shared.q_empty(group), q_phase);
      if (lead()) {
        shared.item(group, q_phase ^ 1)->q_row = -1;
        mbarrier_arrive(shared.q_full(group));
      }
    }
#pragma unroll 1
    for (int i = 0; i < kKeyWarps; i++, k.advance()) {
      mbarrier_wait_parity(shared.k_empty(k.stage()), k.phase());
      if (lead()) post_job(k.stage(), {0, 0, 0, 0, 0, kNoMoreKeys, kOfEachKey});
    }
    if constexpr (kTransposeV) {
      // All of them, for a warp looks at the word after it has waited, whatever tile it was that came.
#pragma unroll 1
      for (int stage = 0; stage < kStagesRaw; stage++, v.advance())
        mbarrier_wait_parity(shared.raw_empty(v.stage()), v.phase());
      if (lead()) {
        *shared.no_more_v() = 1;
        mbarrier_arrive(shared.raw_full(v.stage()));
      }
    }
  }

  MLA_DEVICE void post_job(int stage, const KeyJob& job) {
    *shared.job(stage) = job;
    mbarrier_arrive(shared.job_full(stage));
  }

  // Rows of a tile of keys into their order: the map takes every second row.
  MLA_DEVICE void load_rows(uint32_t to, const TensorMap& map, int head, int row, uint32_t full) {
#pragma unroll
    for (int block = 0; block < kBlockN; block += kKeyBlock)
#pragma unroll
      for (int half = 0; half < 2; half++)
        cp_async_bulk_tensor_3d(to + row_of_key(block + half) * kRowBytes, map, 0, head, row + block + half, full,
                                kEvictLast);
  }

  // Whether every row group sees all keys of a tile, or none: what each of them does needs no scale of a single key,
  // where they have one in common.
  MLA_DEVICE bool all_or_none(uint32_t tile) const {
    uint32_t partial = 0;
#pragma unroll
    for (int group = 0; group < kRowGroups; group++) partial |= kPartial << class_shift(group);
    return (tile & partial) == 0 && !MLA_SOFTCAP;
  }

  // Keeps what a key warp has found of the tile that was in the stage; its consumers have seen it.
  MLA_DEVICE void remember() {
    if (!kRemembers || k.count < 2 * kStagesK) return;
    const int k_row = shared.job(k.stage())->k_row;
    *shared.known(k_row) = {k_row, shared.head(k.count - 2 * kStagesK)->factor};
  }

  // Whether TMA can bring the scales of a tile's keys as they are.
  MLA_DEVICE bool scales_by_tma(int k_row, int keys) const {
    return kOneArray && keys >= kBlockN && p.k_scales_stride == 1 &&
           reinterpret_cast<uint64_t>(p.k_scales + k_row) % 16 == 0;
  }

  // What a key warp has to find out about a tile. Where it is nothing, the scale of all keys is left beside the tile; 0
  // is left where they differ, and those of each come by TMA.
  MLA_DEVICE WantedScales wanted_scales(uint32_t tile, int k_row, int keys) {
    const WantedScales wanted = all_or_none(tile) ? kOfEachOrAll : kOfEachKey;
    if (!kRemembers) return wanted;
    const KnownTile known = *shared.known(k_row);
    if (known.k_row != k_row) return wanted;
    if (known.factor == 0.0f ? !scales_by_tma(k_row, keys) : wanted == kOfEachKey) return wanted;
    shared.head(k.count - kStagesK)->factor = known.factor;
    return known.factor == 0.0f ? kOfEachByTma : kOfNone;
  }

  // A key warp loads the rope part, so that this one has less to do for a tile than the consumers.
  MLA_DEVICE void load_k(uint32_t tile, uint32_t next) {
    mbarrier_wait_parity(shared.k_empty(k.stage()), k.phase());
    if (lead()) {
      const Item& item = *items;
      const int first = tile_in(tile) * kBlockN;
      const bool boxes = rope_boxes();
      const uint32_t full = shared.k_full(k.stage());
      remember();
      shared.head(k.count - kStagesK)->tag = tag_of(tile, 0, next);
      const KeyJob job{item.sequence,
                       item.head,
                       item.k_position + first,
                       item.k_row + first,
                       item.n_keys - first,
                       boxes ? kRopeByTma : kRopeByCopy,
                       wanted_scales(tile, item.k_row + first, item.n_keys - first)};
      const uint32_t scale_bytes = kOneArray && job.scales == kOfEachByTma ? kBlockN * 4 : 0;
      mbarrier_arrive_expect_tx(full, (boxes ? kKBytes : kKNopeBytes) + scale_bytes);
      post_job(k.stage(), job);
      if (scale_bytes > 0)
        cp_async_bulk(shared.scales(k.stage(), kScaleAll), p.k_scales + job.k_row, scale_bytes, full);
      load_rows(shared.k(k.stage()), p.k, job.head, job.k_row, full);
    }
    k.advance();
  }

  MLA_DEVICE int row_of(uint32_t tile) const { return items->k_row + tile_in(tile) * kBlockN; }
  MLA_DEVICE void load_v(int row, int head) {
    if constexpr (kTransposeV) {
      mbarrier_wait_parity(shared.raw_empty(v.stage()), v.phase());
      if (lead()) {
        const uint32_t full = shared.raw_full(v.stage());
        mbarrier_arrive_expect_tx(full, kVTileBytes);
        load_rows(shared.raw(v.stage()), p.v, head, row, full);
      }
    } else {
      // Waited for by this warp alone, which then lets a key warp copy: two that wait for the same round, of which one
      // may bring about the next, would overtake each other.
      mbarrier_wait_parity(shared.v_empty(v.stage()), v.phase());
      if (lead()) {
        mbarrier_arrive(shared.v_free(v.stage()));
        if (!values_by_copy(row)) {
          const uint32_t full = shared.v_full(v.stage());
          mbarrier_arrive_expect_tx(full, kVTileBytes);
          cp_async_bulk_tensor_3d(shared.v(v.stage()), p.v, row, 0, head, full, kEvictLast);
        }
      }
    }
    v.advance();
  }

  MLA_DEVICE bool take_item(int index);

  // All loads of the item: K runs one tile ahead of V. The first K goes ahead of Q, because it need not wait for the
  // previous item's last product, and a key warp has to look up a page for it. The next item is taken while the last V
  // waits for its stage. Returns whether there is one.
  MLA_DEVICE bool load() {
    uint32_t previous = kEndOfAll;
    if (tile == kEndOfAll) load_q();
#pragma unroll 1
    while (tile != kEndOfAll) {
      const uint32_t next = next_tile(p, items, walk);
      load_k(tile, next);
      if (previous != kEndOfAll)
        load_v(row_of(previous), items->head);
      else
        load_q();
      previous = tile;
      tile = next;
    }
    const int row = row_of(previous), head = items->head;
    __syncwarp();
    const bool more = take_item(claim(p));
    if (previous != kEndOfAll) load_v(row, head);
    return more;
  }
};

// The table lies in shared memory where the block made it itself. Read anew for each item: registers are few.
MLA_DEVICE bool Producer::take_item(int index) {
  const bool own = p.table == nullptr;
  const ScheduleEntry* table = own ? shared.table() : p.table;
  const int count = own ? kTableSequences : p.batch;
  const ScheduleEntry& total = table[count];
  if (index >= total.first_item) return false;
  take(table[find_entry(table, count, index)], index, grouping_of(total));
  return true;
}

MLA_DEVICE void produce(const PrefillParams& p, const Shared& shared) {
  Producer producer{p, shared, shared.draft()};
  if (producer.take_item(blockIdx.x))
    while (producer.load());
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
