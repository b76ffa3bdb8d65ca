// Merge of two attention results over disjoint keys, by their log-sum-exps (natural log):
//
//   lse = ln(e^p + e^s)      out = w * prefix + (1 - w) * suffix,  w = e^(p - lse) = 1 / (1 + e^(s - p))
//
// A side with LSE -inf or +inf is empty: it weighs nothing and its output is never read. Both empty: 0 and -inf. NaN spreads.
// Where the output lies in the prefix's place, a row whose suffix is empty stays as it is: of the keys of one chunk, many rows see none.
//
// kLanes neighbouring lanes merge one (token, head), 8 elements each; a thread takes kRows of them, all loads first, so the
// output may be one of the inputs, its LSE too: the lanes of a row lie in one warp, which meets before it writes.
//
// Budget: bf16, dv 128: 3 x 256 + 12 bytes a (token, head); at a copy's 4.24 TB/s (H200) 0.18 ns.

#include "chunk.cuh"

// [T, H, dv] or, with one element a row, [T, H]; strides in bytes.
struct Rows {
  uint8_t* data;
  int64_t token_stride;
  int64_t head_stride;
};

struct MergeParams {
  Rows output;
  Rows prefix;
  Rows suffix;
  Rows prefix_lse;
  Rows suffix_lse;
  Rows output_lse;  // data null: not wanted
  int tokens;
  int heads;
};

using Source = MLA_SOURCE;
using Output = MLA_OUTPUT;
constexpr int kLanes = MLA_V_HEAD_DIM / kChunk;
constexpr int kRowsPerPass = MLA_THREADS / kLanes;
constexpr int kRows = MLA_ROWS;
static_assert(MLA_V_HEAD_DIM % kChunk == 0 && 32 % kLanes == 0, "whole rows in a warp");

MLA_DEVICE uint8_t* row_of(const Rows& rows, uint32_t token, uint32_t head) {
  return rows.data + token * rows.token_stride + head * rows.head_stride;
}

MLA_DEVICE bool empty(float lse) { return fabsf(lse) == infinity(); }

struct Weights {
  float prefix;
  float suffix;
  float lse;
};
MLA_DEVICE Weights weights_of(float prefix, float suffix) {
  if (empty(prefix) && empty(suffix)) return {0.0f, 0.0f, -infinity()};
  if (empty(prefix)) return {0.0f, 1.0f, suffix};
  if (empty(suffix)) return {1.0f, 0.0f, prefix};
  const float difference = suffix - prefix;  // e^difference may overflow to infinity: its reciprocal is then 0
  return {1.0f / (1.0f + expf(difference)), 1.0f / (1.0f + expf(-difference)),
          fmaxf(prefix, suffix) + log1pf(expf(-fabsf(difference)))};
}

extern "C" __global__ void __launch_bounds__(MLA_THREADS, 2) mla_merge(const __grid_constant__ MergeParams p) {
  const int column = threadIdx.x % kLanes * kChunk;
  const uint32_t rows = uint32_t(p.tokens) * uint32_t(p.heads);
  const uint32_t first = blockIdx.x * uint32_t(kRowsPerPass * kRows) + threadIdx.x / kLanes;

  float prefix_lse[kRows], suffix_lse[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t row = first + i * kRowsPerPass, token = row / p.heads, head = row % p.heads;
    prefix_lse[i] = suffix_lse[i] = -infinity();
    if (row >= rows) continue;
    prefix_lse[i] = *reinterpret_cast<const float*>(row_of(p.prefix_lse, token, head));
    suffix_lse[i] = *reinterpret_cast<const float*>(row_of(p.suffix_lse, token, head));
  }

  const bool in_place = sizeof(Source) == sizeof(Output) && p.output.data == p.prefix.data;
  const auto stays = [&](int i) { return in_place && empty(suffix_lse[i]) && !empty(prefix_lse[i]); };
  Chunk<Source> prefix[kRows], suffix[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t row = first + i * kRowsPerPass, token = row / p.heads, head = row % p.heads;
    prefix[i] = suffix[i] = {};
    if (!empty(prefix_lse[i]) && !stays(i))
      prefix[i] = load_chunk(reinterpret_cast<const Source*>(row_of(p.prefix, token, head)) + column);
    if (!empty(suffix_lse[i]))
      suffix[i] = load_chunk(reinterpret_cast<const Source*>(row_of(p.suffix, token, head)) + column);
  }

  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t row = first + i * kRowsPerPass, token = row / p.heads, head = row % p.heads;
    if (row >= rows) continue;
    const Weights w = weights_of(prefix_lse[i], suffix_lse[i]);
    float a[kChunk], b[kChunk];
    unpack_chunk(prefix[i], a);
    unpack_chunk(suffix[i], b);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) a[j] = a[j] * w.prefix + b[j] * w.suffix;
    if (!stays(i))
      store_chunk(reinterpret_cast<Output*>(row_of(p.output, token, head)) + column, pack_chunk<Output>(a));
    if (p.output_lse.data != nullptr && column == 0)
      *reinterpret_cast<float*>(row_of(p.output_lse, token, head)) = w.lse;
  }
}
