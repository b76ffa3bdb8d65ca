"""Attention over tiles of queries and keys with an online softmax, in torch on the CPU.

Every tile is copied head-major into fp32 buffers of a fixed place and size: the matrix products then see the same
operands wherever a sequence lies in its batch and its pages, so that results are bitwise the same, and nothing outside
[0, n_keys) is read at all. The keys of a tile are nope and rope side by side, 192 wide, for one tile and one group of
heads only. Tile borders depend on the sequence alone.

Threads take whole tiles and run each op alone: ops that are split over threads wait for one another thousands of times
a call, which costs little on an idle machine and a factor of five on a busy one.

``mla bench --target cpu`` measures it beside ``scaled_dot_product_attention`` on padded copies.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from mla.masks import TILE_HIDDEN, TILE_PARTIAL, Mask
from mla.problem import QK_ROPE_HEAD_DIM, PrefillArgs, Problem

BLOCK_Q = 128
BLOCK_K = 256
BLOCK_H = 4
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
#: The running maximum before any key; finite, so that hidden minus hidden is never NaN.
FLOOR = torch.finfo(torch.float32).min

# Whatever torch's default dtype and device are: engines set them for their models.
_floats = partial(torch.empty, dtype=torch.float32, device="cpu")
_arange = partial(torch.arange, device="cpu")


class Prefill:
    """`prefill` for CPU tensors: every dtype row, mask and feature."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: what the registry lets through fits."""
        return None

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PrefillArgs], None]:
        """Return the function that attends."""
        return partial(attend, granularity=problem.granularity)

    @staticmethod
    def workspace_bytes(problem: Problem, *, T: int, L: int, B: int, H: int) -> int:
        """Return 0: the tiles are allocated by each call."""
        return 0


@dataclass(slots=True)
class Sequence:
    """Where one sequence of the batch lies, in host ints, and the rope rows of its keys."""

    index: int
    row: int  # first row of q
    new: int
    key: int  # first row of k and v
    n_keys: int
    start: int  # position of the first query
    offset: int  # position of the first key
    rope: torch.Tensor  # f32 [n_keys, dr]


#: Sequence, heads, first query of a tile, and the class of each key tile.
Task = tuple[Sequence, slice, int, list[int]]


class Tiles:
    """The fp32 buffers of one thread: one query tile, one key tile, their scores and the output so far."""

    def __init__(self, args: PrefillArgs) -> None:
        self.depth = args.k.shape[2] + QK_ROPE_HEAD_DIM
        self.v_dim = args.v.shape[2]
        self.query_data = _floats(BLOCK_H * BLOCK_Q * self.depth)
        self.key_data = _floats(BLOCK_H * BLOCK_K * self.depth)
        self.value_data = _floats(BLOCK_H * BLOCK_K * self.v_dim)
        self.score_data = _floats(BLOCK_H * BLOCK_Q * BLOCK_K)
        self.output_data = _floats(BLOCK_H * BLOCK_Q * self.v_dim)

    def query(self, args: PrefillArgs, heads: slice, rows: slice, factor: float) -> torch.Tensor:
        """Return the queries [h, n, q_depth] times `factor` and their own scales."""
        tile = _view(self.query_data, heads, rows.stop - rows.start, self.depth)
        split = args.q.shape[2]
        tile[..., :split].copy_(args.q[rows, heads].transpose(0, 1))
        if args.q_rope is not None:
            tile[..., split:].copy_(args.q_rope[rows, heads].transpose(0, 1))
        if args.q_scale is not None:
            scaled = tile if args.q_rope is None or args.rope_prescaled else tile[..., :split]
            scaled.mul_(args.q_scale[rows])
        return tile.mul_(factor)

    def key(self, args: PrefillArgs, heads: slice, rows: slice, rope: torch.Tensor) -> torch.Tensor:
        """Return the keys [h, n, q_depth], nope and rope side by side."""
        tile = _view(self.key_data, heads, rows.stop - rows.start, self.depth)
        nope = args.k.shape[2]
        tile[..., :nope].copy_(args.k[rows, heads].transpose(0, 1))
        tile[..., nope:].copy_(rope)
        if args.k_scales is not None:
            scaled = tile if args.q_rope is not None and args.rope_prescaled else tile[..., :nope]
            scaled.mul_(args.k_scales[rows])
        return tile

    def value(self, args: PrefillArgs, heads: slice, rows: slice) -> torch.Tensor:
        """Return the values [h, n, dv]."""
        tile = _view(self.value_data, heads, rows.stop - rows.start, self.v_dim)
        tile.copy_(args.v[rows, heads].transpose(0, 1))
        if args.v_scale is not None:
            if args.v_scale.ndim == 2:
                tile.mul_(args.v_scale[rows])
            else:
                tile.mul_(args.v_scale.view(-1, 1, 1)[heads if args.v_scale.shape[0] > 1 else slice(None)])
        return tile

    def scores(self, heads: slice, queries: int, keys: int) -> torch.Tensor:
        """Return room for [h, queries, keys]."""
        return _view(self.score_data, heads, queries, keys)

    def output(self, heads: slice, queries: int) -> torch.Tensor:
        """Return zeros [h, queries, dv]."""
        return _view(self.output_data, heads, queries, self.v_dim).zero_()


