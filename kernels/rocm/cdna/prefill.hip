// MLA prefill attention on MFMA:  O = softmax(scale * (Q_nope K^T + Q_rope R^T), masked) V,  lse = ln sum exp, over
// ragged sequences.
//
// Tiling: a workgroup takes kBlockM = 32 * kWaves queries of one (sequence, head) and walks its keys kBlockN at a time.
// A wave owns 32 queries and computes everything transposed, so that a lane keeps one query from the scores to the
// output:
//
//        S^T [keys, 32] = K [keys, d] Q^T [d, 32]        two phases, nope then rope columns, into one accumulator
//        O^T [dv, 32]  += V^T [dv, keys] P^T [keys, 32]
//
//   lane 0..63         registers (16 a 32 x 32 block): S^T rows (r / 4) * 8 + (lane / 32) * 4 + r % 4, column lane % 32 = its query
//
// The register layout of S^T is that of P^T as an MFMA operand, so P never leaves its lane; row maxima take one
// exchange with lane ^ 32.
//
// Roles: every wave loads its share of the next tile into registers before it computes on this one, and writes it to
// the other LDS stage after. Registers: Q (kKeyPitch / 8), O (kVDim / 2), scores (kBlockN / 2), the share of a tile. LDS:
// two stages, see prefill_layout.hpp. Barriers: one a tile; it separates the reads of a stage from the writes two tiles
// later, and those writes from their reads.
//
// 8 bits: q, k and v in the format of the architecture, P too; rope of 8 bits with a scale for each key, or of 16. Scales of
// keys and values are multiplied into the scores and into P by lane broadcasts (KeyScales), those of queries and heads into
// a row's own factors. PV stays in the accumulators of MFMA: they hold fp32 with one rounding for 16 products (docs/rocm.md).
//
// Order of work: prefill_schedule.hpp.
//
// Numerics: scores and sums in fp32, base 2; P rounded to Element; hidden keys by select; rows at or past n_keys are
// never read. A row's bits depend on its own sequence alone: the key tiles are fixed, masked and unmasked paths agree,
// and a tile hidden for a row changes nothing in it.
//
// Budget and bound: docs/rocm.md. Never run on AMD hardware yet: no measured share.

#include "cdna.hpp"
#include "mask.hpp"
#include "prefill_schedule.hpp"
#include "prefill_softmax.hpp"

struct PrefillParams {
  HeadRows q;  // [T, H, kNopeDim + kRopeDim]; beside q_rope [T, H, kNopeDim]
  HeadRows q_rope;  // [T, H, kRopeDim], of 16 bits beside an 8-bit q; else null
  HeadRows k;  // [L, H, kNopeDim]
  HeadRows v;  // [L, H, kVDim]; transposed: token_stride is that of a column
  HeadRows output;  // [T, H, kVDim]
  PagedRows rope;  // paged; batched: page_stride is that of a sequence; ragged: rows as k
  PagedRows rope_scales;  // of an 8-bit rope: one f32 a key, addressed as the rope
  RowScales q_scale;  // of 8-bit rows: one a query
  RowScales k_scales;  // one a key
  RowScales v_scale;  // one a head, or with MLA_V_SCALED_ROWS one a key; null for none
  PageTable page_table;
  SequenceArgs sequences;
  MaskArgs mask;
  float* lse;  // [T, H], strides in elements
  int64_t lse_token_stride;
  int64_t lse_head_stride;
  const float* sinks;  // [H]
  ScoreScale scale;
  int batch_size;
  int slots_y;  // workgroups along y
};

using Output = MLA_OUTPUT;

struct Item {
  int b, h;
  int first;  // first query of the tile, counted in its sequence
  Sequence s;
};

// False for a workgroup without a tile.
MLA_DEVICE bool find_item(const PrefillParams& p, Item& item) {
  const Slot slot = find_slot(p.sequences, p.batch_size, workgroup_z() * p.slots_y + workgroup_y());
  item.b = slot.sequence;
  item.h = workgroup_x();
  item.s = geometry_of(p.sequences, item.b);
  item.first = (ceil_div(item.s.new_, kBlockM) - 1 - slot.tile) * kBlockM;
  return slot.tile >= 0;
}

