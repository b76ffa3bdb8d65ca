// A consumer warpgroup: S = Q K^T, softmax, O += P V for 64 query rows, tile by tile, item by item.
#pragma once
#include "prefill_fp8_layout.cuh"
#include "prefill_fp8_softmax.cuh"
#include "prefill_combine.cuh"
#include "prefill_epilogue.cuh"

struct Consumer {
  const PrefillParams& p;
  const Shared& shared;
  const int group;  // the row group it works for
  Ring<kStagesK> k{0};
  Ring<kStagesV> v{0};
  Item* item;

  // This thread's first row in the item; its other row is 8 below.
  MLA_DEVICE int row() const {
    const int thread = tid_x() & 127;
    return thread / 32 * 16 + thread % 32 / 4;
  }
  MLA_DEVICE void release(uint32_t barrier) const {
    if (elect_sync()) mbarrier_arrive(barrier);
  }

  // Leaves the scales of the item's rows in shared memory, where they take no registers; each warp has its own 16 rows.
  MLA_DEVICE void take(Item* next) {
    item = next;
    const int thread = tid_x() & 127, at = thread / 32 * 16 + thread % 32;
    __syncwarp();
    if (thread % 32 < 16)
      shared.row_scales(group)[at] = at < item->rows ? p.q_scale[(item->q_row + at) * p.q_scale_stride] : 0.0f;
    __syncwarp();
  }
  MLA_DEVICE void read_row_scales(float (&scales)[2], float factor) const {
#pragma unroll
    for (int r = 0; r < 2; r++) scales[r] = factor * shared.row_scales(group)[row() + 8 * r];
  }

  // Where the tile at hand lies. Addresses are chains of uniform instructions, ten cycles each.
  struct Place {
    uint32_t nope, values;  // starts of descriptors; the rope's lies kKNopeBytes behind nope's
    uint32_t head, k_full, v_full;
  };
  MLA_DEVICE Place place() const {
    Place at{wgmma_start(shared.k(k.stage())), wgmma_start(shared.v(v.stage())), shared.head_address(k.count),
             shared.k_full(k.stage()), shared.v_full(v.stage())};
    compute_here(at.nope), compute_here(at.values), compute_here(at.head), compute_here(at.k_full),
        compute_here(at.v_full);
    return at;
  }
  MLA_DEVICE void release_keys(bool lead, const Place& at) const {
    mbarrier_arrive_if(lead, at.k_full + (shared.k_empty(0) - shared.k_full(0)));
  }
  MLA_DEVICE void release_values(bool lead, const Place& at) const {
    mbarrier_arrive_if(lead, at.v_full + (shared.v_empty(0) - shared.v_full(0)));
  }

