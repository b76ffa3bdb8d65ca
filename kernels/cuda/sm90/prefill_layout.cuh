// What every role of the sm_90a prefill kernel shares: tile sizes, parameters, work items, the plan of shared memory.
//
// The host defines: MLA_ELEMENT (bf16 | fp16), MLA_OUTPUT (the same or float), MLA_NOPE_DIM, MLA_V_DIM, MLA_ROPE_KIND,
// MLA_PAGE_SIZE, MLA_ROPE_BOX, MLA_ROPE_GATHER, MLA_LSE, MLA_SINKS, MLA_SOFTCAP, MLA_SCALE_SCORES, MLA_MASK_UNROLL and
// the tile: MLA_ROW_GROUPS, MLA_BLOCK_N, MLA_STAGES_K, MLA_STAGES_V, MLA_CONSUMER_REGISTERS, MLA_PRODUCER_REGISTERS.
// "mask.cuh" is generated from the mask's program.
#pragma once
#include "sequence.cuh"
#include "paged.cuh"
#include "wgmma_sm90.cuh"
#include "mask.cuh"
#include "prefill_items.cuh"

using Element = MLA_ELEMENT;
using Output = MLA_OUTPUT;

// ---- tiles ----------------------------------------------------------------------------------------------------------

constexpr int kRopeDim = 64;
constexpr int kBlockN = MLA_BLOCK_N;  // keys of a tile
constexpr int kStagesK = MLA_STAGES_K, kStagesV = MLA_STAGES_V;
constexpr int kConsumerThreads = 128 * kRowGroups;  // one warpgroup for each row group of an item

static_assert(kRowGroups * MLA_CONSUMER_REGISTERS + MLA_PRODUCER_REGISTERS <=
                  65536 / MLA_THREADS / 8 * 8 * (kRowGroups + 1),
              "setmaxnreg would wait for ever");

// Rope rows come in TMA boxes of kRopeBox rows (0: never), or are gathered row by row where pages or a chunk's start do
// not allow it.
constexpr int kRopeBox = MLA_ROPE_BOX;
constexpr bool kRopeGather = MLA_ROPE_GATHER;
static_assert(kRopeBox % 8 == 0 && (kRopeBox == 0 || kBlockN % kRopeBox == 0), "boxes fill whole swizzle atoms");
static_assert(kRopeBox > 0 || kRopeGather, "rope has to come from somewhere");

// Scores become base-2 logits before the maxima where a plain factor in the exponent would not do.
constexpr bool kScaleScores = MLA_SCALE_SCORES;
static_assert(!(MLA_SOFTCAP || MLA_MASK_BIASES) || MLA_SCALE_SCORES, "softcap and bias act on scaled scores");
constexpr bool kWholeTiles = MLA_MASK_BIASES == 0;  // with a bias every tile is looked at key by key
constexpr bool kWithoutMaxima = MLA_V_DIM <= 128;  // more columns of O leave no registers to begin again with

// ---- parameters -----------------------------------------------------------------------------------------------------

struct PrefillParams {
  TensorMap q, k, v, rope;
  SequenceArgs sequences;
  PageTable page_table;
  PagedRows rope_rows;
  MaskArgs mask;
  void* output;
  float* lse;
  const float* sinks;
  const ScheduleEntry* table;  // null: every block makes its own
  int* counters;  // [2] zero before and after the launch: items claimed, thread blocks ended
  int* arrivals;  // [slots] the same, at the first slot of a block of rows: its parts that have arrived
  float4* slots;  // results of parts
  int64_t output_stride_t, output_stride_h;
  int64_t lse_stride_t, lse_stride_h;
  float logit_scale;  // softmax_scale * log2(e)
  float softcap_scale;  // 2 * logit_scale / softcap
  float softcap_logit;  // softcap * log2(e)
  int batch;
  int heads;
  int processors;  // of the device
  int rows_q, rows_k;  // of q; of k and v
};

// ---- rope jobs -------------------------------------------------------------------------------------------------------

// How the rope rows of a K tile come. The tiles go round the rope warps, each of which has a mailbox: it is free again
// when its tile has been consumed, and that is before the producer comes round.
constexpr int kRopeWarps = 3;
static_assert(kStagesK <= kRopeWarps, "a mailbox is read before it is written again");
enum RopeSource : int { kRopeByTma = 0, kRopeByCopy = 1, kRopeNoMore = 2 };
struct alignas(16) RopeJob {
  int sequence;
  int token;  // position of the first row
  int keys;  // from there to the sequence's end
  int source;
};

// What lies beside a K stage: its tag, and where the tile's V comes from while it is still to be loaded.
struct alignas(16) StageTag {
  uint32_t word;
  int head;
  int v_row;  // negative: nothing to load
};

// ---- shared memory --------------------------------------------------------------------------------------------------

