// The geometry of one sequence of a prefill call: which rows of q and k are its own, where they stand, how many keys it sees.
//
//   new    = cu_seqlens_q[b+1] - cu_seqlens_q[b]           rows = cu_seqlens_k[b+1] - cu_seqlens_k[b]
//   length = paged: lengths[b] (+ new unless it includes them);  batched: rope_rows;  ragged: rows;   kv_lengths[b] overrides it
//   start  = length - new, for paged and batched before any override;                                start_positions[b] overrides it
//   n_keys = min(rows, max(0, length - offset)),  offset = cache_offsets[b] or 0
// The including file is compiled with MLA_ROPE_KIND defined: a value of RopeKind.
#pragma once
#include "types.cuh"

enum RopeKind { kRopePaged = 0, kRopeBatched = 1, kRopeRagged = 2 };

struct SequenceArgs {
  const int* cu_seqlens_q;  // [B+1]
  const int* cu_seqlens_k;  // [B+1]
  const int* cache_offsets;  // [B] or null
  const int* lengths;  // [B], paged rope
  const int* start_positions;  // [B] or null
  const int* kv_lengths;  // [B] or null
  int lengths_include_new;  // paged rope
  int rope_rows;  // batched rope: its second extent
};

struct Sequence {
  int q_begin;  // row of q of its first query
  int new_;  // queries
  int k_begin;  // row of k and v of its first key
  int rows;  // rows of k and v, page padding included
  int n_keys;  // of these, keys that count
  int offset;  // position of its first key
  int start;  // position of its first query; may be negative
};

MLA_DEVICE Sequence sequence_of(const SequenceArgs& args, int b) {
  Sequence s;
  s.q_begin = args.cu_seqlens_q[b];
  s.new_ = args.cu_seqlens_q[b + 1] - s.q_begin;
  s.k_begin = args.cu_seqlens_k[b];
  s.rows = args.cu_seqlens_k[b + 1] - s.k_begin;
  s.offset = args.cache_offsets != nullptr ? args.cache_offsets[b] : 0;
  int length = s.rows;
  if constexpr (MLA_ROPE_KIND == kRopePaged) length = args.lengths[b] + (args.lengths_include_new ? 0 : s.new_);
  if constexpr (MLA_ROPE_KIND == kRopeBatched) length = args.rope_rows;
  const int own_length = length;
  if (args.kv_lengths != nullptr) length = args.kv_lengths[b];
  s.start = (MLA_ROPE_KIND == kRopeRagged ? length : own_length) - s.new_;
  if (args.start_positions != nullptr) s.start = args.start_positions[b];
  const int visible = length - s.offset;
  s.n_keys = visible < 0 ? 0 : visible < s.rows ? visible : s.rows;
  return s;
}
