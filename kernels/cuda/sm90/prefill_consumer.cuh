// A consumer warpgroup: S = Q K^T, softmax, O += P V for 64 query rows, tile by tile, item by item.
#pragma once
#include "prefill_layout.cuh"
#include "prefill_softmax.cuh"
#include "prefill_combine.cuh"
#include "prefill_epilogue.cuh"

struct Consumer {
  const PrefillParams& p;
  const Shared& shared;
  const int group;  // the row group it works for
  Ring<kStagesK> k;
  Item* item;

  // This thread's first row in the item; its other row is 8 below.
  MLA_DEVICE int row() const {
    const int thread = tid_x() & 127;
    return thread / 32 * 16 + thread % 32 / 4;
  }
  MLA_DEVICE float scale() const { return kScaleScores ? 1.0f : p.logit_scale; }
  MLA_DEVICE void release(uint32_t barrier) const {
    if (elect_sync()) mbarrier_arrive(barrier);
  }

  // S = Q K^T of a tile that has come, for its first W keys.
  template <int W> MLA_DEVICE void products_of_keys(float (&s)[W / 2]) const {
    wgmma_fence();
    const uint64_t q_at = wgmma_descriptor(shared.q(group), 16, 1024),
                   k_at = wgmma_descriptor(shared.k(k.stage()), 16, 1024);
#pragma unroll
    for (int i = 0; i < 4 * kQkBlocks; i++)
      wgmma_ss<Element, W>(s, q_at + descriptor_step(i / 4 * kQBlockBytes + i % 4 * 32),
                           k_at + descriptor_step(i / 4 * kKeyBlockBytes + i % 4 * 32), i > 0);
    wgmma_commit_group();
  }

  // Gives back what a tile's scores are made of; `next` is the class of the next tile.
  MLA_DEVICE void release_scores(uint32_t next) const {
    release(shared.k_empty(k.stage()));
    if (next == kEnd) release(shared.q_empty(group));
  }

  // Scores to probabilities, with references that have taken them in.
  template <int W>
  MLA_DEVICE void softmax(float (&s)[W / 2], float (&o)[MLA_V_DIM / 2], RowSums& sums, float (&sum)[2]) const {
    float alpha[2];
    const bool moved = move_reference<W>(s, sums, alpha, scale());
    exponentials<W, false>(s, sums.m, sum, scale());
    if (moved) {
#pragma unroll
      for (int i = 0; i < MLA_V_DIM / 2; i++) o[i] *= alpha[i >> 1 & 1];
    }
  }

  // One key tile, of which the first W keys are looked at; returns the class of the next one. The plain body takes
  // exponentials with the references there are, without maxima, and begins again with them where the results are too
  // large.
  template <bool kMasked, int W> MLA_DEVICE uint32_t step(float (&o)[MLA_V_DIM / 2], RowSums& sums) {
    float s[W / 2];
    mbarrier_wait_parity(shared.k_full(k.stage()), k.phase());
    products_of_keys<W>(s);
    const uint32_t tag =
        __reduce_or_sync(~0u, shared.tag(k.stage())->word);  // the same in all lanes, and now ptxas knows
    wgmma_wait_group<0>();
    const uint32_t next = class_in(tag, group);
    const int first = tile_in(tag) * kBlockN, key = first + tid_x() % 4 * 2;
    float sum[2];
    if constexpr (kMasked || !kWithoutMaxima) release_scores(next);
    if constexpr (kScaleScores) scale_scores<W>(s, p, *item, row(), key);
    if constexpr (kMasked) mask_scores<W>(s, p, *item, row(), key);
    if constexpr (kMasked || !kWithoutMaxima) {
      softmax<W>(s, o, sums, sum);
    } else {
      exponentials<W, true>(s, sums.m, sum, scale());
      const bool large = !(sum[0] < kMostSum && sum[1] < kMostSum);
      if (__reduce_or_sync(~0u, bar_red_or(kBarrierWarpgroup + group, 128, large))) {
        products_of_keys<W>(s);
        wgmma_wait_group<0>();
        if constexpr (kScaleScores) scale_scores<W>(s, p, *item, row(), key);
        softmax<W>(s, o, sums, sum);
      }
      release_scores(next);
    }
    k.advance();
#pragma unroll
    for (int r = 0; r < 2; r++) sums.l[r] += sum[r];
    uint32_t probability[W / 4];
#pragma unroll
    for (int i = 0; i < W / 4; i++) probability[i] = cvt_rn_x2<Element>(s[2 * i], s[2 * i + 1]);

    mbarrier_wait_parity(shared.v_full(v_stage_in(tag)), v_phase_in(tag));
    if constexpr (kMasked) clear_v_past(v_stage_in(tag), item->n_keys - first);
    wgmma_fence();
    const uint64_t v_at = wgmma_descriptor(shared.v(v_stage_in(tag)), kKeyBlockBytes, 1024);
#pragma unroll
    for (int i = 0; i < W / 16; i++)
      wgmma_rs<Element, MLA_V_DIM>(o, probability[4 * i], probability[4 * i + 1], probability[4 * i + 2],
                                   probability[4 * i + 3], v_at + descriptor_step(i * 16 * kSwizzleBytes));
    wgmma_commit_group();
    wgmma_wait_group<0>();
    release(shared.v_empty(v_stage_in(tag)));
    return next;
  }

