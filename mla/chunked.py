"""The whole job of one layer in one call: gather, up-project and attend, chunk by chunk, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from mla._check import (
    FP8_DTYPES,
    as_index,
    check_offsets,
    is_capturing,
    readable,
    require_device,
    require_dtype,
    require_last_dim_contiguous,
    require_no_grad,
    require_no_overlap,
    require_shape,
    require_tensor,
)
from mla._chunk_buffer import Extents, Partial, make_buffer
from mla._chunk_groups import Groups
from mla._launch import Stream, stream_scope, traced_target
from mla._prefill_call import Call, Form, attend, judge
from mla._prefill_check import require_fp8_format
from mla._repeat import find, places, remember
from mla.dispatch import Runner
from mla.errors import ArgumentError, DTypeError, ShapeError
from mla.gather import Weight
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection
from mla.masks import Mask, as_mask
from mla.merge import find_run as find_merge
from mla.plan import PlanChunk, PrefillPlan, check_buffer_token_size, make_plan
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM, SUPPORTED_DIMS, Again, MergeArgs

if TYPE_CHECKING:
    from mla.target import Target

_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def chunked_prefill(
    q: torch.Tensor,
    kv_collection: PagedKVCacheCollection,
    layer_idx: int,
    weight: Weight,
    input_row_offsets: torch.Tensor,
    mask: Mask,
    scale: float,
    *,
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
    workspace: torch.Tensor | None = None,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from this step's queries to all tokens of their sequences, cached and new, straight from the latent cache.

    For each chunk of the plan, latent rows are gathered and projected up into one buffer of N rows that is used again
    and again, and attended to; partial results are merged in f32. The result equals that of one chunk
    within tolerance for every N. No key is ever assembled with its rope part.

    Parameters
    ----------
    q : torch.Tensor
        [T, H, dn + 64]; bf16, fp16 or fp32.
    kv_collection : PagedKVCacheCollection
        In the dtype of q, or fp8. This step's tokens are stored already.
    layer_idx : int
    weight : torch.Tensor or callable
        kv_b_proj as checkpoints have it, [H * (dn + dv), 512] in the dtype of q: head h's rows are its dn nope rows,
        then its dv value rows. Or a callable from latent rows [n, 512] to [n, H * (dn + dv)], for a quantised linear.
    input_row_offsets : torch.Tensor
        [B+1] cumulative new tokens: the rows of q.
    mask : Mask
    scale : float
        Softmax scale.
    buffer_token_size : int
        N, rows of the buffer; `plan` has its own.
    plan : PrefillPlan, optional
        Of this batch, shared by all layers of the step.
    max_chunks : int, optional
        Chunks to work through without asking the device how many are needed: nothing synchronises, so that the call
        can be captured. A batch that needs more gets NaN, output and LSE, for the sequences that were cut.
    seq_lens_cpu : torch.Tensor or sequence of int, optional
        [B] cached + new on the host, with which nothing synchronises and no chunk is in vain. With `input_row_offsets`
        on the CPU as well, each chunk touches the rows of its own sequences alone, and only what crosses a border
        between chunks is merged. Refused while a graph is captured.
    output : torch.Tensor, optional
        [T, H, dv]; allocated in the dtype of q when missing.
    return_lse : bool
        Return the natural-log LSE too: float32 [T, H], or [H, T] as `lse_layout` says.
    sinks : torch.Tensor, optional
        float32 [H]; counted once.
    softcap : float
    attention_dtype : torch.dtype, optional
        What q, k and v are attended to in: the dtype of q when missing, or float8_e4m3fn (float8_e4m3fnuz on gfx942).
        In fp8 each row of q has a scale, the values of a head one for each chunk, and so have the keys of a chunk, or
        each of them where the cache is fp8. A scale of a chunk counts all its sequences: NaN in one reaches the others.
        q has to be bfloat16, the cache fp8 of that format, or its rope bfloat16, which then stays so. What that costs
        in accuracy: ``docs/numerics.md``.
    workspace : torch.Tensor, optional
        uint8, at least ``workspace_size("chunked_prefill", ...)`` bytes; allocated when missing.
    target : str or Target
    stream : torch.cuda.Stream or int, optional

    Returns
    -------
    torch.Tensor, or a pair of them
        output, or (output, lse). Rows outside [input_row_offsets[0], input_row_offsets[-1]) are left as they were in an
        `output` that was given, and are undefined in what is allocated here, the LSE too.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        As the parts: before their launch, naming the argument, what came and what is allowed.
    BufferOverflowError
        `seq_lens_cpu` needs more chunks than `max_chunks`.

    Notes
    -----
    With none of `plan`, `max_chunks` and `seq_lens_cpu` the call synchronises once, to learn lengths and offsets; that
    is refused while a graph is captured. ``docs/serving.md`` tells how to capture a step.
    """
    if not isinstance(kv_collection, PagedKVCacheCollection):
        raise DTypeError(f"kv_collection must be a PagedKVCacheCollection, got {type(kv_collection).__name__}")
    as_mask(mask, "mask")
    require_tensor(input_row_offsets, "input_row_offsets", 1)
    cache = kv_collection.layer(layer_idx)
    extents = find_extents(q, cache, weight, buffer_token_size, plan, attention_dtype)
    require_no_grad(q=q, weight=weight if isinstance(weight, torch.Tensor) else None)
    if lse_layout not in ("TH", "HT"):
        raise ArgumentError(f"lse_layout must be 'TH' or 'HT', got {lse_layout!r}")
    lse = None
    if return_lse:
        shape = (extents.total, extents.heads) if lse_layout == "TH" else (extents.heads, extents.total)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    rows = lse if lse is None or lse_layout == "TH" else lse.T
    keep_rows = output is not None
    if output is None:
        output = torch.empty(extents.total, extents.heads, extents.v_dim, dtype=q.dtype, device=q.device)
    if torch.compiler.is_compiling():
        _trace(
            output, rows, q, cache, weight, input_row_offsets, mask, scale, plan, buffer_token_size, max_chunks,
            seq_lens_cpu, sinks, softcap, extents.fp8, workspace, keep_rows, traced_target(target, stream),
        )  # fmt: skip
    else:
        call = Call(
            output, q, None, q, q, cache, None, mask, input_row_offsets, input_row_offsets, scale,
            lse=rows, softcap=softcap, sinks=sinks, target=target,
        )  # fmt: skip
        with stream_scope(q.device, stream):
            run_job(call, weight, extents, plan, max_chunks, seq_lens_cpu, workspace, keep_rows)
    return output if lse is None else (output, lse)


