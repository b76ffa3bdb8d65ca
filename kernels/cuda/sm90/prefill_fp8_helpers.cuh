// The other warps of the producer's warpgroup. Key warps bring the rope rows and the scales of each K tile, and its V^T
// where TMA cannot; transposing warps turn rows of V into V^T.
#pragma once
#include "prefill_fp8_layout.cuh"

// Rope rows of a tile, in boxes of every second row, one a lane. Returns the page of the lane's box; rows past the last
// key repeat its box, whose page exists.
MLA_DEVICE int load_rope(const PrefillParams& p, const KeyJob& job, uint32_t to, uint32_t full) {
  constexpr int kBoxes = 2 * kBlockN / kBox;
  const int lane = tid_x() & 31, mine = lane / 2 * kBox, half = lane % 2;
  int page = MLA_ROPE_KIND == kRopeBatched ? job.sequence : 0;
  if (lane < kBoxes) {
    int row = mine + (MLA_ROPE_KIND == kRopeRagged ? job.k_row : job.token);
    if constexpr (MLA_ROPE_KIND == kRopePaged) {
      const int last = (job.keys - 1) / kBox * kBox;
      const uint32_t token = job.token + (mine < last ? mine : last);
      page = page_row(p.page_table, job.sequence)[token / kPageSize];
      row = token % kPageSize;
    }
    cp_async_bulk_tensor_3d(to + row_of_key(mine + half) * kRopeRowBytes, p.rope, 0, row + half, page, full,
                            kEvictLast);
  }
  return page;
}

// The same, 16 bytes a lane, into the order and the swizzle that TMA would have made.
MLA_DEVICE void copy_rope(const PrefillParams& p, const KeyJob& job, uint32_t to) {
  constexpr int kChunks = kRopeRowBytes / 16, kRowsAtOnce = 32 / kChunks;
  const int lane = threadIdx.x & 31, rows = job.keys < kBlockN ? job.keys : kBlockN;
  const int* pages = page_row(p.page_table, job.sequence);
#pragma unroll 1
  for (int first = 0; first < rows; first += 32) {
    const int key = first + lane < rows ? first + lane : rows - 1;
    const uint64_t address = reinterpret_cast<uint64_t>(token_row(p.rope_rows, pages, job.token + key));
#pragma unroll 1
    for (int i = 0; i < kChunks; i++) {
      const int copied = kRowsAtOnce * i + lane / kChunks, chunk = lane % kChunks;
      const uint64_t from = __shfl_sync(~0u, address, copied);
      const int at = row_of_key(first + copied), swizzle = kRopeFp8 ? at >> 1 & 3 : at & 7;
      if (first + copied < rows)
        cp_async_cg_16(to + at * kRopeRowBytes + ((chunk ^ swizzle) << 4),
                       reinterpret_cast<const uint8_t*>(from) + 16 * chunk, 16);
    }
  }
  cp_async_commit_group();
  cp_async_wait_group<0>();
  fence_proxy_async_shared();
}

MLA_DEVICE float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

constexpr int kKeysOfLane = kBlockN / 32;  // one after the other