def attend(args: PrefillArgs, granularity: int) -> None:
    """Write output and LSE of every sequence; `granularity` is the number of rope elements that share a scale."""
    tasks = deque(_tasks(args, granularity))
    threads = torch.get_num_threads()
    workers = min(threads, len(tasks))
    if workers <= 1:
        _work(args, tasks)
        return
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            work = [pool.submit(_work, args, tasks) for _ in range(workers)]
    finally:
        torch.set_num_threads(threads)  # what a worker sets for itself is also what threads to come begin with
    for one in work:
        one.result()


def _tasks(args: PrefillArgs, granularity: int) -> Iterator[Task]:
    """Yield the query tiles, those with the most keys of a causal sequence first."""
    heads = args.q.shape[1]
    for sequence in _sequences(args, granularity):
        for h in range(0, heads, BLOCK_H):
            group = slice(h, min(heads, h + BLOCK_H))
            for i, classes in reversed(list(enumerate(_tile_classes(args.mask, sequence, group)))):
                yield sequence, group, i * BLOCK_Q, classes


@torch.inference_mode()
def _work(args: PrefillArgs, tasks: deque[Task]) -> None:
    """Take tiles until none is left, each op on this thread alone: there is nothing that threads would wait for."""
    tiles = Tiles(args)
    while True:
        try:
            task = tasks.popleft()
        except IndexError:
            return
        _attend_tile(args, tiles, *task)


def _attend_tile(args: PrefillArgs, tiles: Tiles, seq: Sequence, heads: slice, first: int, classes: list[int]) -> None:
    """Attend from one tile of queries of a sequence, `first` on, and some heads to all its keys."""
    last = min(seq.new, first + BLOCK_Q)
    count, factor = last - first, args.softmax_scale / args.softcap if args.softcap else args.softmax_scale * LOG2E
    rows = slice(seq.row + first, seq.row + last)
    query = tiles.query(args, heads, rows, factor)
    output = tiles.output(heads, count)
    row_max = torch.full_like(output[..., :1], FLOOR)  # base 2, like all scores here
    row_sum = torch.zeros_like(row_max)

    for j, tile_class in enumerate(classes):
        if tile_class == TILE_HIDDEN:
            continue
        key, key_end = j * BLOCK_K, min(seq.n_keys, (j + 1) * BLOCK_K)
        key_rows = slice(seq.key + key, seq.key + key_end)
        keys = tiles.key(args, heads, key_rows, seq.rope[key:key_end])
        scores = torch.bmm(query, keys.transpose(1, 2), out=tiles.scores(heads, count, key_end - key))
        if args.softcap:
            scores.tanh_().mul_(args.softcap * LOG2E)
        if tile_class == TILE_PARTIAL:
            _mask_scores(args.mask, scores, seq, heads, first, key)

        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        scores.sub_(new_max).exp2_()
        rescale = torch.exp2(row_max - new_max)
        row_sum.mul_(rescale).add_(scores.sum(-1, keepdim=True))
        output.mul_(rescale).baddbmm_(scores, tiles.value(args, heads, key_rows))
        row_max = new_max

    empty = row_sum == 0
    lse = torch.where(empty, -math.inf, (row_max + row_sum.log2()) * LN2)
    output.div_(row_sum.masked_fill_(empty, 1.0))
    if args.sinks is not None:
        sinks = args.sinks[heads].view(-1, 1, 1)
        output.mul_(torch.where(empty, 0.0, torch.sigmoid(lse - sinks)))
        lse = torch.logaddexp(lse, sinks)
    args.output[rows, heads].copy_(output.transpose(0, 1))
    if args.lse is not None:
        args.lse[rows, heads].copy_(lse[..., 0].T)


