// What every role of the fp8 prefill kernel for sm_90a shares: tile sizes, parameters, the plan of shared memory.
//
// The host defines: MLA_ROPE (e4m3 | bf16), MLA_ROPE_PRESCALED, MLA_OUTPUT (bf16 | float), MLA_NOPE_DIM, MLA_V_DIM,
// MLA_ROPE_KIND, MLA_PAGE_SIZE, MLA_ROPE_BOX, MLA_ROPE_COPY, MLA_V_ROWS, MLA_V_SCALES, MLA_LSE, MLA_SINKS, MLA_SOFTCAP,
// MLA_MASK_UNROLL and the tile: MLA_ROW_GROUPS, MLA_BLOCK_N, MLA_STAGES_K, MLA_STAGES_V, MLA_STAGES_RAW,
// MLA_CONSUMER_REGISTERS, MLA_PRODUCER_REGISTERS. "mask.cuh" is generated from the mask's program.
#pragma once
#include "sequence.cuh"
#include "paged.cuh"
#include "wgmma_e4m3_sm90.cuh"
#include "mask.cuh"
#include "prefill_items.cuh"

using Rope = MLA_ROPE;
using Output = MLA_OUTPUT;
using Element = bf16;  // of an output of 16 bits

// ---- tiles ----------------------------------------------------------------------------------------------------------

constexpr int kRopeDim = 64;
constexpr int kBlockN = MLA_BLOCK_N;  // keys of a tile
constexpr int kStagesK = MLA_STAGES_K, kStagesV = MLA_STAGES_V, kStagesRaw = MLA_STAGES_RAW;
constexpr int kConsumerThreads = 128 * kRowGroups;  // one warpgroup for each row group of an item
static_assert(MLA_NOPE_DIM == 128 && MLA_V_DIM == 128 && kBlockN == 128, "one row of swizzled shared memory each");

static_assert(kRowGroups * MLA_CONSUMER_REGISTERS + MLA_PRODUCER_REGISTERS <=
                  65536 / MLA_THREADS / 8 * 8 * (kRowGroups + 1),
              "setmaxnreg would wait for ever");

// Keys lie in shared memory in another order: in each block of 64 rows, row 32 c + m holds key 2 m + c. A thread's
// accumulators of S are then the very keys that its A fragments of P want (4 t to 4 t + 3 of each 16), and nothing has
// to be exchanged. TMA does it: two boxes a block, every second row each.
constexpr int kKeyBlock = 64;
MLA_DEVICE constexpr int row_of_key(int key) {
  return key / kKeyBlock * kKeyBlock + key % 2 * 32 + key % kKeyBlock / 2;
}
// Accumulator i of a thread (4 j + 2 r + e: group j of 8 columns, row r, column 2 t + e) is of this key, plus 4 t.
MLA_DEVICE constexpr int key_of(int i) { return i / 32 * 64 + i / 4 % 4 * 16 + i % 2 * 2 + i / 16 % 2; }

// Rope rows come in TMA boxes over kRopeBox keys (0: never), or are copied row by row where pages or a chunk's start do
// not allow it.
constexpr int kRopeBox = MLA_ROPE_BOX;
constexpr bool kRopeCopy = MLA_ROPE_COPY;
constexpr int kBox = kRopeBox > 0 ? kRopeBox : kKeyBlock;
static_assert(kRopeBox % 16 == 0 && (kRopeBox == 0 || kKeyBlock % kRopeBox == 0), "half a box fills whole atoms");
static_assert(kRopeBox > 0 || kRopeCopy, "rope has to come from somewhere");

// ---- scales ---------------------------------------------------------------------------------------------------------

