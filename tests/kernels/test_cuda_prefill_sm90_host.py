"""The Hopper prefill's order of work, tile classes and masks, run on the host: no GPU, every index."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from mla import mask_code
from mla.backends.cuda import prefill_sm90
from mla.masks import (
    CausalMask,
    ChunkedCausalMask,
    Mask,
    MaterializedMask,
    NullMask,
    SlidingWindowCausalMask,
)
from mla.problem import Problem
from tests.support import cuda_host, mask_host

pytestmark = pytest.mark.skipif(mask_host.compiler() is None, reason="needs a host C++ compiler")

WHOLE = prefill_sm90.Variant(chunked=False, positive_scale=True)
CAUSAL = Problem("prefill", "bf16", "bf16", page_size=64, rope="ragged", mask=CausalMask().program)

SCHEDULE_HARNESS = """
static SequenceArgs sequences(const int* q, const int* k) {
  SequenceArgs args{};
  args.cu_seqlens_q = q;
  args.cu_seqlens_k = k;
  return args;
}
// Writes (sequence, head, block, part, slot, key count, parts) of each row group of each item, block -1 where there is
// none.
static void decode(const ScheduleEntry* table, int count, int heads, int items, int* out) {
  const Grouping grouping = grouping_of(table[count]);
  for (int item = 0; item < items; item++) {
    const ScheduleEntry& entry = table[find_entry(table, count, item)];
    const int blocks = row_blocks(entry.new_), tiles = ceil_div(blocks, grouping.size);
    const Share share = share_of(entry, item - entry.first_item);
    const TilePosition at = tile_position(share.item, tiles, entry.n_keys, heads);
    for (int group = threadIdx.x; group < kRowGroups; group += 32) {
      const int block = block_of(group, at.tile, tiles, blocks, grouping);
      int* to = out + 7 * (item * kRowGroups + group);
      to[0] = entry.sequence, to[1] = at.head, to[2] = block < blocks ? block : -1, to[3] = share.part;
      to[4] = slot_of(entry, share, group), to[5] = entry.n_keys, to[6] = share.parts;
    }
  }
}
extern "C" int split(int new_, int n_keys, int heads, int processors, int* whole) {
  const Split split = split_of(new_, n_keys, heads, processors);
  *whole = split.whole;
  return split.parts;
}
extern "C" int order(const int* q, const int* k, int batch, int heads, int grid, int processors, int* arrivals,
                     int* grouping, int* out) {
  std::vector<ScheduleEntry> table(batch <= kTableSequences ? kTableSequences + 1 : batch + 1);
  const int count = int(table.size()) - 1;
  if (batch <= kTableSequences) {
    host_run(32, [&] { build_table(sequences(q, k), batch, heads, grid, table.data(), processors); });
  } else {
    const ScheduleParams params{sequences(q, k), table.data(), batch, heads, grid, processors, arrivals};
    host_run(MLA_THREADS, [&] { mla_prefill_schedule(params); });
  }
  const ScheduleEntry& total = table[count];
  grouping[0] = grouping_of(total).size, grouping[1] = grouping_of(total).spread;
  if (out != nullptr) host_run(32, [&] { decode(table.data(), count, heads, total.first_item, out); });
  return total.first_item;
}
"""


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("schedule")
    return cuda_host.build(prefill_sm90.schedule_spec(CAUSAL), SCHEDULE_HARNESS, folder, threads=256)


def order_of(
    schedule: ctypes.CDLL, new: list[int], keys: list[int], heads: int, grid: int, processors: int = 0
) -> tuple[tuple[int, int], list[list[tuple[int, ...]]]]:
    """Return (blocks an item, spread) and of each row group of each item
    (sequence, head, block, part, slot, key count, parts)."""
    offsets = [torch.tensor([3, *x], dtype=torch.int32).cumsum(0).int() for x in (new, keys)]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in offsets]
    grouping = (ctypes.c_int * 2)()
    slots = prefill_sm90.workspace_of(CAUSAL, T=sum(new), L=sum(keys), B=len(new), H=heads).slots
    arrivals = torch.full((slots + 1,), -9, dtype=torch.int32)
    sizes = (len(new), heads, grid, processors, ctypes.c_void_p(arrivals.data_ptr()), grouping)
    count = schedule.order(*pointers, *sizes, None)
    out = torch.full((count, 3, 7), -7, dtype=torch.int32)
    assert schedule.order(*pointers, *sizes, ctypes.c_void_p(out.data_ptr())) == count
    used = {slot for item in out.tolist() for *_, slot, _, parts in item if parts > 1}
    assert used == set(range(len(used))) and len(used) <= slots, "slots are dense and fit the workspace"
    if len(new) > 32:
        assert arrivals[: len(used)].eq(0).all() and arrivals[len(used) :].eq(-9).all(), "zeroed as far as used"
    return (grouping[0], grouping[1]), [[tuple(group) for group in item] for item in out.tolist()]


@pytest.mark.parametrize(
    ("batch", "longest"),
    [(1, 9000), (1, 1), (2, 3000), (7, 2000), (31, 900), (32, 600), (33, 600), (70, 400), (300, 200)],
)
def test_every_block_of_rows_is_worked_on_once(schedule: ctypes.CDLL, batch: int, longest: int, seed: int) -> None:
    chosen = random.Random(seed)
    heads, grid = chosen.choice([1, 3, 5]), chosen.choice([1, 5, 132])
    new = [chosen.choice([0, 1, chosen.randint(0, longest)]) for _ in range(batch)]
    keys = [chosen.randint(0, 4 * longest) for _ in range(batch)]
    processors = chosen.choice([0, grid])
    grouping, items = order_of(schedule, new, keys, heads, grid, processors)
    done = Counter((b, h, block, part) for item in items for b, h, block, part, *_ in item if block >= 0)
    parts_of = {(b, h, block): parts for item in items for b, h, block, *_, parts in item if block >= 0}
    assert set(parts_of) == {
        (b, h, block) for b, n in enumerate(new) for h in range(heads) for block in range(-(-n // 64))
    }
    assert set(done) == {(*where, part) for where, parts in parts_of.items() for part in range(parts)}
    assert not done or set(done.values()) == {1}
    for b, n in enumerate(new):
        whole, parts = split_of(schedule, n, keys[b], heads, processors)
        own = [item[0][6] for item in items if item[0][0] == b]
        assert own == [1] * whole + [parts] * (len(own) - whole) or (parts == 1 and set(own) <= {1})
    for item in items:
        assert len({group[:2] for group in item if group[2] >= 0}) == 1, "an item is of one head of one sequence"
    in_parts = any(item[0][6] > 1 for item in items)
    counts = [item[0][5] for item in items]
    slack = 1.0 if batch <= 32 else 9 / 8  # buckets are eight to an octave
    assert all(later <= slack * max(earlier, 1) for earlier, later in itertools.pairwise(counts))
    assert in_parts or grouping[1] == (len(items) <= grid), "spread exactly where each thread block has one item"
    assert not in_parts or grouping == (3, 0)


def test_a_lone_short_sequence_fills_the_chip_with_balanced_items(schedule: ctypes.CDLL) -> None:
    grouping, items = order_of(schedule, [1024], [1024], 16, 132)
    assert grouping == (2, 1)
    assert len(items) == 128
    sums = {sum(block + 1 for _, _, block, *_ in item if block >= 0) for item in items}
    assert sums == {17}, "a long one with a short one"


def test_head_groups_fit_l2(schedule: ctypes.CDLL) -> None:
    _, items = order_of(schedule, [640], [16384], 8, 4)  # two heads of 16,384 keys are 16 MiB
    heads = [item[0][1] for item in items]
    per_group = len(items) // 4
    assert [sorted(set(heads[i : i + per_group])) for i in range(0, len(heads), per_group)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def split_of(schedule: ctypes.CDLL, new: int, keys: int, heads: int, processors: int) -> tuple[int, int]:
    """Return how many items of a sequence have all of its keys, and the parts of the others' keys."""
    whole = ctypes.c_int()
    parts = schedule.split(new, keys, heads, processors, ctypes.byref(whole))
    return whole.value, parts


