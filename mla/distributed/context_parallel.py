"""Each rank its own keys: heads go round, partial results come back.

A rank holds some keys of every sequence, and queries and kv_b_proj of its own heads. In step s it attends, over its
keys, for the heads of the rank s places on, whose queries arrived while it worked on the step before; the result goes
home while it works on the next. Own heads are done in two halves, one while the first queries travel and one while the
last result does, so that no transfer is without work beside it::

    compute    own, first half | heads of r+1       | heads of r+2       | ...  | own, second half |
    queries    r+1 ----------->| r+2 -------------->| r+3 ...                   |
    results                                         | r+1 -------------->| ...  | last ---------->| merge

What others found for own heads is merged among itself as it comes, and with what was found here at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mla._check import (
    as_index,
    check_offsets,
    require_device,
    require_dtype,
    require_no_grad,
    require_shape,
    require_tensor,
)
from mla._chunk_buffer import Extents
from mla._launch import Stream, stream_scope
from mla._prefill_call import Call
from mla.chunked import find_extents, plan_job, run_job
from mla.distributed.exchange import Arrival, Group, as_process_group, exchange
from mla.distributed.key_shards import InterleavedKeys, KeyShard
from mla.distributed.local_mask import depends_on_heads, local_mask
from mla.errors import ArgumentError, DTypeError
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection
from mla.masks import Mask, as_mask
from mla.merge import merge_attn_states
from mla.plan import PrefillPlan
from mla.target import Target


def context_parallel_prefill(
    q: torch.Tensor,
    kv_collection: PagedKVCacheCollection,
    layer_idx: int,
    weight: torch.Tensor,
    input_row_offsets: torch.Tensor,
    mask: Mask,
    scale: float,
    *,
    keys: KeyShard,
    start_positions: torch.Tensor,
    group: Group | None = None,
    buffer_token_size: int = 16384,
    plan: PrefillPlan | None = None,
    max_chunks: int | None = None,
    seq_lens_cpu: torch.Tensor | Sequence[int] | None = None,
    output: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_layout: str = "TH",
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    attention_dtype: torch.dtype | None = None,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend with this rank's heads to all keys, of which each rank of the group holds some.

    Equal to `mla.chunked_prefill` on one device within tolerance. All ranks of the group call this with the same rows
    of the same batch, each with its own heads, as tensor parallelism leaves them; T, H / world and dtypes are the same
    on all.

    Parameters
    ----------
    q : torch.Tensor
        [T, H / world, dn + 64]: heads [rank * H / world, (rank + 1) * H / world) of the model.
    kv_collection : PagedKVCacheCollection
        Pages and page table of this rank's own tokens, made with ``seq_lens=keys.lengths(cached + new)``. A sequence
        may have none here.
    weight : torch.Tensor
        The rows of kv_b_proj that belong to this rank's heads, [H / world * (dn + dv), 512]; they go round with q.
    input_row_offsets : torch.Tensor
        [B+1] cumulative new tokens of the whole sequences.
    mask : Mask
        Of the whole problem: h counts all heads, k is a position in the whole sequence, and what the mask captures by h
        has all heads. At most two captured tensors can be needed beside its own.
    keys : InterleavedKeys or ContiguousKeys
        Which keys are here.
    start_positions : torch.Tensor
        [B] tokens of the whole sequences before this step.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that share keys and heads, in their order; a mesh of one dimension. Default: all ranks.
    plan, max_chunks, seq_lens_cpu
        As in `mla.chunked_prefill`, of this rank's own tokens; they may differ from rank to rank.
    sinks : torch.Tensor, optional
        float32 [H / world], of this rank's heads; counted once.

    The other parameters are those of `mla.chunked_prefill`.

    Returns
    -------
    torch.Tensor, or a pair of them
        output [T, H / world, dv], or (output, lse), over the keys of all ranks. Rows outside
        [input_row_offsets[0], input_row_offsets[-1]) are undefined.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        Naming the argument, what came and what is allowed. An error on one rank alone leaves the others waiting,
        until the timeout of their group.

    Notes
    -----
    Needs what `mla.chunked_prefill` needs for H / world heads, and at most five f32 results [T, H / world, dv] and two
    copies of q and weight, however many ranks there are. Each rank merges in an order of
    its own, always the same: the result is deterministic. Nothing synchronises but the plan (`mla.chunked_prefill`).
    """
    if torch.compiler.is_compiling():
        raise ArgumentError(
            "context_parallel_prefill communicates, which torch.compile does not trace; call it outside"
        )
    if not isinstance(kv_collection, PagedKVCacheCollection):
        raise DTypeError(f"kv_collection must be a PagedKVCacheCollection, got {type(kv_collection).__name__}")
    members = as_process_group(group)
    rank, world = dist.get_rank(members), dist.get_world_size(members)
    cache = kv_collection.layer(layer_idx)
    if not isinstance(weight, torch.Tensor):
        raise DTypeError(f"weight must be a torch.Tensor, which is sent to other ranks, got {type(weight).__name__}")
    extents = find_extents(q, cache, weight, buffer_token_size, plan, attention_dtype)
    require_no_grad(q=q, weight=weight)
    _check_shard(cache, keys, rank, world, sinks, extents)
    if lse_layout not in ("TH", "HT"):
        raise ArgumentError(f"lse_layout must be 'TH' or 'HT', got {lse_layout!r}")
    offsets = as_index(input_row_offsets, "input_row_offsets", cache.batch_size + 1, cache.device)
    check_offsets(input_row_offsets, "input_row_offsets", extents.total, "q")
    if output is None:
        output = torch.empty(extents.total, extents.heads, extents.v_dim, dtype=q.dtype, device=q.device)
    shape = extents.total, extents.heads, extents.v_dim
    require_shape(output, "output", shape, f"q has shape {tuple(q.shape)}")
    with stream_scope(q.device, stream):
        if plan is None:
            plan = plan_job(cache, input_row_offsets, extents.rows, max_chunks, seq_lens_cpu, target)
        starts = as_index(start_positions, "start_positions", cache.batch_size, cache.device)
        job = _Job(cache, plan, offsets, starts, as_mask(mask, "mask"), keys, scale, softcap, target, extents, world)
        lse = torch.empty(extents.total, extents.heads, dtype=torch.float32, device=q.device)
        _go_round(job, _Result(output, lse), q, weight, sinks, rank, world, members)
    if not return_lse:
        return output
    return output, lse if lse_layout == "TH" else lse.T.contiguous()


