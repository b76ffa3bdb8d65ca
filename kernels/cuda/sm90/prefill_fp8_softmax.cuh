// Online softmax of one warpgroup in fp8: a thread holds two rows (r = 0, 1; eight apart) of a score tile; element
// 4 j + 2 r + e is key key_of(4 j + 2 r + e) + 4 t. P leaves as A fragments of the next product: word 2 u + r holds
// keys 16 u + 4 t to 16 u + 4 t + 3.
#pragma once
#include "prefill_fp8_layout.cuh"

// This thread's first keys in an array over the tile: four of each 16.
MLA_DEVICE uint32_t keys_of_thread(uint32_t array) { return array + (tid_x() & 3) * 16; }

// The scales of a tile's first W keys: those of 64 are read at once, while products are in flight.
template <int W> struct ScalesOfKeys {
  static constexpr int kAhead = 4;
  uint32_t mine;
  float4 ahead[kAhead];

  MLA_DEVICE void read(uint32_t array) {
    mine = keys_of_thread(array);
#pragma unroll
    for (int u = 0; u < kAhead; u++) ahead[u] = ld_shared_v4_f32(mine + 64 * u);
  }
  // s *= scale of the key, times a factor of the row.
  MLA_DEVICE void multiply(float (&s)[W / 2], const float (&row)[2]) {
#pragma unroll
    for (int u = 0; u < W / 16; u++) {
      const float4 x = ahead[u % kAhead];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int i = u / 4 * 32 + u % 4 * 4 + 2 * r;
        s[i] *= x.x * row[r], s[i + 16] *= x.y * row[r], s[i + 1] *= x.z * row[r], s[i + 17] *= x.w * row[r];
      }
      if (u + kAhead < W / 16) {
        ahead[u % kAhead] = ld_shared_v4_f32(mine + 64 * (u + kAhead));
        __syncwarp();
      }
    }
  }
};

// Base-2 logits are softcapped and biased.
template <int W>
MLA_DEVICE void shape_logits(float (&s)[W / 2], const PrefillParams& p, const Item& item, int q_row, int key) {
#pragma unroll
  for (int i = 0; i < W / 2; i++) {
#if MLA_SOFTCAP
    // softcap * tanh(x / softcap) by tanh(y) = 1 - 2 / (1 + exp(2y)), whose absolute error stays near fp32's
    s[i] = p.softcap_logit - 2.0f * p.softcap_logit * rcp_approx_ftz(1.0f + ex2_approx_ftz(s[i] * p.softcap_scale));
#endif
#if MLA_MASK_BIASES
    const int row = item.q_position + q_row + (i & 2) * 4 - item.start, column = item.k_position + key + key_of(i);
    s[i] += kLog2e * mask_bias(p.mask, item.sequence, item.head, row, column);
#endif
  }
}

// Hides by select. q_row: this thread's first row in the item; key: its first key, counted from key 0.
template <int W>
MLA_DEVICE void mask_logits(float (&s)[W / 2], const PrefillParams& p, const Item& item, int q_row, int key) {
  if (key - (key & 15) + W > item.n_keys) {
    const int limit = item.n_keys - key;
#pragma unroll
    for (int i = 0; i < W / 2; i++) s[i] = key_of(i) < limit ? s[i] : -infinity();
  }
#if !MLA_MASK_ALWAYS
  // Positions relative to the first key, hidden from the compiler's algebra: `k <= q` then compares a constant with a
  // register.
  const int k_position = item.k_position + key;
  int ahead = item.q_position + q_row - k_position;
  asm volatile("" : "+r"(ahead));
  if constexpr (MLA_MASK_UNROLL) {
#pragma unroll
    for (int i = 0; i < W / 2; i++) {
      const bool visible =
          mask_visible(p.mask, item.sequence, item.head, k_position + (ahead + (i & 2) * 4), k_position + key_of(i));
      s[i] = visible ? s[i] : -infinity();
    }
  } else {
    // An expression of several comparisons, unrolled, takes more registers than there are: first the answers of a part
    // in a word, then the selects.
#pragma unroll
    for (int part = 0; part < W / 2; part += 32) {
      uint32_t visible = 0;
#pragma unroll 1
      for (int i = 0; i < 32; i++)
        visible |= uint32_t(mask_visible(p.mask, item.sequence, item.head, k_position + (ahead + (i & 2) * 4),
                                         k_position + key_of(part + i)))
                   << i;
#pragma unroll
      for (int i = 0; i < 32; i++) s[part + i] = visible >> i & 1 ? s[part + i] : -infinity();
    }
  }
#endif
}

// The largest logit of a row among this tile's; all lanes of the warp take part.
template <int W> MLA_DEVICE float row_maximum(const float (&s)[W / 2], int r, float factor) {
  float a = -infinity(), b = -infinity();
#pragma unroll
  for (int j = 0; j < W / 8; j++) {
    a = fmaxf(a, s[4 * j + 2 * r] * factor);
    b = fmaxf(b, s[4 * j + 2 * r + 1] * factor);
  }
  a = fmaxf(a, b);
  a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
  return fmaxf(a, __shfl_xor_sync(~0u, a, 2));
}