//   s[i,j] = softmax_scale * row[i] * (nope[j] * q_nope . k + rope[j] * q_rope . k_rope)
//   fp8 rope              row = q_scale   nope = k_scales            rope = the rope's own
//   bf16, prescaled       row = q_scale   nope = k_scales            rope = k_scales
//   bf16, not prescaled   row = 1         nope = q_scale * k_scales  rope = 1
// Where nope[j] and rope[j] are one number in a whole tile, that number belongs to the exponent's factor and costs
// nothing: decided by the scales of the tile's own keys.
constexpr bool kRopeFp8 = is_same<Rope, e4m3>;
constexpr bool kRopePlain = !kRopeFp8 && !MLA_ROPE_PRESCALED;
constexpr bool kTwoScales = kRopeFp8 || kRopePlain;  // nope and rope may differ
enum ValueScale { kValuesPlain = 0, kValuesByHead = 1, kValuesByKey = 2 };  // none; one a head or in all; one a key
constexpr bool kValueScales = MLA_V_SCALES == kValuesByKey;

// What comes with a K tile: the producer's tag and the factors, of a key warp or, where it knows them, of the producer.
// There are twice as many as K stages, so that one stays until its tile's V has been consumed.
struct alignas(16) TileHead {
  uint32_t tag;
  float factor;  // of all scores of the tile; 0: each key has its own
  float v_factor;  // of the tile's P V, where each key's V has a scale
};
enum ScaleArray { kScaleNope, kScaleAll, kScaleValue, kScaleArrays = kScaleValue + kValueScales };

// A row's sum of P comes from the tensor cores, as a 129th column of ones of V: the denominator of the rounded P. Where
// the LSE is asked for, that rounding would show in it, and sums are those of fp32.
constexpr bool kSumByProduct = !MLA_LSE;

// P is 2^(x - reference) up to 2^kHeadroom after the reference has moved, and may grow to 2^8: e4m3 reaches from 2^-9
// to kLargest.
constexpr float kHeadroom = 3.0f, kLargest = 448.0f;

// ---- parameters -----------------------------------------------------------------------------------------------------

struct PrefillParams {
  TensorMap q, q_rope, k, v, rope;
  SequenceArgs sequences;
  PageTable page_table;
  PagedRows rope_rows;  // [pages or sequences or 1, rows, dr]
  PagedRows rope_scales;  // the same rows, at the scale of the last 64 columns
  const uint8_t* values;  // V^T [heads, columns, rows]
  int64_t values_stride_h, values_stride_d;
  MaskArgs mask;
  const float* q_scale;
  const float* k_scales;
  const float* v_scale;  // null: 1
  int64_t q_scale_stride, k_scales_stride;
  int64_t v_scale_stride;  // of a key with kValueScales, else of a head
  void* output;
  float* lse;
  const float* sinks;
  const ScheduleEntry* table;  // null: every block makes its own
  int* counters;  // [2] zero before and after the launch: items claimed, thread blocks ended
  int* arrivals;  // [slots] zero before and after the launch: parts of a block that have a result
  float4* slots;
  int64_t output_stride_t, output_stride_h;
  int64_t lse_stride_t, lse_stride_h;
  float logit_scale;  // softmax_scale * log2(e)
  float softcap_scale;  // 2 / softcap
  float softcap_logit;  // softcap * log2(e)
  int rows, rows_q;  // of k and v, and of q
  int batch;
  int heads;
  int processors;  // of the device
};

// ---- work of the helper warps ---------------------------------------------------------------------------------------

// Of the producer's warpgroup, beside the producer: key warps, which load roped keys and bring scales and what TMA
// cannot, each for every kKeyWarps-th K tile; and warps that transpose V.
constexpr bool kTransposeV = MLA_V_ROWS;
constexpr int kTransposers = kTransposeV ? 2 : 0, kKeyWarps = 3 - kTransposers;
static_assert(kStagesK >= kKeyWarps, "the end is told to every one of them");

// TMA reads from multiples of 16 bytes; the keys of V^T of a sequence may begin elsewhere.
MLA_DEVICE bool values_by_copy(int k_row) { return !kTransposeV && k_row % 16 != 0; }