  // Rows of V past the last key may hold anything, and 0 * NaN is NaN. Every warpgroup writes the same zeros, so each
  // orders only itself.
  MLA_DEVICE void clear_v_past(int stage, int keys) const {
    if (keys >= kBlockN) return;
    uint8_t* rows = shared.v_bytes(stage) + keys * kSwizzleBytes;
    for (int i = tid_x() & 127; i < (kBlockN - keys) * (kSwizzleBytes / 16); i += 128)
#pragma unroll
      for (int block = 0; block < kVBlocks; block++)
        *reinterpret_cast<uint4*>(rows + block * kKeyBlockBytes + i * 16) = make_uint4(0, 0, 0, 0);
    fence_proxy_async_shared();
    bar_sync(kBarrierWarpgroup + group, 128);
  }

  // A tile of which this warpgroup sees nothing.
  MLA_DEVICE uint32_t skip() {
    mbarrier_wait_parity(shared.k_full(k.stage()), k.phase());
    const uint32_t tag = shared.tag(k.stage())->word;
    const uint32_t next = class_in(tag, group);
    __syncwarp();
    release(shared.k_empty(k.stage()));
    k.advance();
    if (next == kEnd) release(shared.q_empty(group));
    mbarrier_wait_parity(shared.v_full(v_stage_in(tag)), v_phase_in(tag));
    release(shared.v_empty(v_stage_in(tag)));
    return next;
  }
};

MLA_DEVICE void consume(const PrefillParams& p, const Shared& shared, int group) {
  Consumer consumer{p, shared, group, {0}, nullptr};
  uint32_t q_phase = 0;
#pragma unroll 1
  while (true) {
    mbarrier_wait_parity(shared.q_full(group), q_phase);
    consumer.item = shared.item(group, q_phase);
    q_phase ^= 1;
    if (consumer.item->q_row < 0) break;
    float o[MLA_V_DIM / 2];
#pragma unroll
    for (int i = 0; i < MLA_V_DIM / 2; i++) o[i] = 0.0f;
    RowSums sums{{-infinity(), -infinity()}, {0.0f, 0.0f}};

    uint32_t type = consumer.item->first_class;
    if (type == kEnd) consumer.release(shared.q_empty(group));
    if (type == kVisible) type = kPartial;  // there are no references yet
    while (type != kEnd) {
      if constexpr (kWholeTiles)
        while (type == kVisible) type = consumer.template step<false, kBlockN>(o, sums);
      if (type == kPartial) type = consumer.template step<true, kBlockN>(o, sums);
      if (type == kHidden) type = consumer.skip();
      if (type == kHalf) type = consumer.template step<true, kBlockN / 2>(o, sums);
    }
    Item& item = *consumer.item;
    if (item.parts > 1 && item.rows > 0 && !combine_parts(p, item, group, o, sums, consumer.scale())) continue;
    finish_item(p, item, consumer.row(), o, sums, consumer.scale());
  }
}