def run_job(
    call: Call,
    weight: Weight,
    extents: Extents,
    plan: PrefillPlan | None,
    max_chunks: int | None,
    seq_lens_cpu: torch.Tensor | Sequence[int] | None,
    workspace: torch.Tensor | None,
    keep_rows: bool,
) -> None:
    """Make the plan where there is none, and work through it; k and v of `call` are made here.

    Parameters
    ----------
    keep_rows : bool
        Leave rows of the output that belong to no sequence as they are; they may become anything otherwise.

    Notes
    -----
    Every row of a sequence is written, also where the sequence has no keys here, as on a rank that holds others.
    """
    cache, device = call.k_rope, call.q.device
    assert isinstance(cache, PagedKVCache)
    offsets_given = call.valid_length
    check_offsets(offsets_given, "input_row_offsets", extents.total, "q")
    _require_output(call.output, call.q, extents)
    extents = extents.on(call.target, device)
    if workspace is not None:
        require_workspace(workspace, extents.workspace_bytes(), device)
    offsets = as_index(offsets_given, "input_row_offsets", cache.batch_size + 1, device)
    call.valid_length = call.cache_row_offsets = offsets
    if plan is None:
        plan = plan_job(cache, offsets_given, extents.rows, max_chunks, seq_lens_cpu, call.target)
    elif plan.total_rows is not None and is_capturing(device):
        raise ArgumentError(
            "plan has lengths that the host knows, and a graph is being captured: a replay would not see new ones. "
            "Make it with max_chunks, without seq_lens_cpu and check()"
        )
    else:
        _require_same_batch(plan, cache, offsets_given, offsets)
    groups = Groups.of(plan, call.mask if call.start_positions is None else None, extents.heads)
    if groups is not None:
        if groups.rows > extents.total:
            raise ShapeError(f"plan was made for {groups.rows} rows of q, q has shape {tuple(call.q.shape)}")
        _attend_groups(call, plan, groups, weight, extents, workspace)
        return
    kernels = _Kernels(call)
    _attend_all(call, plan, weight, extents, workspace, keep_rows, kernels)
    if plan.total_rows is None and plan.max_chunks * plan.buffer_token_size < _most_rows(cache):
        _spoil_cut_sequences(call, plan, kernels)