  template <int W> MLA_DEVICE void multiply_nope(float (&s)[W / 2], const Place& at) const {
#pragma unroll
    for (int i = 0; i < kRowBytes; i += 32)
      wgmma_e4m3_ss<W>(s, wgmma_k_major<kRowBytes>(shared.q(group), i), wgmma_k_major_from<kRowBytes>(at.nope, i),
                       i > 0);
  }
  template <int W> MLA_DEVICE void multiply_rope(float (&s)[W / 2], const Place& at) const {
#pragma unroll
    for (int i = 0; i < kRopeRowBytes; i += 32) {
      const uint64_t q_at = wgmma_k_major<kRopeRowBytes>(shared.q(group) + kQNopeBytes, i),
                     k_at = wgmma_k_major_from<kRopeRowBytes>(at.nope + (kKNopeBytes >> 4), i);
      if constexpr (kRopeFp8)
        wgmma_e4m3_ss<W>(s, q_at, k_at, true);
      else
        wgmma_ss<bf16, W>(s, q_at, k_at, true);
    }
  }
  // S of the tile at hand, of which the first W keys are looked at, in flight at the end. Where the nope part has scales
  // of its own, and these are not one with the rope's, it is brought to the rope's first.
  template <int W, bool kOneScale> MLA_DEVICE void multiply_keys(float (&s)[W / 2], const Place& at) const {
    wgmma_fence();
    multiply_nope<W>(s, at);
    if constexpr (kTwoScales && !kOneScale) {
      wgmma_commit_group();
      ScalesOfKeys<W> scales;
      scales.read(shared.scales(k.stage(), kScaleNope));
      float rows[2] = {1.0f, 1.0f};
      if constexpr (kRopePlain) read_row_scales(rows, 1.0f);
      wgmma_wait_group<0>();
      scales.multiply(s, rows);
      wgmma_fence();
    }
    multiply_rope<W>(s, at);
    wgmma_commit_group();
  }
  // O += P V of the tile at hand, whose V has arrived; `meanwhile` runs while the product is in flight. The tensor cores
  // truncate what they add in fp8: a tile's product stands alone and is added in fp32.
  template <int W, bool kOnes, typename F>
  MLA_DEVICE void add_values(float (&o)[MLA_V_DIM / 2], RowSums& sums, const uint32_t (&words)[W / 8], Place at,
                             bool lead, const F& meanwhile) {
    constexpr int kColumns = MLA_V_DIM + 8 * kOnes;
    float t[kColumns / 2];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < W / 32; i++)
      wgmma_e4m3_rs<kColumns>(t, words + 4 * i, wgmma_k_major_from<kRowBytes>(at.values, 32 * i), i > 0);
    wgmma_commit_group();
    const float v_factor = kValueScales ? shared.head(k.count)->v_factor : 1.0f;
    k.advance();
    v.advance();
    meanwhile();
    wgmma_wait_group<0>();
    release_values(lead, at);
    if constexpr (kOnes) sums.l[0] += t[MLA_V_DIM / 2], sums.l[1] += t[MLA_V_DIM / 2 + 2];  // column 128: lanes t = 0
#pragma unroll
    for (int i = 0; i < MLA_V_DIM / 2; i++) o[i] = kValueScales ? __fmaf_rn(t[i], v_factor, o[i]) : o[i] + t[i];
  }

  // Tiles that are visible as a whole, from the one at hand on, as long as their keys have the scale of bits `common`;
  // where that is 0, as long as they have several. Returns the class of the tile behind them. A warpgroup's time from one
  // product to the next is what a tile takes: everything but the softmax is done while a product is in flight. Votes
  // tell ptxas that what is said of a tile is the same in all lanes.
  template <bool kOneScale> MLA_DEVICE uint32_t run_visible(float (&o)[MLA_V_DIM / 2], RowSums& sums, uint32_t common,
                                                            bool lead) {
    constexpr bool kValues = !kOneScale && kValueScales, kOnes = kSumByProduct && !kValues, kSums = !kOnes;
    constexpr bool kScaled = !kOneScale && !kRopePlain;
    float factor[2] = {p.logit_scale, p.logit_scale};  // of this thread's rows in the exponent
    if constexpr (!kRopePlain)
      read_row_scales(factor, kOneScale ? p.logit_scale * __uint_as_float(common) : p.logit_scale);
    bool first = true;
    Place at = place();
#pragma unroll 1
    while (true) {
      float s[kBlockN / 2];
      const uint2 head = ld_shared_v2_b32(at.head);
      multiply_keys<kBlockN, kOneScale>(s, at);
      const uint32_t next = class_in(head.x, group);
      const bool ends = lead & __any_sync(~0u, next == kEnd), leaves = __any_sync(~0u, next != kVisible);
      const bool other_scale = __any_sync(~0u, head.y != common);
      ScalesOfKeys<kBlockN> scales;
      if constexpr (kScaled) scales.read(shared.scales(k.stage(), kScaleAll));
      wgmma_wait_group<0>();
      if (__builtin_expect(other_scale, 0)) return kVisible;
      if constexpr (kScaled) {
        const float one[2] = {1.0f, 1.0f};
        scales.multiply(s, one);
      }
      if constexpr (!kOneScale) __syncwarp();  // all lanes have read their scales
      uint32_t words[kBlockN / 8];
      if (__builtin_expect(first, 0)) raise_references<kBlockN>(s, factor, sums, o, true, true);
      first = false;
      const bool values_here = mbarrier_test_wait_parity(at.v_full, v.phase());
      softmax_visible<kSums, kValues, kBlockN>(s, words, factor, sums, o,
                                               keys_of_thread(shared.scales(k.stage(), kScaleValue)));
      if constexpr (kValues) __syncwarp();
      mbarrier_wait_parity_unless(values_here, at.v_full, v.phase());
      bool keys_here = false;
      add_values<kBlockN, kOnes>(o, sums, words, at, lead, [&] {
        mbarrier_arrive_if(ends, shared.q_empty(group));
        release_keys(lead, at);
        at = place();
        keys_here = mbarrier_test_wait_parity(at.k_full, k.phase());
      });
      if (leaves) return class_in(__reduce_or_sync(~0u, shared.head(k.count - 1)->tag), group);
      mbarrier_wait_parity_unless(keys_here, at.k_full, k.phase());
    }
  }

  // One tile of which some keys are hidden, or whose logits are more than scaled scores. Returns the class of the next.
  template <int W> MLA_DEVICE uint32_t step_masked(float (&o)[MLA_V_DIM / 2], RowSums& sums, bool lead) {
    const Place at = place();
    float s[W / 2];
    multiply_keys<W, false>(s, at);
    float factor[2] = {p.logit_scale, p.logit_scale};
    if constexpr (!kRopePlain) read_row_scales(factor, p.logit_scale);
    const uint32_t tag = __reduce_or_sync(~0u, shared.head(k.count)->tag);
    ScalesOfKeys<W> scales;
    scales.read(shared.scales(k.stage(), kScaleAll));
    wgmma_wait_group<0>();
    const uint32_t next = class_in(tag, group);
    mbarrier_arrive_if(lead & (next == kEnd), shared.q_empty(group));
    const int first = tile_in(tag) * kBlockN, key = first + tid_x() % 4 * 4;
    uint32_t words[W / 8];
    scales.multiply(s, factor);
    if constexpr (MLA_SOFTCAP || MLA_MASK_BIASES) shape_logits<W>(s, p, *item, row(), key);
    mask_logits<W>(s, p, *item, row(), key);
    softmax_masked<kValueScales, W>(s, words, sums, o, keys_of_thread(shared.scales(k.stage(), kScaleValue)));
    __syncwarp();  // all lanes have read the scales
    release_keys(lead, at);
    mbarrier_wait_parity(at.v_full, v.phase());
    clear_v_past(v.stage(), item->n_keys - first);
    add_values<W, false>(o, sums, words, at, lead, [] {});
    return next;
  }

  // Columns of V^T past the last key may hold anything, and 0 * NaN is NaN. Every warpgroup writes the same bytes, so
  // each orders only itself.
  MLA_DEVICE void clear_v_past(int stage, int keys) const {
    if (keys >= kBlockN) return;
    const int column = tid_x() & 127;  // of V
    uint8_t* row = shared.v_bytes(stage) + column * kBlockN;
#pragma unroll 1
    for (int chunk = keys / 16; chunk < kBlockN / 16; chunk++) {
      uint32_t* at = reinterpret_cast<uint32_t*>(row + ((chunk ^ (column & 7)) << 4));
#pragma unroll
      for (int word = 0; word < 4; word++) {
        const int keep = keys - chunk * 16 - word * 4;  // bytes of the word
        if (keep < 4) at[word] = keep <= 0 ? 0 : at[word] & (1u << 8 * keep) - 1;
      }
    }
    fence_proxy_async_shared();
    bar_sync(kBarrierWarpgroup + group, 128);
  }

  // A tile of which this warpgroup sees nothing.
  MLA_DEVICE uint32_t skip() {
    const uint32_t next = class_in(shared.head(k.count)->tag, group);
    __syncwarp();
    release(shared.k_empty(k.stage()));
    k.advance();
    if (next == kEnd) release(shared.q_empty(group));
    mbarrier_wait_parity(shared.v_full(v.stage()), v.phase());
    release(shared.v_empty(v.stage()));
    v.advance();
    return next;
  }

  // The tile at hand, and those that go with it. Returns the class of the one behind them.
  MLA_DEVICE uint32_t work(uint32_t type, float (&o)[MLA_V_DIM / 2], RowSums& sums) {
    mbarrier_wait_parity(shared.k_full(k.stage()), k.phase());
    const bool lead = elect_sync();
    if (type == kVisible && !MLA_SOFTCAP) {
      const uint32_t common = __reduce_or_sync(~0u, __float_as_uint(shared.head(k.count)->factor));
      if (!kRopePlain && common != 0) return run_visible<true>(o, sums, common, lead);
      return run_visible<false>(o, sums, 0, lead);
    }
    if (type == kHidden) return skip();
    return type == kHalf ? step_masked<kBlockN / 2>(o, sums, lead) : step_masked<kBlockN>(o, sums, lead);
  }
};

