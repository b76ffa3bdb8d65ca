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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from mla._check import (
    INT32_MAX,
    as_index,
    check_offsets,
    require_device,
    require_dtype,
    require_shape,
    require_tensor,
    signature,
)
from mla._launch import Stream, stream_scope
from mla.dispatch import Memo, Runner, resolve
from mla.errors import ArgumentError, BufferOverflowError, DTypeError, ShapeError
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection
from mla.problem import PlanArgs, Problem

if TYPE_CHECKING:
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
    host_lengths : tuple of int or None
        Rows of each required chunk where the host knows them: from ``seq_lens_cpu``, or after `check`.
    """

    buffer_row_offsets: torch.Tensor
    cache_offsets: torch.Tensor
    buffer_lengths: torch.Tensor
    required_chunks: torch.Tensor
    buffer_token_size: int
    page_size: int
    host_lengths: tuple[int, ...] | None
    _lengths_and_required: torch.Tensor = field(repr=False)

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
        *lengths, required = self._lengths_and_required.tolist()
        _require_chunks(required, self.max_chunks, self.buffer_token_size)
        self.host_lengths = tuple(lengths[:required])

    def chunks(self) -> Iterator[PlanChunk]:
        """Yield the chunks to work through, without a sync.

        Where the host does not know how many are needed, these are all C; the length of each is then a device tensor,
        and the chunks past the last needed one are empty.
        """
        known = self.host_lengths
        for c in range(self.max_chunks if known is None else len(known)):
            yield PlanChunk(
                c,
                self.buffer_row_offsets[c],
                self.cache_offsets[c],
                self.buffer_lengths[c : c + 1] if known is None else known[c],
                self.buffer_token_size if known is None else known[c],
            )


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
    cache = kv_collection.layer(layer_idx)
    outputs = (buffer_row_offsets, cache_offsets, buffer_lengths)
    key = (cache.signature, target, *signature(input_row_offsets, *outputs, required_chunks))
    run = _runs.get(key)
    if run is None:
        run = _runs.remember(key, _validated(input_row_offsets, cache, *outputs, required_chunks, target))
    _check_buffer_token_size(buffer_token_size)
    device = buffer_lengths.device
    offsets = as_index(input_row_offsets, "input_row_offsets", cache.batch_size + 1, device)
    if input_row_offsets.device.type == "cpu":
        check_offsets(input_row_offsets, "input_row_offsets")
        if device.type == "cpu":
            cache.check_indices(offsets)
    with stream_scope(device, stream):
        run(
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
        is found at once; without them `PrefillPlan.check` finds it, by one sync.

    The other parameters, and the rest of what it raises, are those of `generic_flare_mla_prefill_ragged_paged_plan`.

    Raises
    ------
    BufferOverflowError
        `seq_lens_cpu` needs more than `max_chunks`.
    """
    if not isinstance(kv_collection, PagedKVCacheCollection):
        raise DTypeError(f"kv_collection must be a PagedKVCacheCollection, got {type(kv_collection).__name__}")
    _check_buffer_token_size(buffer_token_size)
    if max_chunks is not None and max_chunks < 1:
        raise ArgumentError(f"max_chunks must be at least 1, got {max_chunks}")
    cache = kv_collection.layer(layer_idx)
    batch_size, page_size = cache.batch_size, cache.page_size
    host_lengths = None
    if seq_lens_cpu is not None:
        seq_lens = _as_list(seq_lens_cpu, batch_size)
        host_lengths = _chunk_lengths(seq_lens, page_size, buffer_token_size)
        if max_chunks is not None:
            _require_chunks(len(host_lengths), max_chunks, buffer_token_size)
        else:
            max_chunks = max(1, len(host_lengths))
    elif max_chunks is None:
        max_chunks = DEFAULT_MAX_CHUNKS
    sizes = (max_chunks * (batch_size + 1), max_chunks * batch_size, max_chunks + 1)
    make = torch.empty if batch_size else torch.zeros
    row_offsets, offsets, tail = make(sum(sizes), dtype=torch.int32, device=cache.lengths.device).split(sizes)
    plan = PrefillPlan(
        buffer_row_offsets=row_offsets.view(max_chunks, batch_size + 1),
        cache_offsets=offsets.view(max_chunks, batch_size),
        buffer_lengths=tail[:max_chunks],
        required_chunks=tail[max_chunks:],
        buffer_token_size=buffer_token_size,
        page_size=page_size,
        host_lengths=host_lengths,
        _lengths_and_required=tail,
    )
    generic_flare_mla_prefill_ragged_paged_plan(
        input_row_offsets,
        kv_collection,
        layer_idx,
        buffer_token_size,
        plan.buffer_row_offsets,
        plan.cache_offsets,
        plan.buffer_lengths,
        required_chunks=plan.required_chunks,
        target=target,
        stream=stream,
    )
    if seq_lens_cpu is not None and cache.lengths.device.type == input_row_offsets.device.type == "cpu":
        actual = cache.total_lengths(input_row_offsets).tolist()
        if seq_lens != actual:
            raise ArgumentError(f"seq_lens_cpu is {seq_lens}, but the cached and new tokens are {actual}")
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


def _check_buffer_token_size(buffer_token_size: int) -> None:
    if not isinstance(buffer_token_size, int):
        raise DTypeError(f"buffer_token_size must be an int, got {type(buffer_token_size).__name__}")
    if not 1 <= buffer_token_size <= INT32_MAX:
        raise ArgumentError(f"buffer_token_size must be from 1 to {INT32_MAX}, got {buffer_token_size}")


def _as_list(seq_lens: torch.Tensor | Sequence[int], batch_size: int) -> list[int]:
    if isinstance(seq_lens, torch.Tensor):
        require_tensor(seq_lens, "seq_lens_cpu", 1)
        require_device(seq_lens, "seq_lens_cpu", torch.device("cpu"))
        seq_lens = seq_lens.tolist()
    result = list(seq_lens)
    if len(result) != batch_size:
        raise ShapeError(f"seq_lens_cpu has {len(result)} entries, the cache's lengths have {batch_size}")
    if result and min(result) < 0:
        raise ArgumentError(f"seq_lens_cpu must not be negative, got {min(result)}")
    return result


def _chunk_lengths(seq_lens: list[int], page_size: int, buffer_token_size: int) -> tuple[int, ...]:
    total = sum(-(-length // page_size) * page_size for length in seq_lens)
    return tuple(min(buffer_token_size, total - start) for start in range(0, total, buffer_token_size))


def _require_chunks(required: int, given: int, buffer_token_size: int) -> None:
    if required > given:
        raise BufferOverflowError(
            f"the batch needs {required} chunks of {buffer_token_size} tokens, but the plan has {given}; "
            "raise max_chunks or buffer_token_size"
        )
