"""The prefill plan: which rows of the padded batch each fill of the K/V buffer holds.

The sequences, each padded to whole pages, are laid end to end and cut every ``buffer_token_size`` rows. With
``new[s]`` the new tokens of sequence s, N the buffer's rows and P the page size::

    A[s] = round_up(cached[s] + new[s], P)        S[s] = A[0] + ... + A[s-1]        E = S[B]
    buffer_row_offsets[c, s] = clamp(S[s] - c*N, 0, N)
    cache_offsets[c, s]      = clamp(c*N - S[s], 0, A[s])
    buffer_lengths[c]        = min(E - c*N, N) if c*N < E else -1
    required_chunks          = ceil(E / N)

Row r of chunk c belongs to the sequence s with ``buffer_row_offsets[c, s] <= r < buffer_row_offsets[c, s+1]``, at cache
position ``r - buffer_row_offsets[c, s] + cache_offsets[c, s]``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from mla._check import (
    INDEX_DTYPES,
    INT32_MAX,
    as_index,
    check_offsets,
    is_capturing,
    require_device,
    require_dtype,
    require_int,
    require_shape,
    require_tensor,
    signature,
)
from mla._launch import Stream, stream_scope, traced_target
from mla._repeat import repeating
from mla.dispatch import Memo, Runner, resolve
from mla.errors import ArgumentError, BufferOverflowError, DTypeError, ShapeError
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection
from mla.problem import Again, PlanArgs, Problem

if TYPE_CHECKING:
    from mla._chunk_groups import Groups
    from mla.target import Target

DEFAULT_MAX_CHUNKS = 16

_UINT32_OR_INT32 = (torch.uint32, torch.int32)
_runs = Memo()


class PlanChunk(NamedTuple):
    """One fill of the buffer, in the arguments that gather and prefill take."""

    number: int
    buffer_row_offsets: torch.Tensor  # [B+1]
    cache_offsets: torch.Tensor  # [B]
    buffer_length: int | torch.Tensor  # rows; an int32 [1] device tensor (-1: none) where the host does not know
    max_length: int  # host bound of buffer_length


@dataclass(slots=True, eq=False)
class PrefillPlan:
    """The tables of one step, shared by all layers.

    Attributes
    ----------
    buffer_row_offsets : torch.Tensor
        int32 [C, B+1]: where each sequence starts in the buffer, chunk by chunk.
    cache_offsets : torch.Tensor
        int32 [C, B]: cache position of the first row that each sequence has in the chunk.
    buffer_lengths : torch.Tensor
        int32 [C]: rows of each chunk; -1 where nothing is left.
    required_chunks : torch.Tensor
        int32 [1]: chunks that the batch needs, which may exceed C.
    buffer_token_size : int
        N, rows of the buffer.
    page_size : int
        Tokens a page.
    total_rows : int or None
        Rows of the page-padded batch where the host knows them: from ``seq_lens_cpu``, or after `check`.
    seq_lens_cpu, row_offsets_cpu : torch.Tensor or None
        [B] cached + new tokens and [B+1] cumulative new tokens where the host knows them: with both, `chunked_prefill`
        touches in each chunk the rows of that chunk's sequences alone.
    """

    buffer_row_offsets: torch.Tensor
    cache_offsets: torch.Tensor
    buffer_lengths: torch.Tensor
    required_chunks: torch.Tensor
    buffer_token_size: int
    page_size: int
    total_rows: int | None = None
    seq_lens_cpu: torch.Tensor | None = None
    row_offsets_cpu: torch.Tensor | None = None
    groups: dict[Hashable, Groups] = field(default_factory=dict, repr=False)  # kept by Groups.of
    captured: bool = field(default=False, repr=False)  # made while a graph was captured
    kept: dict[Hashable, torch.Tensor] = field(default_factory=dict, repr=False)  # see `shared`
    _lengths_and_required: torch.Tensor | None = field(default=None, repr=False)
    _chunks: tuple[int | None, tuple[PlanChunk, ...]] | None = field(default=None, repr=False)  # of this total_rows

    def __post_init__(self) -> None:
        for name in ("buffer_row_offsets", "cache_offsets", "buffer_lengths", "required_chunks"):
            table = getattr(self, name)
            require_dtype(table, name, (torch.int32,))
            if not table.is_contiguous():
                raise ShapeError(f"{name} must be contiguous, got strides {table.stride()}")

    def shared(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what follows from the tables, worked out once for all layers where the tables stay what they are.

        They do where the host knows the lengths, and in a graph in whose capture the plan was made: a replay writes
        them anew, and this as well. Tables that the host knows nothing of may be written again before the next call.
        """
        if self.total_rows is None and not (self.captured and is_capturing(self.buffer_lengths.device)):
            return make()
        value = self.kept.get(key)
        if value is None:
            value = self.kept[key] = make()
        return value

    @property
    def host_lengths(self) -> tuple[int, ...] | None:
        """Rows of each required chunk where the host knows them."""
        if self.total_rows is None:
            return None
        size = self.buffer_token_size
        return tuple(min(size, self.total_rows - start) for start in range(0, self.total_rows, size))

    @property
    def max_chunks(self) -> int:
        """C, rows of the tables."""
        return self.buffer_lengths.shape[0]

    @property
    def batch_size(self) -> int:
        """B, sequences of the step."""
        return self.cache_offsets.shape[1]

    def check(self) -> None:
        """Raise if the batch needs more chunks than the tables have. Synchronises once with the device.

        Afterwards the host knows the lengths, and `chunks` yields the required chunks only.

        Raises
        ------
        BufferOverflowError
            Naming needed and given.
        """
        tail = self._lengths_and_required
        if tail is None:
            tail = torch.cat((self.buffer_lengths, self.required_chunks))
        *lengths, required = tail.tolist()
        _require_chunks(required, self.max_chunks, self.buffer_token_size)
        self.total_rows = sum(lengths[:required])

    def chunks(self) -> Iterator[PlanChunk]:
        """Return the chunks to work through, without a sync.

        Where the host does not know how many are needed, these are all C; the length of each is then a device tensor,
        and the chunks past the last needed one are empty.
        """
        if self._chunks is None or self._chunks[0] != self.total_rows:
            lengths: Sequence[int | torch.Tensor] | None = self.host_lengths
            if lengths is None:
                lengths = self.buffer_lengths.split(1)
            tables = zip(lengths, self.buffer_row_offsets.unbind(), self.cache_offsets.unbind())  # noqa: B905
            size = self.buffer_token_size
            self._chunks = (
                self.total_rows,
                tuple(
                    PlanChunk(number, rows, offsets, length, length if isinstance(length, int) else size)
                    for number, (length, rows, offsets) in enumerate(tables)
                ),
            )
        return iter(self._chunks[1])