MLA_DEVICE void consume(const PrefillParams& p, const Shared& shared, int group) {
  Consumer consumer{p, shared, group};
  uint32_t q_phase = 0;
#pragma unroll 1
  while (true) {
    mbarrier_wait_parity(shared.q_full(group), q_phase);
    Item* item = shared.item(group, q_phase);
    q_phase ^= 1;
    if (item->q_row < 0) break;
    consumer.take(item);
    float o[MLA_V_DIM / 2];
#pragma unroll
    for (int i = 0; i < MLA_V_DIM / 2; i++) o[i] = 0.0f;
    RowSums sums{{-infinity(), -infinity()}, {0.0f, 0.0f}};

    uint32_t type = item->first_class;
    if (type == kEnd) consumer.release(shared.q_empty(group));
#pragma unroll 1
    while (type != kEnd) type = consumer.work(type, o, sums);
    if (item->parts > 1 && item->rows > 0 && !combine_parts(p, *item, group, o, sums, 1.0f)) continue;
    if constexpr (MLA_V_SCALES == kValuesByHead) {
      const float v_scale = p.v_scale[item->head * p.v_scale_stride];
#pragma unroll
      for (int i = 0; i < MLA_V_DIM / 2; i++) o[i] *= v_scale;
    }
    finish_item(p, *item, consumer.row(), o, sums, 1.0f);
  }
}