@dataclass(frozen=True, slots=True)
class _Result:
    """Attention over some of the keys; a row whose LSE is -inf may hold anything."""

    output: torch.Tensor  # [T, h, dv]
    lse: torch.Tensor  # [T, h]

    def of(self, heads: slice) -> _Result:
        return _Result(self.output[:, heads], self.lse[:, heads])

    def become(self, one: _Result, other: _Result, target: str | Target) -> None:
        """Become two results of the same heads merged; one of them may be this."""
        merge_attn_states(self.output, one.output, one.lse, other.output, other.lse, self.lse, target=target)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is the same for all heads."""

    cache: PagedKVCache
    plan: PrefillPlan
    offsets: torch.Tensor
    starts: torch.Tensor
    mask: Mask
    keys: KeyShard
    scale: float
    softcap: float
    target: str | Target
    extents: Extents
    world: int
    masks: dict[range | None, Mask] = field(default_factory=dict)

    def room(self) -> torch.Tensor:
        """Return memory for an f32 result of as many heads as a rank has, which is sent at once."""
        size = self.extents.total * self.extents.heads * (self.extents.v_dim + 1)
        return torch.empty(size, dtype=torch.float32, device=self.cache.device)

    def result_in(self, room: torch.Tensor) -> _Result:
        """Return the result that lies in some room."""
        rows, v_dim = self.extents.total, self.extents.v_dim
        heads = self.extents.heads
        output, lse = room.split((rows * heads * v_dim, rows * heads))
        return _Result(output.view(rows, heads, v_dim), lse.view(rows, heads))

    def joined(self, so_far: _Result | None, returning: Arrival) -> _Result:
        """Return what came before and what comes now, merged."""
        (room,) = returning.wait()
        arrived = self.result_in(room)
        if so_far is not None:
            arrived.become(so_far, arrived, self.target)
        return arrived

    def attend(
        self, q: torch.Tensor, weight: torch.Tensor, first_head: int, into: _Result, sinks: torch.Tensor | None = None
    ) -> None:
        """Attend over own keys for the heads of q, the first of which is `first_head` of the model."""
        count = q.shape[1]
        mask = self._mask_of(range(first_head, first_head + count))
        call = Call(
            into.output, q, None, q, q, self.cache, None, mask, self.offsets, self.offsets, self.scale,
            start_positions=self.starts, lse=into.lse, softcap=self.softcap, sinks=sinks, target=self.target,
        )  # fmt: skip
        run_job(call, weight, self.extents._replace(heads=count), self.plan, None, None, None, keep_rows=False)

    def _mask_of(self, heads: range) -> Mask:
        key = heads if depends_on_heads(self.mask) else None
        mask = self.masks.get(key)
        if mask is None:
            num_heads = self.extents.heads * self.world
            mask = local_mask(self.mask, heads, num_heads, self.keys, self.cache.batch_size, self.cache.device)
            self.masks[key] = mask
        return mask


def _go_round(
    job: _Job,
    result: _Result,
    q: torch.Tensor,
    weight: torch.Tensor,
    sinks: torch.Tensor | None,
    rank: int,
    world: int,
    group: dist.ProcessGroup,
) -> None:
    """Write the attention of own heads over the keys of all ranks into `result`, and do the like for the others."""
    count, width = job.extents.heads, job.extents.nope + job.extents.v_dim
    if world == 1:
        job.attend(q, weight, 0, result, sinks)
        return
    own, from_others = job.result_in(job.room()), None
    half = count // 2

    def attend_own(heads: slice) -> None:
        if heads.start < heads.stop:
            part, rows = own.of(heads), slice(heads.start * width, heads.stop * width)
            job.attend(
                q[:, heads], weight[rows], rank * count + heads.start, part, None if sinks is None else sinks[heads]
            )

    arriving = exchange((q, weight), -1, group)
    returning = None
    attend_own(slice(0, half))
    for step in range(1, world):
        their_q, their_weight = arriving.wait()
        if step + 1 < world:
            arriving = exchange((q, weight), -step - 1, group)
        room = job.room()
        job.attend(their_q, their_weight, (rank + step) % world * count, job.result_in(room))
        if returning is not None:
            from_others = job.joined(from_others, returning)
        returning = exchange((room,), step, group)
    attend_own(slice(half, count))
    assert returning is not None
    from_others = job.joined(from_others, returning)
    result.become(own, from_others, job.target)


def _check_shard(
    cache: PagedKVCache, keys: KeyShard, rank: int, world: int, sinks: torch.Tensor | None, extents: Extents
) -> None:
    if not isinstance(keys, KeyShard):
        raise DTypeError(f"keys must be InterleavedKeys or ContiguousKeys, got {type(keys).__name__}")
    if isinstance(keys, InterleavedKeys) and (keys.rank, keys.world) != (rank, world):
        raise ArgumentError(f"keys are those of rank {keys.rank} of {keys.world}, but this is rank {rank} of {world}")
    if not cache.lengths_include_new:
        raise ArgumentError(
            "kv_collection must be made with seq_lens, this rank's own share of cached and new tokens: "
            "seq_lens=keys.lengths(cached + new)"
        )
    if sinks is not None:
        require_tensor(sinks, "sinks", 1)
        require_dtype(sinks, "sinks", (torch.float32,))
        require_shape(sinks, "sinks", (extents.heads,), f"this rank has {extents.heads} heads")
        require_device(sinks, "sinks", cache.device)