def generic_flare_mla_prefill_ragged_paged_plan(
    input_row_offsets: torch.Tensor,
    kv_collection: PagedKVCacheCollection,
    layer_idx: int,
    buffer_token_size: int,
    buffer_row_offsets: torch.Tensor,
    cache_offsets: torch.Tensor,
    buffer_lengths: torch.Tensor,
    *,
    required_chunks: torch.Tensor | None = None,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> None:
    """Write the prefill plan of a ragged batch over a paged cache into the caller's tables.

    One launch without a host sync; every element of every output is written when B > 0. With B = 0 the lengths become 0
    and the other tables are not touched. A batch that needs more than C chunks is cut after C: `required_chunks` tells.

    Parameters
    ----------
    input_row_offsets : torch.Tensor
        [B+1], cumulative new tokens; the first may be non-zero.
    kv_collection : PagedKVCacheCollection
        Its lengths and page size take part, its pages do not.
    layer_idx : int
        Layer of `kv_collection`.
    buffer_token_size : int
        N >= 1, rows of the K/V buffer.
    buffer_row_offsets : torch.Tensor
        Output [C, B+1], uint32 or int32, contiguous.
    cache_offsets : torch.Tensor
        Output [C, B], uint32 or int32, contiguous.
    buffer_lengths : torch.Tensor
        Output [C], int32, contiguous.
    required_chunks : torch.Tensor, optional
        Output [1], int32: ``ceil(E / N)``, whether or not that fits in C.
    target : str or Target
        Where it runs.
    stream : torch.cuda.Stream or int, optional
        torch's current stream when None.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        Before anything is launched. Unordered offsets, and tables too small for the lengths, are found where that is
        free, on CPU tensors.
    """
    if not isinstance(kv_collection, PagedKVCacheCollection):
        raise DTypeError(f"kv_collection must be a PagedKVCacheCollection, got {type(kv_collection).__name__}")
    _write_plan(
        input_row_offsets,
        kv_collection.layer(layer_idx),
        buffer_token_size,
        (buffer_row_offsets, cache_offsets, buffer_lengths, required_chunks),
        target,
        stream=stream,
    )


def write_plan(
    input_row_offsets: torch.Tensor,
    cache: PagedKVCache,
    buffer_token_size: int,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    target: str | Target = "gpu",
    *,
    stream: Stream | None = None,
) -> Again | None:
    """Write the plan of one layer into (buffer_row_offsets, cache_offsets, buffer_lengths, required_chunks).

    See `mla._repeat.repeating` for what is returned.
    """
    if torch.compiler.is_compiling():
        torch.ops.mla.plan(
            *tables, input_row_offsets, *cache.operands, buffer_token_size, traced_target(target, stream)
        )
        return None
    key = (cache.signature, target, *signature(input_row_offsets, *tables))
    run = _runs.get(key)
    if run is None:
        run = _runs.remember(key, _validated(input_row_offsets, cache, *tables, target))
    check_buffer_token_size(buffer_token_size)
    buffer_row_offsets, cache_offsets, buffer_lengths, required_chunks = tables
    device = buffer_lengths.device
    if is_capturing(device):
        cache.check_capturable()
    offsets = as_index(input_row_offsets, "input_row_offsets", cache.batch_size + 1, device)
    if input_row_offsets.device.type == "cpu":
        check_offsets(input_row_offsets, "input_row_offsets")
        if device.type == "cpu":
            cache.check_indices(offsets)
    with stream_scope(device, stream):
        again = run(
            PlanArgs(
                offsets,
                cache,
                buffer_token_size,
                buffer_row_offsets.view(torch.int32),
                cache_offsets.view(torch.int32),
                buffer_lengths,
                required_chunks,
            )
        )
    return again if offsets is input_row_offsets else None


_write_plan = repeating(write_plan)


def prefill_plan(
    input_row_offsets: torch.Tensor,
    kv_collection: PagedKVCacheCollection,
    layer_idx: int,
    buffer_token_size: int,
    *,
    max_chunks: int | None = None,
    seq_lens_cpu: torch.Tensor | Sequence[int] | None = None,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> PrefillPlan:
    """Allocate the tables of a plan and fill them.

    Parameters
    ----------
    max_chunks : int, optional
        C, rows of the tables. When missing, as many as `seq_lens_cpu` needs, else 16.
    seq_lens_cpu : torch.Tensor or sequence of int, optional
        [B] on the host: cached + new tokens of each sequence, trusted to equal what the device has. With them overflow
        is found at once; without them `PrefillPlan.check` finds it, by one sync. They are refused while a graph is
        captured. With `input_row_offsets` on the CPU as well, `chunked_prefill` moves the fewest bytes.

    The other parameters, and the rest of what it raises, are those of `generic_flare_mla_prefill_ragged_paged_plan`.

    Raises
    ------
    BufferOverflowError
        `seq_lens_cpu` needs more than `max_chunks`.
    """
    if not isinstance(kv_collection, PagedKVCacheCollection):
        raise DTypeError(f"kv_collection must be a PagedKVCacheCollection, got {type(kv_collection).__name__}")
    cache = kv_collection.layer(layer_idx)
    return make_plan(input_row_offsets, cache, buffer_token_size, max_chunks, seq_lens_cpu, target, stream)


def make_plan(
    input_row_offsets: torch.Tensor,
    cache: PagedKVCache,
    buffer_token_size: int,
    max_chunks: int | None = None,
    seq_lens_cpu: torch.Tensor | Sequence[int] | None = None,
    target: str | Target = "gpu",
    stream: Stream | None = None,
    row_offsets_cpu: torch.Tensor | None = None,
) -> PrefillPlan:
    """Return the plan of one layer's tables and lengths; `row_offsets_cpu` is what `input_row_offsets` holds."""
    check_buffer_token_size(buffer_token_size)
    if max_chunks is not None:
        require_int(max_chunks, "max_chunks")
        if max_chunks < 1:
            raise ArgumentError(f"max_chunks must be at least 1, got {max_chunks}")
    batch_size, device = cache.batch_size, cache.lengths.device
    total_rows, seq_lens = None, None
    if seq_lens_cpu is not None:
        seq_lens = _host_lengths(seq_lens_cpu, batch_size, device)
        total_rows = int((-(-seq_lens // cache.page_size)).sum()) * cache.page_size
        required = -(-total_rows // buffer_token_size)
        if max_chunks is not None:
            _require_chunks(required, max_chunks, buffer_token_size)
        else:
            max_chunks = max(1, required)
        if row_offsets_cpu is None and input_row_offsets.device.type == "cpu":
            row_offsets_cpu = input_row_offsets
    elif max_chunks is None:
        max_chunks = DEFAULT_MAX_CHUNKS
    sizes = (max_chunks * (batch_size + 1), max_chunks * batch_size, max_chunks + 1)
    make = torch.empty if batch_size else torch.zeros
    row_offsets, offsets, tail = make(sum(sizes), dtype=torch.int32, device=device).split_with_sizes(sizes)
    plan = PrefillPlan(
        buffer_row_offsets=row_offsets.view(max_chunks, batch_size + 1),
        cache_offsets=offsets.view(max_chunks, batch_size),
        buffer_lengths=tail[:max_chunks],
        required_chunks=tail[max_chunks:],
        buffer_token_size=buffer_token_size,
        page_size=cache.page_size,
        total_rows=total_rows,
        seq_lens_cpu=seq_lens,
        row_offsets_cpu=None if seq_lens is None or row_offsets_cpu is None else row_offsets_cpu.clone(),
        captured=is_capturing(device),
        _lengths_and_required=tail,
    )
    tables = (plan.buffer_row_offsets, plan.cache_offsets, plan.buffer_lengths, plan.required_chunks)
    _write_plan(input_row_offsets, cache, buffer_token_size, tables, target, stream=stream)
    if seq_lens is not None and device.type == input_row_offsets.device.type == "cpu":
        actual = cache.total_lengths(input_row_offsets)
        if not torch.equal(seq_lens, actual):
            raise ArgumentError(
                f"seq_lens_cpu is {seq_lens.tolist()}, but the cached and new tokens are {actual.tolist()}"
            )
    return plan


def _validated(
    input_row_offsets: torch.Tensor,
    cache: PagedKVCache,
    buffer_row_offsets: torch.Tensor,
    cache_offsets: torch.Tensor,
    buffer_lengths: torch.Tensor,
    required_chunks: torch.Tensor | None,
    target: str | Target,
) -> Runner:
    """Check what depends on shapes, dtypes and devices alone, and choose the implementation."""
    require_tensor(input_row_offsets, "input_row_offsets", 1)
    batch_size = cache.batch_size
    if input_row_offsets.shape[0] != batch_size + 1:
        raise ShapeError(
            f"input_row_offsets must have one entry more than the cache's lengths, got shapes "
            f"{tuple(input_row_offsets.shape)} and {(batch_size,)}"
        )
    require_tensor(buffer_lengths, "buffer_lengths", 1)
    chunks = buffer_lengths.shape[0]
    if chunks < 1:
        raise ShapeError("buffer_lengths must have at least one row, got shape (0,)")
    why = f"buffer_lengths has shape {(chunks,)} and the batch {batch_size} sequences"
    outputs = (
        (buffer_row_offsets, "buffer_row_offsets", (chunks, batch_size + 1), _UINT32_OR_INT32),
        (cache_offsets, "cache_offsets", (chunks, batch_size), _UINT32_OR_INT32),
        (buffer_lengths, "buffer_lengths", (chunks,), (torch.int32,)),
        (required_chunks, "required_chunks", (1,), (torch.int32,)),
    )
    device = cache.lengths.device
    for tensor, name, shape, dtypes in outputs:
        if tensor is None and name == "required_chunks":
            continue
        require_tensor(tensor, name, len(shape))
        assert tensor is not None
        require_shape(tensor, name, shape, why)
        require_dtype(tensor, name, dtypes)
        require_device(tensor, name, device)
        if not tensor.is_contiguous():
            raise ShapeError(
                f"{name} must be contiguous, got strides {tensor.stride()} for shape {tuple(tensor.shape)}"
            )
    return resolve(Problem("plan", "int32", "int32", page_size=cache.page_size, alignment=4), target, device)


def check_buffer_token_size(buffer_token_size: int) -> None:
    """Raise unless N is an int that the tables can hold."""
    require_int(buffer_token_size, "buffer_token_size")
    if not 1 <= buffer_token_size <= INT32_MAX:
        raise ArgumentError(f"buffer_token_size must be from 1 to {INT32_MAX}, got {buffer_token_size}")


def _host_lengths(seq_lens_cpu: torch.Tensor | Sequence[int], batch_size: int, device: torch.device) -> torch.Tensor:
    """Return the lengths as int64 [B] on the CPU, checked."""
    if torch.compiler.is_compiling():
        raise ArgumentError(
            "seq_lens_cpu is read on the host, which torch.compile does not trace: make the plan outside, or give "
            "seq_lens_cpu to chunked_prefill"
        )
    if is_capturing(device):
        raise ArgumentError(
            "seq_lens_cpu fixes the number of chunks, and a graph is being captured: a replay would not see new "
            "lengths. Give max_chunks instead"
        )
    if isinstance(seq_lens_cpu, torch.Tensor):
        require_tensor(seq_lens_cpu, "seq_lens_cpu", 1)
        require_device(seq_lens_cpu, "seq_lens_cpu", torch.device("cpu"))
        require_dtype(seq_lens_cpu, "seq_lens_cpu", INDEX_DTYPES)
    else:
        try:
            seq_lens_cpu = [operator.index(length) for length in seq_lens_cpu]
        except TypeError:
            raise DTypeError(f"seq_lens_cpu must be a tensor or a sequence of int, got {seq_lens_cpu!r}") from None
    # A copy: engines write the next step into the same memory.
    lengths = torch.as_tensor(seq_lens_cpu, dtype=torch.int64, device="cpu").clone()
    if lengths.shape != (batch_size,):
        raise ShapeError(f"seq_lens_cpu has {lengths.numel()} entries, the cache's lengths have {batch_size}")
    if batch_size and int(lengths.min()) < 0:
        raise ArgumentError(f"seq_lens_cpu must not be negative, got {int(lengths.min())}")
    return lengths


def _require_chunks(required: int, given: int, buffer_token_size: int) -> None:
    if required > given:
        raise BufferOverflowError(
            f"the batch needs {required} chunks of {buffer_token_size} tokens, but the plan has {given}; "
            "raise max_chunks or buffer_token_size"
        )
