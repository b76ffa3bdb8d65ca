// A consumer warpgroup: S = Q K^T, softmax, O += P V for 64 query rows, tile by tile, item by item.
#pragma once
#include "prefill_fp8_layout.cuh"
#include "prefill_fp8_softmax.cuh"
#include "prefill_combine.cuh"
#include "prefill_epilogue.cuh"

// How a tile is worked on.
enum class Body {
  kUniform,  // all visible, one scale for all keys
  kScaled,  // all visible, a scale for each key
  kMasked  // some hidden, or logits that are more than scaled scores
};

// Beside the classes of tiles: what a body returns that takes a tile to have one scale, and a visible tile of which
// nothing is taken.
constexpr uint32_t kManyScales = kEnd + 1, kUnsure = kEnd + 2;

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

  template <int W> MLA_DEVICE void multiply_nope(float (&s)[W / 2]) const {
    const uint64_t q_at = wgmma_k_major<kRowBytes>(shared.q(group)),
                   k_at = wgmma_k_major<kRowBytes>(shared.k(k.stage()));
#pragma unroll
    for (int i = 0; i < kRowBytes / 32; i++)
      wgmma_e4m3_ss<W>(s, q_at + descriptor_step(32 * i), k_at + descriptor_step(32 * i), i > 0);
  }
  template <int W> MLA_DEVICE void multiply_rope(float (&s)[W / 2]) const {
    const uint64_t q_at = wgmma_k_major<kRopeRowBytes>(shared.q(group) + kQNopeBytes),
                   k_at = wgmma_k_major<kRopeRowBytes>(shared.k(k.stage()) + kKNopeBytes);
#pragma unroll
    for (int i = 0; i < kRopeRowBytes / 32; i++) {
      if constexpr (kRopeFp8)
        wgmma_e4m3_ss<W>(s, q_at + descriptor_step(32 * i), k_at + descriptor_step(32 * i), true);
      else
        wgmma_ss<bf16, W>(s, q_at + descriptor_step(32 * i), k_at + descriptor_step(32 * i), true);
    }
  }

  // One key tile, of which the first W keys are looked at; its K has arrived. Returns the class of the next one, or
  // kManyScales, with nothing done, where the tile has more than one scale.
  template <Body kBody, int W> MLA_DEVICE uint32_t step(float (&o)[MLA_V_DIM / 2], RowSums& sums) {
    constexpr bool kOnes = kSumByProduct && kBody != Body::kMasked && !(kBody == Body::kScaled && kValueScales);
    const TileHead* head = shared.head(k.count);
    float s[W / 2];
    wgmma_fence();
    multiply_nope<W>(s);
    if constexpr (kTwoScales && kBody != Body::kUniform) {
      wgmma_commit_group();
      wgmma_wait_group<0>();
      float rows[2] = {1.0f, 1.0f};
      if constexpr (kRopePlain) read_row_scales(rows, 1.0f);
      scale_scores<W>(s, shared.scales(k.stage(), kScaleNope), rows);
      wgmma_fence();
    }
    multiply_rope<W>(s);
    wgmma_commit_group();
    float factor[2] = {p.logit_scale, p.logit_scale};  // of this thread's rows in the exponent
    if constexpr (!kRopePlain)
      read_row_scales(factor, kBody == Body::kUniform ? p.logit_scale * head->factor : p.logit_scale);
    const uint32_t tag = __reduce_or_sync(~0u, head->tag);  // the same in all lanes, and now ptxas knows
    const bool as_expected = kBody != Body::kUniform || one_scale();
    wgmma_wait_group<0>();
    if (!as_expected) return kManyScales;
    const uint32_t next = class_in(tag, group);
    if constexpr (kBody == Body::kUniform) release(shared.k_empty(k.stage()));
    if (next == kEnd) release(shared.q_empty(group));

    const int first = tile_in(tag) * kBlockN;
    const uint32_t values = shared.scales(k.stage(), kScaleValue);
    uint32_t words[W / 8];
    if constexpr (kBody == Body::kUniform) {
      softmax_visible<!kOnes, false, W>(s, words, factor, sums, o, 0);
    } else if constexpr (kBody == Body::kScaled) {
      if constexpr (!kRopePlain) {
        const float one[2] = {1.0f, 1.0f};
        scale_scores<W>(s, shared.scales(k.stage(), kScaleAll), one);
      }
      softmax_visible<!kOnes, kValueScales, W>(s, words, factor, sums, o, values);
    } else {
      const int key = first + tid_x() % 4 * 4;
      scale_scores<W>(s, shared.scales(k.stage(), kScaleAll), factor);
      if constexpr (MLA_SOFTCAP || MLA_MASK_BIASES) shape_logits<W>(s, p, *item, row(), key);
      mask_logits<W>(s, p, *item, row(), key);
      softmax_masked<kValueScales, W>(s, words, sums, o, values);
    }
    if constexpr (kBody != Body::kUniform) {
      __syncwarp();  // all lanes have read the scales
      release(shared.k_empty(k.stage()));
    }

    mbarrier_wait_parity(shared.v_full(v.stage()), v.phase());
    if constexpr (kBody == Body::kMasked) clear_v_past(v.stage(), item->n_keys - first);
    // The tensor cores truncate what they add in fp8: a tile's product stands alone and is added in fp32.
    constexpr int kColumns = MLA_V_DIM + 8 * kOnes;
    float t[kColumns / 2];
    wgmma_fence();
    const uint64_t v_at = wgmma_k_major<kRowBytes>(shared.v(v.stage()));
#pragma unroll
    for (int i = 0; i < W / 32; i++) wgmma_e4m3_rs<kColumns>(t, words + 4 * i, v_at + descriptor_step(32 * i), i > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    release(shared.v_empty(v.stage()));
    v.advance();
    if constexpr (kOnes) sums.l[0] += t[MLA_V_DIM / 2], sums.l[1] += t[MLA_V_DIM / 2 + 2];  // column 128: lanes t = 0
    const float v_factor = kValueScales ? head->v_factor : 1.0f;
#pragma unroll
    for (int i = 0; i < MLA_V_DIM / 2; i++) o[i] = kValueScales ? __fmaf_rn(t[i], v_factor, o[i]) : o[i] + t[i];
    k.advance();
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

  // Whether all keys of the tile at hand have one scale; the same in all lanes.
  MLA_DEVICE bool one_scale() const {
    return __reduce_or_sync(~0u, __float_as_uint(shared.head(k.count)->factor)) != 0;
  }

  // The tile at hand, and the class of the next one. After a visible tile of one scale the next visible one is taken for
  // such a tile, too: its products are issued before that is known.
  MLA_DEVICE uint32_t work(uint32_t type, float (&o)[MLA_V_DIM / 2], RowSums& sums) {
    mbarrier_wait_parity(shared.k_full(k.stage()), k.phase());
    if (type == kVisible && !kRopePlain && !MLA_SOFTCAP) {
      const uint32_t next = step<Body::kUniform, kBlockN>(o, sums);
      return next == kManyScales ? kUnsure : next;
    }
    if (type == kHidden) return skip();
    if (type == kHalf) return step<Body::kMasked, kBlockN / 2>(o, sums);
    if (type == kPartial || MLA_SOFTCAP) return step<Body::kMasked, kBlockN>(o, sums);
    if (!kRopePlain && one_scale()) return kVisible;
    const uint32_t next = step<Body::kScaled, kBlockN>(o, sums);
    return next == kVisible ? kUnsure : next;
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
