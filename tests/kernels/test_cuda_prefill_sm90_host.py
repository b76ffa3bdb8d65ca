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
// Writes (sequence, head, block) of each row group of each item, -1 where it has none, and the sequence's key count.
static void decode(const ScheduleEntry* table, int count, int heads, int items, int* out) {
  const Grouping grouping = grouping_of(table[count]);
  for (int item = 0; item < items; item++) {
    const ScheduleEntry& entry = table[find_entry(table, count, item)];
    const int blocks = row_blocks(entry.new_), tiles = ceil_div(blocks, grouping.size);
    const TilePosition at = tile_position(item - entry.first_item, tiles, entry.n_keys, heads);
    for (int group = threadIdx.x; group < kRowGroups; group += 32) {
      const int block = block_of(group, at.tile, tiles, blocks, grouping);
      int* to = out + 4 * (item * kRowGroups + group);
      to[0] = entry.sequence, to[1] = at.head;
      to[2] = block < blocks ? block : -1, to[3] = entry.n_keys;
    }
  }
}
extern "C" int order(const int* q, const int* k, int batch, int heads, int grid, int* grouping, int* out) {
  std::vector<ScheduleEntry> table(batch <= kTableSequences ? kTableSequences + 1 : batch + 1);
  const int count = int(table.size()) - 1;
  if (batch <= kTableSequences) {
    host_run(32, [&] { build_table(sequences(q, k), batch, heads, grid, table.data()); });
  } else {
    host_run(MLA_THREADS, [&] { mla_prefill_schedule({sequences(q, k), table.data(), batch, heads, grid}); });
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
    schedule: ctypes.CDLL, new: list[int], keys: list[int], heads: int, grid: int
) -> tuple[tuple[int, int], list[list[tuple[int, int, int, int]]]]:
    """Return (blocks an item, spread) and, for each item, (sequence, head, block, key count) of each row group."""
    offsets = [torch.tensor([3, *x], dtype=torch.int32).cumsum(0).int() for x in (new, keys)]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in offsets]
    grouping = (ctypes.c_int * 2)()
    count = schedule.order(*pointers, len(new), heads, grid, grouping, None)
    out = torch.full((count, 3, 4), -7, dtype=torch.int32)
    assert schedule.order(*pointers, len(new), heads, grid, grouping, ctypes.c_void_p(out.data_ptr())) == count
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
    grouping, items = order_of(schedule, new, keys, heads, grid)
    done = Counter((b, h, block) for item in items for b, h, block, _ in item if block >= 0)
    wanted = {(b, h, block) for b, n in enumerate(new) for h in range(heads) for block in range(-(-n // 64))}
    assert set(done) == wanted
    assert not done or set(done.values()) == {1}
    for item in items:
        assert len({(b, h) for b, h, block, _ in item if block >= 0}) == 1, "an item is of one head of one sequence"
    counts = [item[0][3] for item in items]
    slack = 1.0 if batch <= 32 else 9 / 8  # buckets are eight to an octave
    assert all(later <= slack * max(earlier, 1) for earlier, later in itertools.pairwise(counts))
    assert grouping[1] == (len(items) <= grid), "spread exactly where each thread block has one item"


def test_a_lone_short_sequence_fills_the_chip_with_balanced_items(schedule: ctypes.CDLL) -> None:
    grouping, items = order_of(schedule, [1024], [1024], 16, 132)
    assert grouping == (2, 1)
    assert len(items) == 128
    assert {sum(block + 1 for *_, block, _ in item if block >= 0) for item in items} == {
        17
    }  # a long one with a short one


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


MASK_HARNESS = """
static void fill(Item& item, const int* values) {
  item = Item{};
  item.rows = values[0], item.q_position = values[1], item.head = values[2], item.sequence = values[3];
  item.start = values[4], item.k_position = values[5], item.n_keys = values[6];
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
        values = (ctypes.c_int * 7)(rows, start + first_row, head, sequence, start, offset, n_keys)
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