enum KeySource : uint16_t { kRopeByTma = 0, kRopeByCopy = 1, kNoMoreKeys = 2 };
enum WantedScales : uint16_t {
  kOfEachKey = 0,
  kOfEachOrAll = 1,  // every row group sees all keys or none: where they have one scale, nobody asks for a key's own
  kOfNone = 2,  // the same, and that one is known
  kOfEachByTma = 3  // they are known to differ, and the producer brings them
};
struct alignas(16) KeyJob {
  int sequence, head;
  int token;  // position of the first key
  int k_row;  // row of k and v of the first key
  int keys;  // from there to the sequence's end
  uint16_t source;
  uint16_t scales;  // WantedScales
};

// The scale that all keys of a tile share; 0: they differ. The producer keeps what key warps find: heads and blocks of
// rows come back to the same tiles. An entry is of the last tile of those whose numbers are kKnownTiles apart.
struct alignas(8) KnownTile {
  int k_row;  // of the tile's first key; negative: of none
  float factor;
};
constexpr int kKnownTiles = 256;
constexpr bool kRemembers = !kRopePlain && !kValueScales;
constexpr bool kOneArray = kRemembers && !kTwoScales;  // scores are multiplied by k_scales and nothing else

// ---- shared memory --------------------------------------------------------------------------------------------------

constexpr int kRowBytes = 128;  // of q, k and v: 128 elements
constexpr int kRopeRowBytes = kRopeDim * int(sizeof(Rope));
constexpr int kQNopeBytes = kRowsPerGroup * kRowBytes, kQBytes = kQNopeBytes + kRowsPerGroup * kRopeRowBytes;
constexpr int kKNopeBytes = kBlockN * kRowBytes, kKBytes = kKNopeBytes + kBlockN * kRopeRowBytes;
constexpr int kVTileBytes = MLA_V_DIM * kBlockN;
constexpr int kOnesBytes = kSumByProduct ? 8 * kBlockN : 0;  // a row of ones and seven of zeros behind V's
constexpr int kVBytes = kVTileBytes + kOnesBytes;