constexpr int kSwizzleBytes = 128;  // one row of a sub-tile: 64 elements
constexpr int kQkBlocks = (MLA_NOPE_DIM + kRopeDim) / 64;  // 64-column sub-tiles of q and k; the last one is rope
constexpr int kVBlocks = MLA_V_DIM / 64;
constexpr int kQBlockBytes = kRowsPerGroup * kSwizzleBytes;
constexpr int kKeyBlockBytes = kBlockN * kSwizzleBytes;
constexpr int kQBytes = kQkBlocks * kQBlockBytes;  // of one row group
constexpr int kKBytes = kQkBlocks * kKeyBlockBytes;
constexpr int kVBytes = kVBlocks * kKeyBlockBytes;
constexpr int kRopeBytes = kKeyBlockBytes;

// With one stage of V there is a second one where the last row group has no rows in any item: in the place of its Q.
constexpr bool kSpareV = kStagesV == 1;
constexpr int kOffsetK = 0;
constexpr int kOffsetV = kOffsetK + kStagesK * kKBytes;
constexpr int kOffsetQ = kOffsetV + kStagesV * kVBytes;
constexpr int kMostStagesV = 2;
static_assert(kStagesV <= kMostStagesV, "a bit of the tag");
constexpr int kVStride = kSpareV ? kOffsetQ + (kRowGroups - 1) * kQBytes - kOffsetV : kVBytes;
constexpr int kSpareBytes = kSpareV && kVBytes > kQBytes ? kVBytes - kQBytes : 0;
constexpr int kOffsetItems = kOffsetQ + kRowGroups * kQBytes + kSpareBytes;  // two buffers and the producer's draft
constexpr int kOffsetTable = kOffsetItems + 3 * kRowGroups * int(sizeof(Item));
constexpr int kOffsetJobs = kOffsetTable + kTableBytes;
constexpr int kOffsetTags = kOffsetJobs + kRopeWarps * int(sizeof(RopeJob));
constexpr int kOffsetBarriers = kOffsetTags + kStagesK * int(sizeof(StageTag));
constexpr int kBarriers = 2 * kRowGroups + 2 * kStagesK + 2 * kMostStagesV + kRopeWarps;
constexpr int kAlignment = 1024;  // of swizzle atoms
static_assert(MLA_SHARED_BYTES == kAlignment + kOffsetBarriers + 8 * kBarriers, "the host counts other bytes");

// Addresses of the plan above.
struct Shared {
  uint32_t base;
  uint8_t* bytes;

  MLA_DEVICE explicit Shared(uint8_t* dynamic) {
    const uint32_t at = cvta_shared(dynamic);
    base = (at + kAlignment - 1) & ~uint32_t(kAlignment - 1);
    bytes = dynamic + (base - at);
  }
  MLA_DEVICE uint32_t q(int group) const { return base + kOffsetQ + group * kQBytes; }
  MLA_DEVICE uint32_t k(int stage) const { return base + kOffsetK + stage * kKBytes; }
  MLA_DEVICE uint32_t v(int stage) const { return base + kOffsetV + stage * kVStride; }
  MLA_DEVICE uint8_t* v_bytes(int stage) const { return bytes + kOffsetV + stage * kVStride; }
  MLA_DEVICE Item* item(int group, int buffer) const {
    return reinterpret_cast<Item*>(bytes + kOffsetItems) + buffer * kRowGroups + group;
  }
  MLA_DEVICE Item* draft() const { return item(0, 2); }  // [kRowGroups]
  MLA_DEVICE ScheduleEntry* table() const { return reinterpret_cast<ScheduleEntry*>(bytes + kOffsetTable); }
  MLA_DEVICE RopeJob* job(int warp) const { return reinterpret_cast<RopeJob*>(bytes + kOffsetJobs) + warp; }
  MLA_DEVICE StageTag* tag(int stage) const { return reinterpret_cast<StageTag*>(bytes + kOffsetTags) + stage; }
  // mbarriers, with who arrives and who waits
  // producer and TMA -> the consumer of the row group
  MLA_DEVICE uint32_t q_full(int group) const { return barrier(group); }
  // that consumer's warps -> producer
  MLA_DEVICE uint32_t q_empty(int group) const { return barrier(kRowGroups + group); }
  // producer, TMA and, where rope rows may be gathered, a rope warp -> consumers
  MLA_DEVICE uint32_t k_full(int stage) const { return barrier(2 * kRowGroups + stage); }
  // consumers' warps -> producer
  MLA_DEVICE uint32_t k_empty(int stage) const { return barrier(2 * kRowGroups + kStagesK + stage); }
  // producer and TMA -> consumers
  MLA_DEVICE uint32_t v_full(int stage) const { return barrier(2 * kRowGroups + 2 * kStagesK + stage); }
  // consumers' warps -> producer
  MLA_DEVICE uint32_t v_empty(int stage) const { return barrier(2 * kRowGroups + 2 * kStagesK + kMostStagesV + stage); }
  // producer -> rope warp
  MLA_DEVICE uint32_t job_full(int warp) const {
    return barrier(2 * kRowGroups + 2 * kStagesK + 2 * kMostStagesV + warp);
  }

 private:
  MLA_DEVICE uint32_t barrier(int index) const { return base + kOffsetBarriers + 8 * index; }
};

// Named barriers; 0 is __syncthreads.
constexpr int kBarrierWarpgroup = 1;  // + i: the threads of consumer i