def _require_output(output: torch.Tensor, q: torch.Tensor, extents: Extents) -> None:
    """Raise unless the output fits; kernels see it as a whole only where there is one chunk."""
    require_tensor(output, "output", 3)
    shape = extents.total, extents.heads, extents.v_dim
    require_shape(output, "output", shape, f"q has shape {tuple(q.shape)}")
    require_dtype(output, "output", dict.fromkeys((q.dtype, torch.float32)))
    require_device(output, "output", q.device)
    require_last_dim_contiguous(output, "output")
    require_no_overlap(output, "output")
    require_no_grad(output=output)


def _require_same_batch(
    plan: PrefillPlan, cache: PagedKVCache, offsets_given: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Raise if the lengths that a plan knows are not those of the batch; only as far as these are on the CPU."""
    if plan.seq_lens_cpu is not None and readable(cache.lengths):
        lengths = cache.total_lengths(offsets)
        if not torch.equal(plan.seq_lens_cpu, lengths):
            raise ArgumentError(
                f"plan was made for lengths {plan.seq_lens_cpu.tolist()}, the batch has {lengths.tolist()}"
            )
    if plan.row_offsets_cpu is not None and readable(offsets_given):
        known = plan.row_offsets_cpu
        if not torch.equal(known.to(torch.int64), offsets_given.to(torch.int64)):
            raise ArgumentError(
                f"plan was made for input_row_offsets {known.tolist()}, the call has {offsets_given.tolist()}"
            )


def plan_job(
    cache: PagedKVCache,
    input_row_offsets: torch.Tensor,
    buffer_token_size: int,
    max_chunks: int | None,
    seq_lens_cpu: torch.Tensor | Sequence[int] | None,
    target: str | Target,
) -> PrefillPlan:
    """Make the plan of a job; where nothing says how many chunks there are, lengths are fetched: that synchronises."""
    offsets = as_index(input_row_offsets, "input_row_offsets", cache.batch_size + 1, cache.device)
    row_offsets_cpu = input_row_offsets if input_row_offsets.device.type == "cpu" else None
    if max_chunks is None and seq_lens_cpu is None:
        seq_lens_cpu, row_offsets_cpu = _fetch_lengths(cache, offsets)
    return make_plan(
        offsets, cache, buffer_token_size, max_chunks, seq_lens_cpu, target, row_offsets_cpu=row_offsets_cpu
    )


def find_extents(
    q: torch.Tensor,
    cache: PagedKVCache,
    weight: Weight,
    buffer_token_size: int,
    plan: PrefillPlan | None,
    attention_dtype: torch.dtype | None = None,
) -> Extents:
    """Check the operands against each other and return their sizes, with a full buffer and several chunks."""
    require_tensor(q, "q", 3)
    require_dtype(q, "q", _QUERY_DTYPES)
    require_device(q, "q", cache.device)
    require_last_dim_contiguous(q, "q")
    total, heads, q_depth = q.shape
    v_dim = dict(SUPPORTED_DIMS).get(q_depth)
    if v_dim is None:
        allowed = ", ".join(map(str, SUPPORTED_DIMS))
        raise ShapeError(f"q has q_depth {q_depth}, which is not supported; allowed (q_depth, v_head_dim): {allowed}")
    nope = q_depth - QK_ROPE_HEAD_DIM
    if isinstance(weight, torch.Tensor):
        require_shape(weight, "weight", (heads * (nope + v_dim), KV_LORA_RANK), f"q has shape {tuple(q.shape)}")
        require_dtype(weight, "weight", (q.dtype,))
        require_device(weight, "weight", q.device)
    elif not callable(weight):
        raise DTypeError(f"weight must be a torch.Tensor or a callable, got {type(weight).__name__}")
    if plan is None:
        check_buffer_token_size(buffer_token_size)
    elif not isinstance(plan, PrefillPlan):
        raise DTypeError(f"plan must be a PrefillPlan, got {type(plan).__name__}")
    else:
        for name, have, want in (
            ("sequences", plan.batch_size, cache.batch_size),
            ("tokens a page", plan.page_size, cache.page_size),
        ):
            if have != want:
                raise ShapeError(f"plan was made for {have} {name}, kv_collection has {want}")
        require_device(plan.buffer_lengths, "plan", cache.device)
        buffer_token_size = plan.buffer_token_size
    extents = Extents(total, buffer_token_size, heads, nope, v_dim, q.dtype, partial=max(total, 1))
    if attention_dtype is None or attention_dtype == q.dtype:
        return extents
    return extents._replace(
        fp8=_fp8_dtype(q, cache, attention_dtype),
        rope_in_fp8=cache.rope.dtype == attention_dtype,
        v_transposed=isinstance(weight, torch.Tensor),
    )


def _fp8_dtype(q: torch.Tensor, cache: PagedKVCache, attention_dtype: torch.dtype) -> torch.dtype:
    """Return the fp8 dtype that a bf16 q and a cache can be attended to in; raise where they cannot."""
    if attention_dtype not in FP8_DTYPES:
        raise DTypeError(
            f"attention_dtype must be {q.dtype}, as q, or float8_e4m3fn or float8_e4m3fnuz, got {attention_dtype}"
        )
    if q.dtype != torch.bfloat16:
        raise DTypeError(f"q must be torch.bfloat16 where attention_dtype is {attention_dtype}, got {q.dtype}")
    require_fp8_format(torch.empty(0, dtype=attention_dtype, device=q.device), "attention_dtype")
    if cache.rope.dtype not in (torch.bfloat16, attention_dtype):
        raise DTypeError(
            f"the rope of kv_collection must be torch.bfloat16 or {attention_dtype} where that is the attention_dtype, "
            f"got {cache.rope.dtype}"
        )
    return attention_dtype


def _fetch_lengths(cache: PagedKVCache, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each sequence and the row offsets on the CPU: the one sync of a call that knows nothing."""
    if is_capturing(offsets.device):
        raise ArgumentError(
            "one of plan and max_chunks must be given while a graph is captured: without them chunked_prefill "
            "synchronises to learn the number of chunks"
        )
    both = torch.cat((cache.total_lengths(offsets), offsets)).cpu()
    return both[: cache.batch_size], both[cache.batch_size :]


class _Kernels:
    """The launches of one job: what they have in common is looked at once for each kind, not for each chunk.

    A tensor of one row has a kind of its own, for its stride does not count in an alignment.
    """

    def __init__(self, call: Call) -> None:
        self._target = call.target
        self._same = "job", call.q.device, places((call.k_rope, call.mask, call.scale, call.softcap, call.target))
        self._forms: dict[Hashable, Form] = {}
        self._merges: dict[Hashable, Runner] = {}

    def _judge(self, call: Call) -> Form:
        kind = call.output.dtype, call.lse is None, call.sinks is None, call.q.shape[0] == 1
        form = self._forms.get(kind)
        if form is None:
            form = self._forms[kind] = judge(call)
        return form

    def ready(self, call: Call) -> Again:
        """Return what launches a call, to be used before the call changes; raise whatever is wrong with it."""
        values = (
            call.output, call.lse, call.sinks, call.q, call.q_rope, call.q_scale, call.k, call.k_scales, call.v,
            call.v_scale, call.valid_length, call.cache_row_offsets, call.cache_offsets, call.start_positions,
            call.kv_lengths,
        )  # fmt: skip
        key = self._same, places(values)
        known, again = find(key, values)
        if again is not None:
            return again
        form = self._judge(call)
        return lambda: remember(key, known, call.q.device, values, attend(call, form))

    def merge(self, args: MergeArgs) -> None:
        """Launch a merge."""
        output, lse = args.output, args.output_lse
        kind = output.dtype, args.prefix_output.dtype, lse is None, output.data_ptr() & 15, output.shape[0] == 1
        run = self._merges.get(kind)
        if run is None:
            sides = args.prefix_output, args.prefix_lse, args.suffix_output, args.suffix_lse
            run = self._merges[kind] = find_merge(output, *sides, lse, "TH", self._target)
        run(args)


def _chunks_of(plan: PrefillPlan) -> list[PlanChunk]:
    """Return the chunks of a plan; one of no rows where the batch has no keys, over which rows of q attend as well."""
    chunks = list(plan.chunks())
    if not chunks and plan.batch_size:
        chunks.append(PlanChunk(0, plan.buffer_row_offsets[0], plan.cache_offsets[0], 0, 0))
    return chunks


def _attend_groups(
    call: Call, plan: PrefillPlan, groups: Groups, weight: Weight, extents: Extents, workspace: torch.Tensor | None
) -> None:
    """Work through the groups of rows: whole ones into the output, parts of others merged on the way."""
    output, lse, sinks = call.output, call.lse, call.sinks
    chunks = _chunks_of(plan)
    rows = max((chunk.max_length for chunk in chunks), default=0)
    extents = extents._replace(rows=rows, partial=groups.most_parted_rows)
    parts = extents.allocate(workspace, call.q.device)
    buffer, kernels = make_buffer(call, plan, weight, extents, parts), _Kernels(call)
    in_buffer, base = -1, 0
    for i, group in enumerate(groups.groups):
        chunk, rows_of_q = chunks[group.chunk], slice(group.first, group.last)
        buffer.point(call, chunk)
        call.valid_length = groups.row_offsets[i]
        if groups.start_positions is not None:
            call.start_positions, call.kv_lengths = groups.start_positions[i], groups.kv_lengths
        call.sinks = sinks if group.starts else None
        if group.whole:
            buffer.queries.enter(call)
            call.output, call.lse = output, lse
        else:
            if group.starts:
                base = group.first
            buffer.queries.rows(rows_of_q).enter(call)
            so_far = Partial.of(parts, "so_far").rows(group.first - base, group.last - base)
            part = Partial.of(parts, "part").rows(0, group.last - group.first)
            call.output, call.lse = so_far if group.starts else part
        attend_group = kernels.ready(call)  # whatever is wrong is said before the first launch
        if in_buffer < 0:
            buffer.begin()
        if in_buffer != group.chunk:
            if chunk.max_length:
                buffer.fill(chunk)
            in_buffer = group.chunk
        attend_group()
        if not group.starts:
            done, rest = group.through - group.first, group.last - group.first
            if done:
                end = output[group.first : group.through], None if lse is None else lse[group.first : group.through]
                kernels.merge(MergeArgs(end[0], *so_far.rows(0, done), *part.rows(0, done), end[1]))
            if done < rest:
                goes_on = so_far.rows(done, rest)
                kernels.merge(MergeArgs(goes_on.output, *goes_on, *part.rows(done, rest), goes_on.lse))


def _attend_all(
    call: Call,
    plan: PrefillPlan,
    weight: Weight,
    extents: Extents,
    workspace: torch.Tensor | None,
    keep_rows: bool,
    kernels: _Kernels,
) -> None:
    """Work through the chunks with all rows of q: the first result has the sinks, the others are merged into it."""
    chunks = _chunks_of(plan)
    output, lse, sinks = call.output, call.lse, call.sinks
    several, last = len(chunks) > 1, len(chunks) - 1
    rows = max((chunk.max_length for chunk in chunks), default=0)
    extents = extents._replace(rows=rows, partial=max(extents.total, 1) if several else 0)
    parts = extents.allocate(workspace, call.q.device)
    buffer = make_buffer(call, plan, weight, extents, parts)
    buffer.queries.enter(call)
    if several:
        so_far, part = (Partial.of(parts, name).rows(0, extents.total) for name in ("so_far", "part"))
    for i, chunk in enumerate(chunks):
        buffer.point(call, chunk)
        call.sinks = sinks if i == 0 else None
        if several:
            call.output, call.lse = so_far if i == 0 else part
        attend_chunk = kernels.ready(call)  # whatever is wrong is said before the first launch
        if i == 0:
            buffer.begin()
            if several and keep_rows:  # rows of no sequence: what is there, merged with nothing
                so_far.output.copy_(output)
                so_far.lse.zero_()
                part.lse.fill_(-math.inf)
        if chunk.max_length:
            buffer.fill(chunk)
        attend_chunk()
        if i:
            merged, merged_lse = (output, lse) if i == last else so_far
            kernels.merge(MergeArgs(merged, *so_far, *part, merged_lse))
    call.output, call.lse = output, lse


def _most_rows(cache: PagedKVCache) -> int:
    """Return the most rows of a page-padded batch that the tables can hold."""
    pages = cache.page_table.numel() if cache.page_indptr is None else cache.page_table.shape[0]
    return pages * cache.page_size


def _spoil_cut_sequences(call: Call, plan: PrefillPlan, kernels: _Kernels) -> None:
    """Write NaN for the sequences that the plan's tables did not hold to the end; the host does not know of any.

    For the output that is a merge in place with NaN, whose LSE is NaN for their rows and -inf for all others, which are
    thereby left alone whatever they are: no pass over the output is made.
    """
    output, lse = call.output, call.lse
    marks = plan.shared(("cut rows", output.shape[0]), lambda: _cut_rows(call, plan)).unsqueeze(1)
    so_far = torch.zeros((), dtype=torch.float32, device=output.device).expand(output.shape[:2])
    nothing = torch.full(output.shape[2:], math.nan, dtype=output.dtype, device=output.device).expand(output.shape)
    kernels.merge(MergeArgs(output, output, so_far, nothing, marks.expand(output.shape[:2]), None))
    if lse is not None:
        lse.masked_fill_(marks.isnan(), math.nan)


def _cut_rows(call: Call, plan: PrefillPlan) -> torch.Tensor:
    """Return NaN for rows of q whose sequences were cut, -inf for the others: f32 [T]."""
    assert isinstance(call.k_rope, PagedKVCache)
    offsets = call.valid_length
    held = plan.cache_offsets[-1] + plan.buffer_row_offsets[-1].diff()
    marks = torch.full_like(held, -math.inf, dtype=torch.float32)
    marks.masked_fill_(held < call.k_rope.total_lengths(offsets), math.nan)
    row = torch.arange(call.q.shape[0], dtype=torch.int32, device=offsets.device)
    # Rows before the first sequence are in place 0, those behind the last in place B + 1.
    return pad(marks, (1, 1), value=-math.inf)[torch.searchsorted(offsets, row, right=True)]


def _trace(
    output: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    cache: PagedKVCache,
    weight: Weight,
    input_row_offsets: torch.Tensor,
    mask: Mask,
    scale: float,
    plan: PrefillPlan | None,
    buffer_token_size: int,
    max_chunks: int | None,
    seq_lens_cpu: torch.Tensor | Sequence[int] | None,
    sinks: torch.Tensor | None,
    softcap: float,
    attention_dtype: torch.dtype | None,
    workspace: torch.Tensor | None,
    keep_rows: bool,
    target: str,
) -> None:
    """Put the call into a graph that is being traced, as one operator."""
    if not isinstance(weight, torch.Tensor):
        raise ArgumentError(
            "inside torch.compile weight must be a torch.Tensor; with a callable, call chunked_prefill outside, or "
            "gather, project and attend by the single functions"
        )
    if seq_lens_cpu is not None and not isinstance(seq_lens_cpu, torch.Tensor):
        seq_lens_cpu = torch.tensor(seq_lens_cpu, dtype=torch.int64, device="cpu")
    tables: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    total_rows, row_offsets_cpu = None, None
    if plan is not None:
        tables = plan.buffer_row_offsets, plan.cache_offsets, plan.buffer_lengths, plan.required_chunks
        buffer_token_size, total_rows = plan.buffer_token_size, plan.total_rows
        seq_lens_cpu, row_offsets_cpu = plan.seq_lens_cpu, plan.row_offsets_cpu
    torch.ops.mla.chunked_prefill(
        output, lse, workspace, q, *cache.operands, weight, input_row_offsets, *mask.operands, scale,
        *tables, buffer_token_size, total_rows, max_chunks, seq_lens_cpu, row_offsets_cpu, sinks, softcap, keep_rows,
        target, attention_dtype,
    )  # fmt: skip


def require_workspace(workspace: torch.Tensor, need: int, device: torch.device) -> None:
    """Raise unless a workspace is uint8 on `device`, contiguous, aligned and of at least `need` bytes."""
    require_tensor(workspace, "workspace", 1)
    require_dtype(workspace, "workspace", (torch.uint8,))
    require_device(workspace, "workspace", device)
    require_last_dim_contiguous(workspace, "workspace")
    if workspace.numel() < need:
        raise ArgumentError(f"workspace: this call needs {need} bytes, got {workspace.numel()}")
    if workspace.data_ptr() % 16:
        raise ArgumentError(f"workspace must begin on a multiple of 16 bytes, got {workspace.data_ptr():#x}")
