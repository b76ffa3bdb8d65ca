"""Everything that a model will launch, compiled and loaded before the first request."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from mla import dispatch
from mla._check import FP8_DTYPES
from mla.chunked import chunked_prefill
from mla.errors import ArgumentError, DeviceError, ShapeError
from mla.kv_cache import PagedKVCacheCollection
from mla.masks import CausalMask, Mask, as_mask
from mla.merge import merge_attn_states
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM, SUPPORTED_DIMS
from mla.target import Target


def warmup(
    num_heads: int,
    *,
    q_depth: int = 192,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    quantization_granularity: int = 128,
    page_size: int = 64,
    masks: Sequence[Mask] | None = None,
    sinks: bool = False,
    softcap: float = 0.0,
    attention_dtype: torch.dtype | None = None,
    target: str | Target = "gpu",
    device: torch.device | str | None = None,
) -> None:
    """Compile and load what the steps of a model launch, by making one tiny step of each kind.

    Those kinds are: store, plan, gather, projection and attention in one chunk and in several, with LSE and without,
    and the merge of two results. A later step of the same kind compiles nothing, whatever its lengths are; tensors
    whose addresses or strides are not multiples of 16 bytes are another kind, as are page lists (CSR).

    Parameters
    ----------
    num_heads : int
        Query heads of this rank.
    q_depth : int
        192 or 256.
    dtype : torch.dtype
        Of queries, weights and output.
    cache_dtype : torch.dtype, optional
        Of the paged cache; `dtype` when missing, or an fp8 dtype.
    quantization_granularity : int
        Of an fp8 cache.
    page_size : int
        Tokens a page.
    masks : sequence of Mask, optional
        ``[CausalMask()]`` when missing. Of captured tensors and biases only form and dtype count.
    sinks : bool
        Whether the model has attention sinks.
    softcap : float
    attention_dtype : torch.dtype, optional
        As `mla.chunked_prefill` takes it.
    target : str or Target
    device : torch.device or str, optional
        The current device of the target when missing.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError, DeviceError, UnsupportedError, CompileError
        What the first request would have met.
    """
    dims = next((dims for dims in SUPPORTED_DIMS if dims[0] == q_depth), None)
    if dims is None:
        raise ShapeError(f"q_depth must be one of {', '.join(str(d) for d, _ in SUPPORTED_DIMS)}, got {q_depth}")
    if num_heads < 1:
        raise ArgumentError(f"num_heads must be at least 1, got {num_heads}")
    place = dispatch.device_here(target) if device is None else torch.device(device)
    if place is None:
        raise DeviceError(f"target {str(target)!r} has no device on this machine; `mla doctor` shows why")
    for mask in [CausalMask()] if masks is None else masks:
        _step(
            as_mask(mask, "masks"), num_heads, dims, dtype, cache_dtype or dtype, quantization_granularity, page_size,
            torch.zeros(num_heads, dtype=torch.float32, device=place) if sinks else None, softcap, attention_dtype,
            target, place,
        )  # fmt: skip


@torch.no_grad()
def _step(
    mask: Mask,
    num_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    granularity: int,
    page_size: int,
    sinks: torch.Tensor | None,
    softcap: float,
    attention_dtype: torch.dtype | None,
    target: str | Target,
    device: torch.device,
) -> None:
    """Make one step of a batch in which every sequence has three pages, and a few new tokens."""
    batch, new, scale = _batch_of(mask), min(4, page_size), dims[0] ** -0.5
    total, pages = batch * new, 3 * batch
    cache = PagedKVCacheCollection.allocate(
        pages, page_size, dtype=cache_dtype, device=device,
        quantization_granularity=granularity if cache_dtype in FP8_DTYPES else None,
        cache_lengths=torch.full((batch,), 3 * page_size - new, dtype=torch.int32, device=device),
        lookup_table=torch.arange(pages, dtype=torch.int32, device=device).view(batch, 3),
    )  # fmt: skip
    offsets = torch.arange(0, total + 1, new, dtype=torch.int32, device=device)
    zeros = functools.partial(torch.zeros, dtype=dtype, device=device)
    cache.store(0, offsets, zeros(total, KV_LORA_RANK), zeros(total, QK_ROPE_HEAD_DIM), target=target)
    q = zeros(total, num_heads, dims[0])
    weight = zeros(num_heads * (dims[0] - QK_ROPE_HEAD_DIM + dims[1]), KV_LORA_RANK)
    for rows, chunks in ((page_size * pages, 1), (page_size, pages)):
        for return_lse in (False, True):
            chunked_prefill(
                q, cache, 0, weight, offsets, mask, scale, buffer_token_size=rows, max_chunks=chunks,
                return_lse=return_lse, sinks=sinks, softcap=softcap, attention_dtype=attention_dtype,
                target=target,
            )  # fmt: skip
    part, lse = zeros(total, num_heads, dims[1]), torch.zeros(total, num_heads, dtype=torch.float32, device=device)
    for merged_lse in (None, lse):
        merge_attn_states(part, part, lse, part, lse, merged_lse, target=target)


def _batch_of(mask: Mask) -> int:
    """Return the batch size that the tensors of a mask are made for; 1 where they say nothing."""
    indexed = zip(mask.captures, mask.program.captures, strict=True)
    by_sequence = [*(tensor for tensor, index in indexed if index == "b"), *mask.biases]
    return by_sequence[0].shape[0] if by_sequence else 1