template <typename T> MLA_DEVICE const T* opaque(const T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

struct KeyScales { float nope[kKeysOfLane], rope[kKeysOfLane], value[kKeysOfLane]; };

// The scales of this lane's keys, all of which lie in one page and before the sequence's end.
MLA_DEVICE KeyScales load_scales_in_row(const PrefillParams& p, const KeyJob& job, int page) {
  const int first = kKeysOfLane * (tid_x() & 31), row = job.k_row + first;
  const int token = MLA_ROPE_KIND == kRopeRagged ? row : job.token + first;
  const float* nope = p.k_scales + row * p.k_scales_stride;
  const float* value = kValueScales ? p.v_scale + row * p.v_scale_stride : nullptr;
  const uint8_t* rope = nullptr;
  if constexpr (kRopeFp8)
    rope =
        token_row(p.rope_scales, Place{page, MLA_ROPE_KIND == kRopePaged ? int(uint32_t(token) % kPageSize) : token});
  KeyScales x;
#pragma unroll
  for (int i = 0; i < kKeysOfLane; i++) {
    x.nope[i] = ld_global_nc_in_order(nope);
    x.value[i] = kValueScales ? ld_global_nc_in_order(value) : 1.0f;
    if constexpr (kRopeFp8)
      x.rope[i] = ld_global_nc_in_order(reinterpret_cast<const float*>(rope));
    else
      x.rope[i] = kRopePlain ? 1.0f : x.nope[i];
    nope = opaque(nope + p.k_scales_stride);
    if constexpr (kValueScales) value = opaque(value + p.v_scale_stride);
    if constexpr (kRopeFp8) rope = opaque(rope + p.rope_scales.token_stride);
  }
  return x;
}

// The same wherever they lie. Keys past the sequence's end take those of the first key: they are hidden, and must not
// spoil what the others have in common.
MLA_DEVICE KeyScales load_scales_apart(const PrefillParams& p, const KeyJob& job) {
  int key[kKeysOfLane], page[kKeysOfLane];
  const int* pages = MLA_ROPE_KIND == kRopePaged && kRopeFp8 ? page_row(p.page_table, job.sequence) : nullptr;
  KeyScales x;
  // All loads of a kind before those that wait for them.
#pragma unroll
  for (int i = 0; i < kKeysOfLane; i++) {
    const int mine = kKeysOfLane * (tid_x() & 31) + i;
    key[i] = mine < job.keys ? mine : 0;
    if constexpr (MLA_ROPE_KIND == kRopePaged && kRopeFp8)
      page[i] = ld_global_nc_in_order(pages + uint32_t(job.token + key[i]) / kPageSize);
    else
      page[i] = MLA_ROPE_KIND == kRopeBatched ? job.sequence : 0;
  }
#pragma unroll
  for (int i = 0; i < kKeysOfLane; i++) {
    x.nope[i] = ld_global_nc_in_order(p.k_scales + (job.k_row + key[i]) * p.k_scales_stride);
    x.value[i] = kValueScales ? ld_global_nc_in_order(p.v_scale + (job.k_row + key[i]) * p.v_scale_stride) : 1.0f;
  }
#pragma unroll
  for (int i = 0; i < kKeysOfLane; i++) {
    const int token = (MLA_ROPE_KIND == kRopeRagged ? job.k_row : job.token) + key[i];
    const Place place{page[i], MLA_ROPE_KIND == kRopePaged ? int(uint32_t(token) % kPageSize) : token};
    if constexpr (kRopeFp8)
      x.rope[i] = ld_global_nc_in_order(reinterpret_cast<const float*>(token_row(p.rope_scales, place)));
    else
      x.rope[i] = kRopePlain ? 1.0f : x.nope[i];
  }
  return x;
}

// Scales of a tile. `page` of a lane: that of its box of rope rows; negative: these did not come in boxes.
MLA_DEVICE void bring_scales(const PrefillParams& p, const Shared& shared, const KeyJob& job, Ring<kStagesK> k,
                             int page) {
  const int lane = tid_x() & 31;
  KeyScales x;
  if (job.keys >= kBlockN && (MLA_ROPE_KIND != kRopePaged || !kRopeFp8 || page >= 0))
    x = load_scales_in_row(p, job,
                           MLA_ROPE_KIND == kRopePaged     ? __shfl_sync(~0u, page, kKeysOfLane * lane / kBox * 2)
                           : MLA_ROPE_KIND == kRopeBatched ? job.sequence
                                                           : 0);
  else
    x = load_scales_apart(p, job);

  const float common = __shfl_sync(~0u, x.nope[0], 0), common_value = __shfl_sync(~0u, x.value[0], 0);
  bool alike = !kRopePlain;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kKeysOfLane; i++) {
    alike &= x.nope[i] == common && x.rope[i] == common;
    if (kValueScales) alike &= x.value[i] == common_value && x.value[i] >= 0.0f;
    largest = fmaxf(largest, fabsf(x.value[i]));
  }
  alike = __all_sync(~0u, alike && common != 0.0f);
  // V's scales are brought to the largest of the tile, so that P keeps its range.
  const float v_factor = kValueScales ? warp_max(largest) : 1.0f;
  const float to_ratio = v_factor == 0.0f ? 0.0f : rcp_approx_ftz(v_factor);
  if (lane == 0) {
    shared.head(k.count)->factor = alike ? common : 0.0f;
    if (kValueScales) shared.head(k.count)->v_factor = v_factor;
  }
  if (alike && job.scales == kOfEachOrAll) return;
  // S of the nope part is brought to the rope's scale before that is added. A scale of zero leaves its part out.
  constexpr float kLeast = 0x1p-80f;
  Bytes<16> ratios, all, values;
#pragma unroll
  for (int i = 0; i < kKeysOfLane; i++) {
    const float least = kTwoScales && fabsf(x.rope[i]) < kLeast ? kLeast : x.rope[i];
    ratios.words[i] = __float_as_uint(x.nope[i] * rcp_approx_ftz(least));
    all.words[i] = __float_as_uint(least);
    values.words[i] = __float_as_uint(x.value[i] * to_ratio);
  }
  const uint32_t at = 16 * lane;
  if (kTwoScales) st_shared(shared.scales(k.stage(), kScaleNope) + at, ratios);
  st_shared(shared.scales(k.stage(), kScaleAll) + at, all);
  if (kValueScales) st_shared(shared.scales(k.stage(), kScaleValue) + at, values);
  if constexpr (kOneArray) fence_proxy_async_shared();  // the next to write there may be TMA
}