def cost(items: int, keys: int, whole: int, parts: int) -> int:
    """Model of a sequence alone on 132 multiprocessors: waves of items, each as long as its keys and a constant."""
    return -(-whole // 132) * keys + -(-(items - whole) * parts // 132) * (keys // parts + 512 * (parts > 1))


@pytest.mark.parametrize(
    ("new", "keys", "heads", "expected"),
    [
        (64, 131072, 16, (0, 8)),  # 16 items alone: eight parts fill 128 multiprocessors
        (1, 131072, 1, (0, 64)),  # no part of fewer than 2,048 keys
        (2048, 16384, 16, (132, 3)),  # 1.33 waves: the third wave is as long as a third
        (2048, 16384, 128, (1320, 3)),  # 10.67 waves become 10 and two of a third
        (8192, 92025, 16, (660, 14)),  # 5.21 waves become 5 and three of a 14th
        (8192, 8192, 128, (5504, 1)),  # 41.7 waves: not worth it
        (1024, 1024, 16, (96, 1)),
        (64, 4095, 16, (16, 1)),
        (64, 4096, 16, (0, 2)),
        (0, 131072, 16, (0, 1)),
        (64, 0, 16, (16, 1)),
    ],
)
def test_keys_of_the_last_wave_are_split_where_it_leaves_processors_idle(
    schedule: ctypes.CDLL, new: int, keys: int, heads: int, expected: tuple[int, int]
) -> None:
    whole, parts = split_of(schedule, new, keys, heads, 132)
    items = -(-new // 192) * heads
    assert (whole, parts) == expected
    if parts > 1:
        assert cost(items, keys, whole, parts) <= 0.98 * cost(items, keys, items, 1)
        assert keys // parts >= 2048
    assert split_of(schedule, new, keys, heads, 0) == (items, 1)


MASK_HARNESS = """
static void fill(Item& item, const int* values) {
  item = Item{};
  item.rows = values[0], item.q_position = values[1], item.head = values[2], item.sequence = values[3];
  item.start = values[4], item.k_position = values[5], item.n_keys = values[6];
  item.parts = values[7], item.part = values[8];
}
// Tiles of the part from the last to the first; returns how many.
extern "C" int walk(const MaskArgs* mask, const int* values, int* tiles) {
  PrefillParams p{};
  p.mask = *mask;
  Item items[kRowGroups];
  for (int group = 0; group < kRowGroups; group++) {
    fill(items[group], values);
    if (group > 0) items[group].rows = 0;
  }
  int count = 0;
  host_run(32, [&] {
    TileWalk walk = walk_of(items[0]);
    for (int i = 0;; i++) {
      const uint32_t word = next_tile(p, items, walk);
      if (threadIdx.x == 0) word == kEndOfAll ? count = i : tiles[i] = tile_in(word);
      if (word == kEndOfAll) break;
    }
  });
  return count;
}
extern "C" unsigned classes(const MaskArgs* mask, const int* values, int tile) {
  PrefillParams p{};
  p.mask = *mask;
  Item items[kRowGroups];
  for (int group = 0; group < kRowGroups; group++) {
    fill(items[group], values);
    items[group].q_position += group * kRowsPerGroup;
    const int left = values[0] - group * kRowsPerGroup;
    items[group].rows = left < 0 ? 0 : left < kRowsPerGroup ? left : kRowsPerGroup;
  }
  return class_tile(p, items, tile);
}
// Scores of one warpgroup: `scores` [64, kBlockN] in, what the maxima see out.
extern "C" void scores(const MaskArgs* mask, const int* values, int tile, const float* factors, float* scores) {
  PrefillParams p{};
  p.mask = *mask;
  p.logit_scale = factors[0], p.softcap_scale = factors[1], p.softcap_logit = factors[2];
  Item item;
  fill(item, values);
  for (unsigned thread = 0; thread < 128; thread++) {
    threadIdx.x = thread;
    const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    float s[kBlockN / 2];
    for (int i = 0; i < kBlockN / 2; i++) s[i] = scores[(row + (i & 2) * 4) * kBlockN + column + i / 4 * 8 + (i & 1)];
    if (kScaleScores) scale_scores<kBlockN>(s, p, item, row, tile * kBlockN + column);
    mask_scores<kBlockN>(s, p, item, row, tile * kBlockN + column);
    for (int i = 0; i < kBlockN / 2; i++) scores[(row + (i & 2) * 4) * kBlockN + column + i / 4 * 8 + (i & 1)] = s[i];
  }
}
"""


def bias(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 3, 200, 420, generator=torch.Generator().manual_seed(5)).to(dtype)


MASKS: dict[str, Mask] = {
    "none": NullMask(),
    "causal": CausalMask(),
    "window": SlidingWindowCausalMask(70),
    "chunks": ChunkedCausalMask(100),
    "function": Mask.from_function(lambda b, h, q, k: (k <= q) & ((q - k < 64) | (k < 4 + h))),
    "bias": MaterializedMask(bias(torch.float32)),
    "causal_bias": CausalMask() & MaterializedMask(bias(torch.bfloat16)),
}


@pytest.mark.parametrize("softcap", [0.0, 9.0])
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_classes_agree_with_the_mask_of_torch(name: str, softcap: float, tmp_path: Path, seed: int) -> None:
    mask, chosen = MASKS[name], random.Random(seed)
    features = frozenset(["bias"] * bool(mask.biases) + ["softcap"] * bool(softcap))
    problem = Problem("prefill", "bf16", "bf16", rope="ragged", mask=mask.program, features=features)
    library = cuda_host.build(prefill_sm90.prefill_spec(problem, WHOLE), MASK_HARNESS, tmp_path)
    args, groups = mask_code.c_args(mask, torch.device("cpu")), prefill_sm90.tile_of(problem).row_groups
    scale = 0.3
    base_2 = 1 / torch.tensor(2.0).log().item()
    logit_scale = scale * base_2
    factors = (ctypes.c_float * 3)(logit_scale, 2 * logit_scale / softcap if softcap else 0.0, softcap * base_2)
    for _ in range(12):
        start, offset, rows = chosen.randint(-40, 300), chosen.choice([0, 64, 100]), chosen.randint(1, 64 * groups)
        first_row, sequence, head = 64 * chosen.randint(0, 2), chosen.randint(0, 1), chosen.randint(0, 2)
        n_keys = chosen.randint(1, 400)
        tile = chosen.randint(0, (n_keys - 1) // 128)
        values = (ctypes.c_int * 9)(rows, start + first_row, head, sequence, start, offset, n_keys, 1, 0)
        positions = torch.arange(64 * groups) + start + first_row
        keys = torch.arange(128) + 128 * tile
        visible = mask.visible(sequence, head, positions[:, None], keys[None] + offset) & (keys < n_keys)
        for b in mask.biases:
            row, column = (positions - start)[:, None].expand(-1, 128), (keys + offset)[None].expand(64 * groups, -1)
            inside = (row >= 0) & (row < b.shape[2]) & (column < b.shape[3])
            visible = visible & inside

        word = library.classes(ctypes.byref(args), values, tile) & 0xFFFFFFFF
        assert word & 0x3FFFF == tile
        for group in range(groups):
            seen = visible[64 * group : min(64 * group + 64, rows)]
            kind = word >> (20 + 4 * group) & 15
            if kind == 0:
                assert not seen.any(), "hidden"
            elif kind == 2:
                assert seen.all(), "visible"
            elif kind == 3:
                assert not seen[:, 64:].any(), "first half"
            else:
                assert kind == 1

        given = torch.randn(64, 128)
        got = given.clone()
        library.scores(ctypes.byref(args), values, tile, factors, ctypes.c_void_p(got.data_ptr()))
        if softcap or mask.biases:
            expected = given * scale
            expected = softcap * torch.tanh(expected / softcap) if softcap else expected
            for b in mask.biases:
                row = (positions[:64] - start)[:, None].expand(-1, 128)
                column = (keys + offset)[None].expand(64, -1)
                inside = (row >= 0) & (row < b.shape[2]) & (column < b.shape[3])
                of_head = b[sequence, head if b.shape[1] > 1 else 0].float()
                values_here = of_head[row.clamp(0, b.shape[2] - 1), column.clamp(0, b.shape[3] - 1)]
                expected = expected + torch.where(inside, values_here, -torch.inf)
            expected = expected * base_2
        else:
            expected = given
        expected = torch.where(visible[:64], expected, -torch.inf)
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("name", ["none", "causal", "function"])
def test_parts_share_the_visible_tiles_in_falling_order(name: str, tmp_path: Path, seed: int) -> None:
    mask, chosen = MASKS[name], random.Random(seed)
    problem = Problem("prefill", "bf16", "bf16", rope="ragged", mask=mask.program)
    library = cuda_host.build(prefill_sm90.prefill_spec(problem, WHOLE), MASK_HARNESS, tmp_path)
    args, out = mask_code.c_args(mask, torch.device("cpu")), (ctypes.c_int * 4096)()
    for n_keys, parts in itertools.product((0, 1, 129, chosen.randint(2000, 9000), 3 * 4096 + 1), (1, 2, 3, 7)):
        start = max(n_keys - chosen.randint(1, 300), 0)

        def tiles_of(*part: int, start: int = start, n_keys: int = n_keys) -> list[int]:
            values = (ctypes.c_int * 9)(64, start, 0, 0, start, 0, n_keys, *part)
            return out[: library.walk(ctypes.byref(args), values, out)]

        whole = tiles_of(1, 0)
        assert whole == sorted(whole, reverse=True)
        for part in range(parts):
            assert tiles_of(parts, part) == [tile for tile in whole if tile % parts == part]


@pytest.mark.parametrize(
    ("new", "keys", "heads"),
    [
        ([64], [131072], 16),
        ([2048], [16384], 16),
        ([1] * 40, [8192] * 40, 16),
        ([500, 900, 64], [4096, 9000, 30000], 8),
        ([3000] * 4, [16384] * 4, 5),
    ],
)
def test_the_workspace_holds_every_part(schedule: ctypes.CDLL, new: list[int], keys: list[int], heads: int) -> None:
    space = prefill_sm90.workspace_of(CAUSAL, T=sum(new), L=sum(keys), B=len(new), H=heads)
    used = 0
    for n, k in zip(new, keys, strict=True):
        whole, parts = split_of(schedule, n, k, heads, 132)
        used += (-(-n // 192) * heads - whole) * 3 * parts if parts > 1 else 0
    assert 0 < used <= space.slots
    address = 1 << 40 | 4
    table, arrivals, slots = space.places(address)
    assert slots % 16 == 0 and slots + space.slots * space.slot_bytes <= address + space.bytes
    if space.ordered:
        assert address <= table and table + (len(new) + 1) * 48 <= arrivals and arrivals + 4 * space.slots <= slots
    else:
        assert table == 0 and space.arrivals == space.slots < 1 << 16


def test_short_sequences_take_no_workspace() -> None:
    assert prefill_sm90.workspace_of(CAUSAL, T=4095, L=4095, B=3, H=16).bytes == 0