// P of a tile, and this thread's share of its row sums where these are kept in fp32. `values`: factors of the keys' V.
// The exponentials of a word come before those of the word before are rounded, which would wait for them.
template <bool kSums, bool kValues, int W>
MLA_DEVICE void exponentials(const float (&s)[W / 2], uint32_t (&words)[W / 8], const float (&factor)[2],
                             const RowSums& sums, float (&sum)[2], uint32_t values) {
  sum[0] = sum[1] = 0.0f;
  float y[2][4];
#pragma unroll
  for (int word = 0; word <= W / 8; word++) {
    if (word < W / 8) {
      const int u = word / 2, r = word % 2, i = u / 4 * 32 + u % 4 * 4 + 2 * r;
      y[r][0] = ex2_approx_ftz(__fmaf_rn(s[i], factor[r], -sums.m[r]));
      y[r][1] = ex2_approx_ftz(__fmaf_rn(s[i + 16], factor[r], -sums.m[r]));
      y[r][2] = ex2_approx_ftz(__fmaf_rn(s[i + 1], factor[r], -sums.m[r]));
      y[r][3] = ex2_approx_ftz(__fmaf_rn(s[i + 17], factor[r], -sums.m[r]));
    }
    if (word > 0) {
      const int r = (word - 1) % 2;
      if constexpr (kSums) sum[r] += (y[r][0] + y[r][1]) + (y[r][2] + y[r][3]);
      if constexpr (kValues) {
        if (r == 0) __syncwarp();
        const float4 v = ld_shared_v4_f32(values + 64 * ((word - 1) / 2));
        y[r][0] *= v.x, y[r][1] *= v.y, y[r][2] *= v.z, y[r][3] *= v.w;
      }
      words[word - 1] = cvt_rn_satfinite_e4m3x4(y[r][0], y[r][1], y[r][2], y[r][3]);
    }
  }
}

// Moves the references of rows to `target` where `moves`, and what was summed up with them.
MLA_DEVICE void move_rows(RowSums& sums, float (&o)[MLA_V_DIM / 2], const float (&target)[2], const bool (&moves)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float alpha = moves[r] ? ex2_approx_ftz(sums.m[r] - target[r]) : 1.0f;
    sums.m[r] = moves[r] ? target[r] : sums.m[r];
    sums.l[r] *= alpha;
#pragma unroll
    for (int j = 0; j < MLA_V_DIM / 8; j++) o[4 * j + 2 * r] *= alpha, o[4 * j + 2 * r + 1] *= alpha;
  }
}

// Moves references to the largest logits of this tile, of the rows that are asked for and where these are larger.
template <int W>
MLA_DEVICE void raise_references(const float (&s)[W / 2], const float (&factor)[2], RowSums& sums,
                                 float (&o)[MLA_V_DIM / 2], bool first, bool second) {
  const bool asked[2] = {first, second};
  float target[2];
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    target[r] = row_maximum<W>(s, r, factor[r]) - kHeadroom;
    moves[r] = asked[r] && target[r] > sums.m[r];
  }
  move_rows(sums, o, target, moves);
}

// Softmax of a tile of which every key is visible. Exponentials are taken with the references as they are; only a P of
// 2^8 or more, whose byte a carry betrays, makes a row take its maximum and the tile begin anew. Where sums are kept in
// fp32, they betray it: nothing of a sum below e4m3's largest number is larger. Each row decides for itself: the others'
// P come out as before, to the bit.
template <bool kSums, bool kValues, int W>
MLA_DEVICE void softmax_visible(const float (&s)[W / 2], uint32_t (&words)[W / 8], const float (&factor)[2],
                                RowSums& sums, float (&o)[MLA_V_DIM / 2], uint32_t values) {
  constexpr uint32_t kCarry = 0x08080808, kBit = 0x80808080;
  float sum[2];
  exponentials<kSums, kValues, W>(s, words, factor, sums, sum, values);
  uint32_t flags[2] = {0, 0};
  if constexpr (kSums) {
#pragma unroll
    for (int r = 0; r < 2; r++) flags[r] = sum[r] >= kLargest ? kBit : 0;
  } else {
#pragma unroll
    for (int i = 0; i < W / 8; i++) flags[i & 1] |= words[i] + kCarry;
  }
  if (__builtin_expect(__any_sync(~0u, ((flags[0] | flags[1]) & kBit) != 0), 0)) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      flags[r] &= kBit;
      flags[r] |= __shfl_xor_sync(~0u, flags[r], 1);
      flags[r] |= __shfl_xor_sync(~0u, flags[r], 2);
    }
    raise_references<W>(s, factor, sums, o, flags[0] != 0, flags[1] != 0);
    exponentials<kSums, kValues, W>(s, words, factor, sums, sum, values);
  }
  if constexpr (kSums) sums.l[0] += sum[0], sums.l[1] += sum[1];
}

// Softmax of logits, some of which may be hidden.
template <bool kValues, int W>
MLA_DEVICE void softmax_masked(const float (&s)[W / 2], uint32_t (&words)[W / 8], RowSums& sums,
                               float (&o)[MLA_V_DIM / 2], uint32_t values) {
  const float one[2] = {1.0f, 1.0f};
  float target[2], sum[2];
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    target[r] = row_maximum<W>(s, r, 1.0f) - kHeadroom;
    moves[r] = target[r] > sums.m[r];
  }
  if (__any_sync(~0u, moves[0] || moves[1])) move_rows(sums, o, target, moves);
  RowSums from = sums;
#pragma unroll
  for (int r = 0; r < 2; r++) from.m[r] = sums.m[r] == -infinity() ? 0.0f : sums.m[r];  // -inf - -inf is no number
  exponentials<true, kValues, W>(s, words, one, from, sum, values);
  sums.l[0] += sum[0], sums.l[1] += sum[1];
}