def _tile_classes(mask: Mask, seq: Sequence, heads: slice) -> list[list[int]]:
    """Return for every query tile and key tile whether it is hidden, partial or visible for all the heads together."""
    queries, keys = _arange(0, seq.new, BLOCK_Q).view(-1, 1), _arange(0, seq.n_keys, BLOCK_K)
    classes = mask.tile_class(
        torch.tensor(seq.index, device="cpu"),
        _arange(heads.start, heads.stop).view(-1, 1, 1),
        queries + seq.start,
        (queries + BLOCK_Q).clamp(max=seq.new) + (seq.start - 1),
        keys + seq.offset,
        (keys + BLOCK_K).clamp(max=seq.n_keys) + (seq.offset - 1),
    )
    low, high = classes.amin(0), classes.amax(0)
    together: list[list[int]] = torch.where(low == high, low, TILE_PARTIAL).tolist()
    return together


def _mask_scores(mask: Mask, scores: torch.Tensor, seq: Sequence, heads: slice, first: int, key: int) -> None:
    """Add the biases to a tile of scores and hide what the mask hides, by selection."""
    _, queries, keys = scores.shape
    for bias in mask.biases:
        block = bias[seq.index, heads if bias.shape[1] > 1 else slice(None)]
        block = block[:, first : first + queries, seq.offset + key : seq.offset + key + keys]
        height, width = block.shape[1:]
        scores[:, :height, :width].add_(block, alpha=LOG2E)
        scores[:, height:] = -math.inf
        scores[:, :, width:] = -math.inf
    head = _arange(heads.start, heads.stop).view(-1, 1, 1)
    pos_q = _arange(queries).view(-1, 1) + (seq.start + first)
    pos_k = _arange(keys) + (seq.offset + key)
    scores.masked_fill_(~mask.visible(torch.tensor(seq.index, device="cpu"), head, pos_q, pos_k), -math.inf)


def _sequences(args: PrefillArgs, granularity: int) -> list[Sequence]:
    """Return the sequences that have queries, their positions worked out."""
    rows, keys = args.cu_seqlens_q.tolist(), args.cu_seqlens_k.tolist()
    overrides = (args.cache_offsets, args.start_positions, args.kv_lengths)
    offsets, starts, kv_lengths = (None if index is None else index.tolist() for index in overrides)
    cached = args.cache.lengths.tolist() if args.cache is not None else None
    sequences = []
    for b in range(len(rows) - 1):
        new, held = rows[b + 1] - rows[b], keys[b + 1] - keys[b]
        if new == 0:
            continue
        if cached is not None:
            assert args.cache is not None
            natural = cached[b] + (0 if args.cache.lengths_include_new else new)
        else:
            assert args.rope is not None
            natural = args.rope.shape[1] if args.rope_kind == "batched" else held
        kv_len = natural if kv_lengths is None else kv_lengths[b]
        start = starts[b] if starts else (kv_len if args.rope_kind == "ragged" else natural) - new
        offset = offsets[b] if offsets else 0
        n_keys = min(held, max(0, kv_len - offset))
        rope = _rope_rows(args, granularity, b, keys[b], offset, n_keys)
        sequences.append(Sequence(b, rows[b], new, keys[b], n_keys, start, offset, rope))
    return sequences


def _rope_rows(args: PrefillArgs, granularity: int, b: int, key: int, offset: int, n_keys: int) -> torch.Tensor:
    """Return the rope part of the keys of a sequence as f32 [n_keys, dr]."""
    cache = args.cache
    if cache is not None:
        position = _arange(offset, offset + n_keys)
        page = position // cache.page_size
        if cache.page_indptr is None:
            page = cache.page_table[b, : -(-(offset + n_keys) // cache.page_size)].long()[page]
        else:
            page = cache.page_table[int(cache.page_indptr[b]) + page].long()
        slot = position % cache.page_size
        rope, base = cache.rope[page, slot], cache.latent.shape[-1]
        scales = cache.scales[page, slot] if cache.scales is not None and rope.dtype.itemsize == 1 else None
    else:
        assert args.rope is not None
        where = (b, slice(offset, offset + n_keys)) if args.rope_kind == "batched" else slice(key, key + n_keys)
        rope, base = args.rope[where], args.rope_scale_base
        scales = None if args.rope_scales is None else args.rope_scales[where]
    rope = rope.float()
    if scales is not None:
        rope = rope * scales[:, (base + _arange(rope.shape[-1])) // granularity]
    return rope


def _view(data: torch.Tensor, heads: slice, rows: int, columns: int) -> torch.Tensor:
    """Return the front of a flat buffer as [h, rows, columns]."""
    count = heads.stop - heads.start
    return data[: count * rows * columns].view(count, rows, columns)