MLA_DEVICE KeySource key_source(const PrefillParams& p, const Item& item) {
  KeySource source;
  const Sequence& s = item.s;
  source.k = p.k.data + s.k_begin * p.k.token_stride + item.h * p.k.head_stride;
  source.k_stride = uint32_t(p.k.token_stride);
  source.v.data = p.v.data + s.k_begin * (MLA_V_TRANSPOSED ? 1 : p.v.token_stride) + item.h * p.v.head_stride;
  source.v.stride = uint32_t(p.v.token_stride);
  source.rope_stride = uint32_t(p.rope.token_stride);
  source.rope_rows = p.rope;
  source.rope_scales = p.rope_scales;
  const auto from_first_key = [&](const RowScales& scales) {
    return RowScales{row_scale(scales, s.k_begin), scales.stride};
  };
  source.k_scales = from_first_key(p.k_scales);
  source.v_scales = from_first_key(p.v_scale);
  if constexpr (MLA_ROPE_KIND == kRopePaged) source.rope_pages = page_row(p.page_table, item.b);
  const auto first_row = [&](const PagedRows& rows) {
    return rows.data + (MLA_ROPE_KIND == kRopeBatched ? item.b * rows.page_stride + s.offset * rows.token_stride
                                                      : s.k_begin * rows.token_stride);
  };
  if constexpr (MLA_ROPE_KIND != kRopePaged) {
    source.rope = first_row(p.rope);
    source.rope_scales.data = first_row(p.rope_scales);
  }
  source.offset = s.offset;
  source.n_keys = s.n_keys;
  return source;
}

// Class of a key tile for the queries [q_lo, q_hi] of the sequence.
MLA_DEVICE int class_of(const PrefillParams& p, const Item& item, int q_lo, int q_hi, int tile) {
#if MLA_MASK_ALWAYS
  return kTileVisible;
#else
  const int k_lo = item.s.offset + tile * kBlockN,
            k_hi = item.s.offset + smaller(item.s.n_keys, (tile + 1) * kBlockN) - 1;
  return mask_tile_class(p.mask, item.b, item.h, item.s.start + q_lo, item.s.start + q_hi, k_lo, k_hi);
#endif
}

// Four consecutive columns of the output.
MLA_DEVICE void store_quad(float*, uint8_t* p, f32x4 x) { store_global(p, x); }
template <typename T> MLA_DEVICE void store_quad(T*, uint8_t* p, f32x4 x) {
  const auto pair = [](float a, float b) {
    return uint32_t(from_float<T>(a).bits) | uint32_t(from_float<T>(b).bits) << 16;
  };
  store_global(p, u32x2{pair(x[0], x[1]), pair(x[2], x[3])});
}

MLA_DEVICE void load_queries(const PrefillParams& p, const Item& item, int row, Queries& q) {
  const int64_t token = item.s.q_begin + row;
  const auto columns = [&](const HeadRows& rows) {
    return rows.data + token * rows.token_stride + item.h * rows.head_stride;
  };
  if constexpr (kKeyScaled && !kRopeScaled) {
    q.load<0, kNopeFragments>(columns(p.q));
    q.load<kNopeFragments, kRopeFragments>(columns(p.q_rope));
  } else {
    q.load<0, kKeyFragments>(columns(p.q));
  }
  if constexpr (kKeyScaled) q.scale = load_global<float>(row_scale(p.q_scale, token));
}

// `state.l` is the whole denominator here.
MLA_DEVICE void finish(const PrefillParams& p, const Item& item, int row, RowState state,
                       const f32x16 (&o)[kVDim / 32]) {
  float m = state.m, total = state.l, factor = 1.0f;
#if MLA_SINKS
  const float sink = kLog2e * p.sinks[item.h];
  m = maximum(state.m, sink);
  if (m != -infinity()) {
    factor = exp2_flushed(state.m - m);
    total = state.l * factor + exp2_flushed(sink - m);
  }
#endif
  float weight = state.l > 0.0f ? factor / total : 0.0f;
  if constexpr (MLA_V_SCALED_ROWS)
    weight *= state.weight / kUnitWeight;
  else if constexpr (kKeyScaled)
    weight *= p.v_scale.data != nullptr ? load_global<float>(row_scale(p.v_scale, item.h)) : 1.0f;
  const int64_t token = item.s.q_begin + row;
  uint8_t* out = const_cast<uint8_t*>(p.output.data) + token * p.output.token_stride + item.h * p.output.head_stride +
                 lane_key() * int(sizeof(Output));
#pragma unroll
  for (int d = 0; d < kVDim / 32; ++d)
#pragma unroll
    for (int g = 0; g < 4; ++g)
      store_quad(static_cast<Output*>(nullptr), out + (d * 32 + g * 8) * int(sizeof(Output)),
                 f32x4{o[d][4 * g], o[d][4 * g + 1], o[d][4 * g + 2], o[d][4 * g + 3]} * weight);
#if MLA_LSE
  if (lane_id() < 32)
    p.lse[token * p.lse_token_stride + item.h * p.lse_head_stride] =
        total > 0.0f ? kLn2 * (m + log2_normal(total)) : -infinity();
#endif
}