constexpr int kOffsetK = 0;
constexpr int kOffsetV = kOffsetK + kStagesK * kKBytes;
constexpr int kOffsetRaw = kOffsetV + kStagesV * kVBytes;
constexpr int kOffsetQ = kOffsetRaw + kStagesRaw * kVTileBytes;
constexpr int kOffsetScales = kOffsetQ + kRowGroups * kQBytes;
constexpr int kOffsetFactors = kOffsetScales + kStagesK * kScaleArrays * kBlockN * 4;
constexpr int kOffsetHeads = kOffsetFactors + kRowGroups * kRowsPerGroup * 4;
constexpr int kHeads = 2 * kStagesK;
constexpr int kOffsetItems = kOffsetHeads + kHeads * int(sizeof(TileHead));  // two buffers and the producer's draft
constexpr int kOffsetTable = kOffsetItems + 3 * kRowGroups * int(sizeof(Item));
constexpr int kOffsetJobs = kOffsetTable + kTableBytes;
constexpr int kOffsetKnown = kOffsetJobs + kStagesK * int(sizeof(KeyJob));
constexpr int kOffsetBarriers = kOffsetKnown + kKnownTiles * int(sizeof(KnownTile));
constexpr int kBarriers = 2 * kRowGroups + 3 * kStagesK + 3 * kStagesV + 2 * kStagesRaw;
constexpr int kOffsetEnd = kOffsetBarriers + 8 * kBarriers;  // a word: no more V tiles
constexpr int kAlignment = 1024;  // of swizzle atoms
static_assert(MLA_SHARED_BYTES == kAlignment + kOffsetEnd + 8, "the host counts other bytes");

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
  MLA_DEVICE uint32_t v(int stage) const { return base + kOffsetV + stage * kVBytes; }
  MLA_DEVICE uint8_t* v_bytes(int stage) const { return bytes + kOffsetV + stage * kVBytes; }
  MLA_DEVICE uint32_t raw(int stage) const { return base + kOffsetRaw + stage * kVTileBytes; }
  // [kBlockN] floats
  MLA_DEVICE uint32_t scales(int stage, ScaleArray array) const {
    return base + kOffsetScales + (stage * kScaleArrays + array) * kBlockN * 4;
  }
  // [kRowsPerGroup], q_scale of the rows of a row group
  MLA_DEVICE float* row_scales(int group) const {
    return reinterpret_cast<float*>(bytes + kOffsetFactors) + group * kRowsPerGroup;
  }
  // `count`: of K tiles before this one
  MLA_DEVICE TileHead* head(uint32_t count) const {
    return reinterpret_cast<TileHead*>(bytes + kOffsetHeads) + count % kHeads;
  }
  MLA_DEVICE uint32_t head_address(uint32_t count) const {
    return base + kOffsetHeads + count % kHeads * uint32_t(sizeof(TileHead));
  }
  MLA_DEVICE Item* item(int group, int buffer) const {
    return reinterpret_cast<Item*>(bytes + kOffsetItems) + buffer * kRowGroups + group;
  }
  MLA_DEVICE Item* draft() const { return item(0, 2); }  // [kRowGroups]
  MLA_DEVICE ScheduleEntry* table() const { return reinterpret_cast<ScheduleEntry*>(bytes + kOffsetTable); }
  MLA_DEVICE KnownTile* known(int k_row) const {
    return reinterpret_cast<KnownTile*>(bytes + kOffsetKnown) + uint32_t(k_row) / kBlockN % kKnownTiles;
  }
  MLA_DEVICE KeyJob* job(int stage) const { return reinterpret_cast<KeyJob*>(bytes + kOffsetJobs) + stage; }
  MLA_DEVICE volatile int* no_more_v() const { return reinterpret_cast<volatile int*>(bytes + kOffsetEnd); }
  // mbarriers, with who arrives and who waits
  // producer and TMA -> the consumer of the row group
  MLA_DEVICE uint32_t q_full(int group) const { return barrier(group); }
  // that consumer's warps -> producer
  MLA_DEVICE uint32_t q_empty(int group) const { return barrier(kRowGroups + group); }
  // producer, TMA and a key warp -> consumers
  MLA_DEVICE uint32_t k_full(int stage) const { return barrier(2 * kRowGroups + stage); }
  // consumers' warps -> producer
  MLA_DEVICE uint32_t k_empty(int stage) const { return barrier(2 * kRowGroups + kStagesK + stage); }
  // producer -> key warp
  MLA_DEVICE uint32_t job_full(int stage) const { return barrier(2 * kRowGroups + 2 * kStagesK + stage); }
  // producer and TMA, a key warp, or the transposing warps -> consumers
  MLA_DEVICE uint32_t v_full(int stage) const { return barrier(2 * kRowGroups + 3 * kStagesK + stage); }
  // consumers' warps -> producer or transposing warps
  MLA_DEVICE uint32_t v_empty(int stage) const { return barrier(2 * kRowGroups + 3 * kStagesK + kStagesV + stage); }
  // producer, each time that a stage has become free -> the key warp that copies into it
  MLA_DEVICE uint32_t v_free(int stage) const { return barrier(2 * kRowGroups + 3 * kStagesK + 2 * kStagesV + stage); }
  // producer and TMA -> transposing warps
  MLA_DEVICE uint32_t raw_full(int stage) const {
    return barrier(2 * kRowGroups + 3 * kStagesK + 3 * kStagesV + stage);
  }
  // transposing warps -> producer
  MLA_DEVICE uint32_t raw_empty(int stage) const {
    return barrier(2 * kRowGroups + 3 * kStagesK + 3 * kStagesV + kStagesRaw + stage);
  }

 private:
  MLA_DEVICE uint32_t barrier(int index) const { return base + kOffsetBarriers + 8 * index; }
};

// Named barriers; 0 is __syncthreads.
constexpr int kBarrierWarpgroup = 1;  // + i: the threads of consumer i