// Columns of V^T from any key on, 16 keys a lane: words around them are shifted into place.
MLA_DEVICE void copy_values(const PrefillParams& p, const KeyJob& job, uint32_t to) {
  constexpr int kChunks = kBlockN / 16;
  const int lane = threadIdx.x & 31, chunk = lane % kChunks;
  const int key = job.k_row + 16 * chunk, shift = key % 4 * 8;
  const uint8_t* columns = p.values + job.head * p.values_stride_h + (key - key % 4);
  constexpr int kEach = 32 / kChunks, kAtOnce = 4;  // columns of a turn, turns whose loads are in flight together
#pragma unroll 1
  for (int column = lane / kChunks; column < MLA_V_DIM; column += kAtOnce * kEach) {
    uint32_t words[kAtOnce][5];
#pragma unroll
    for (int turn = 0; turn < kAtOnce; turn++) {
      const uint8_t* from = columns + (column + turn * kEach) * p.values_stride_d;
#pragma unroll
      for (int i = 0; i < 5; i++)
        words[turn][i] = key - key % 4 + 4 * i < p.rows ? __ldg(reinterpret_cast<const uint32_t*>(from) + i) : 0;
    }
#pragma unroll
    for (int turn = 0; turn < kAtOnce; turn++) {
      const int at = column + turn * kEach;
      Bytes<16> keys;
#pragma unroll
      for (int i = 0; i < 4; i++) keys.words[i] = __funnelshift_r(words[turn][i], words[turn][i + 1], shift);
      st_shared(to + at * kBlockN + ((chunk ^ (at & 7)) << 4), keys);
    }
  }
  fence_proxy_async_shared();
}

MLA_DEVICE void help_with_keys(const PrefillParams& p, const Shared& shared, int warp) {
#pragma unroll 1
  for (Ring<kStagesK> k{uint32_t(warp)};; k.count += kKeyWarps) {
    mbarrier_wait_parity(shared.job_full(k.stage()), k.phase());
    const KeyJob job = *shared.job(k.stage());
    if (job.source == kNoMoreKeys) return;
    const uint32_t rope = shared.k(k.stage()) + kKNopeBytes;
    int page = -1;
    if constexpr (kRopeBox > 0)
      if (job.source == kRopeByTma) page = load_rope(p, job, rope, shared.k_full(k.stage()));
    if constexpr (kRopeCopy)
      if (job.source == kRopeByCopy) copy_rope(p, job, rope);
    if (job.scales < kOfNone) bring_scales(p, shared, job, k, page);
    __syncwarp();
    const bool lead = (threadIdx.x & 31) == 0;
    if (lead) mbarrier_arrive(shared.k_full(k.stage()));
    if (values_by_copy(job.k_row)) {
      const Ring<kStagesV> v{k.count};
      mbarrier_wait_parity(shared.v_free(v.stage()), v.phase());
      copy_values(p, job, shared.v(v.stage()));
      __syncwarp();
      if (lead) mbarrier_arrive(shared.v_full(v.stage()));
    }
  }
}

// Transposes 64 keys by 32 columns of V for each of four parts of a tile. ldmatrix moves pairs of bytes: of each key a
// lane gets an even column and the odd one beside it. Keys of one pair and the next interleave (their rows lie 32
// apart), so a permutation of two words makes four consecutive keys of one column; stmatrix lays them down. Rows 0 to 3
// of a stored matrix take even columns and rows 4 to 7 odd ones, or the other way round: eight different rows modulo 8,
// no bank conflicts.
MLA_DEVICE void transpose_part(uint32_t raw, uint32_t to, int block, int part) {
  const int lane = threadIdx.x & 31, at = lane & 7, matrix = lane >> 3;
  const uint32_t from =
      raw + (block * kKeyBlock + (matrix & 1) * 32 + at) * kRowBytes + (((2 * part + (matrix >> 1)) ^ at) << 4);
  const int column = part * 32 + (matrix >> 1) * 16 + 2 * at + ((matrix & 1) ^ (at >> 2));
  const uint32_t into = to + column * kBlockN;
  const uint32_t first = lane < 16 ? 0x6240 : 0x7351, second = lane < 16 ? 0x7351 : 0x6240;
  uint32_t words[4][4];
#pragma unroll
  for (int i = 0; i < 4; i++) ldmatrix_x4_trans(words[i], from + i * 8 * kRowBytes);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t turned[4] = {
        __byte_perm(words[i][0], words[i][1], first), __byte_perm(words[i][0], words[i][1], second),
        __byte_perm(words[i][2], words[i][3], first), __byte_perm(words[i][2], words[i][3], second)};
    stmatrix_x4(into + (((4 * block + i) ^ (column & 7)) << 4), turned);
  }
}

MLA_DEVICE void transpose_values(const Shared& shared, int warp) {
  Ring<kStagesRaw> raw{0};
  Ring<kStagesV> v{kStagesV};
#pragma unroll 1
  for (;; raw.advance(), v.advance()) {
    mbarrier_wait_parity(shared.raw_full(raw.stage()), raw.phase());
    if (*shared.no_more_v()) return;
    mbarrier_wait_parity(shared.v_empty(v.stage()), v.phase());
#pragma unroll 1
    for (int part = 0; part < 4; part++) transpose_part(shared.raw(raw.stage()), shared.v(v.stage()), warp, part);
    fence_proxy_async_shared();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
      mbarrier_arrive(shared.v_full(v.stage()));
      mbarrier_arrive(shared.raw_empty(raw.stage()));
    }
  }
}