extern "C" __global__ void MLA_WORKGROUP(MLA_THREADS) MLA_WAVES(MLA_WAVES_PER_SIMD) mla_prefill(PrefillParams p) {
  __shared__ __attribute__((aligned(128))) uint8_t lds[2 * kStageBytes];
  Item item;
  if (!find_item(p, item)) return;

  const Sequence& s = item.s;
  const int wave_first = item.first + wave_id() * kRowsPerWave,
            wave_last = smaller(wave_first + kRowsPerWave, s.new_) - 1;
  const int group_last = smaller(item.first + kBlockM, s.new_) - 1;
  const int row = wave_first + lane_id() % 32;
  Queries q;
  load_queries(p, item, smaller(row, s.new_ - 1), q);
  ScoreScale score_scale = p.scale;
  if constexpr (kKeyScaled && (kRopeScaled || MLA_ROPE_PRESCALED)) {
    score_scale.logit *= q.scale;
    score_scale.softcap_scale *= q.scale;
  }

  RowState state;
  f32x16 o[kVDim / 32] = {};

  const KeySource source = key_source(p, item);
  const int tiles = ceil_div(s.n_keys, kBlockN);
  const auto next_visible = [&](int tile) {
#pragma clang loop vectorize(disable) unroll(disable)
    while (tile < tiles && class_of(p, item, item.first, group_last, tile) == kTileHidden) ++tile;
    return tile;
  };

  // Tiles in flight: `after` has its page ids asked for, `next` its rows, `tile` lies in LDS. Negative: none yet.
  const FragmentPlaces places;
  TileRegisters registers;
  int tile = -2, next = -1, stage = 0;
  KeyScales scales = {};  // of the tile in LDS
  wait_for_loads();  // the queries
  while (tile < tiles) {
    if (next >= 0 && next < tiles) registers.fetch(source, next);
    const int after = next_visible(next + 1);
    if (after < tiles) registers.fetch_pages(source, after);
    const bool wanted = tile >= 0 && wave_first <= wave_last;
    const int tile_class = wanted ? class_of(p, item, wave_first, wave_last, tile) : int(kTileHidden);
    if (tile_class != kTileHidden) {
      uint8_t* current = lds + stage * kStageBytes;
      const int first = tile * kBlockN, keys = s.n_keys - first;
      Scores scores;
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block) scores[block] = score_block(current, places, q, scales, block);
      scale_scores(scores, score_scale);
      if (MLA_MASK_BIASES || tile_class == kTilePartial || keys < kBlockN)
        mask_scores(scores, p.mask, item.b, item.h, s.start + row, s.offset + first, keys, s.start);
      float factor = move_reference(scores, state);
      if constexpr (MLA_V_SCALED_ROWS) {
        exponentials(scores, state);
        factor = weigh_by_scales(scores, scales.value, state, factor);
      }
      if (any_lane(factor != 1.0f)) {
#pragma unroll
        for (int d = 0; d < kVDim / 32; ++d) o[d] *= factor;
      }
      if constexpr (!MLA_V_SCALED_ROWS) exponentials(scores, state);
      u32x4 probabilities[kValueFragments];
      pack(scores, probabilities);
      weigh_values(current, places, probabilities, o);
    }
    stage ^= 1;
    if (next >= 0 && next < tiles) registers.commit(lds + stage * kStageBytes);
    barrier();  // the stage of `tile` is read, that of `next` is written
    scales = registers.scales;
    tile = next;
    next = after;
  }
  state.l += other_half(state.l);
  if (row < s.new_) finish(p, item, row, state, o);
}
