"""SGLang's cache as this library's pages: one slot a token, listed by request. SGLang itself is not needed."""

from __future__ import annotations

from typing import Any

import torch

from mla._check import require_shape, require_tensor
from mla.kv_cache import PagedKVCacheCollection


def cache_of_requests(
    kv_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    **keywords: Any,
) -> PagedKVCacheCollection:
    """View one layer of SGLang's MLA pool by its table of requests, without a copy of the pool.

    The rows of `req_to_token` that belong to the batch are copied, [B, columns] int32; nothing synchronises. Give a
    narrower view of the table where its columns are many more than the longest sequence.

    Parameters
    ----------
    kv_buffer : torch.Tensor
        [slots, 1, 576]: ``token_to_kv_pool.get_key_buffer(layer_id)``.
    req_to_token : torch.Tensor
        int32 [requests, columns]: the slot of each token of each request.
    req_pool_indices : torch.Tensor
        [B], int32 or int64: the row of each sequence of the batch.
    seq_lens : torch.Tensor
        [B]: tokens of each sequence, those of this step included; their slots are filled already.
    **keywords
        max_seq_length, max_cache_length, scales, quantization_granularity of `PagedKVCacheCollection`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        As `PagedKVCacheCollection.from_pages`.

    Examples
    --------
    An extend step; ``extend_start_loc`` with the number of tokens at its end is `input_row_offsets`::

        cache = cache_of_requests(kv_buffer, req_to_token, req_pool_indices, seq_lens)
        output = mla.chunked_prefill(q, cache, 0, kv_b_proj.weight, input_row_offsets, mla.CausalMask(), scale)
    """
    require_tensor(req_to_token, "req_to_token", 2)
    require_tensor(req_pool_indices, "req_pool_indices", 1)
    table = req_to_token.index_select(0, req_pool_indices)
    return PagedKVCacheCollection.from_pages(_slots(kv_buffer), table, seq_lens=seq_lens, **keywords)


def cache_of_slots(
    kv_buffer: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, **keywords: Any
) -> PagedKVCacheCollection:
    """View one layer of SGLang's MLA pool by the slot list that it makes for FlashInfer and Triton.

    Parameters
    ----------
    kv_buffer : torch.Tensor
        As in `cache_of_requests`.
    kv_indptr, kv_indices : torch.Tensor
        [B+1] and [nnz], int32: the slots of sequence b, this step's tokens included, are
        ``kv_indices[kv_indptr[b]:kv_indptr[b+1]]``.
    **keywords
        As in `cache_of_requests`; or cache_lengths or seq_lens [B], where the list is longer than the sequences.
    """
    return PagedKVCacheCollection.from_csr(_slots(kv_buffer), kv_indptr, kv_indices, **keywords)


def _slots(kv_buffer: torch.Tensor) -> torch.Tensor:
    """Return a pool as pages of one token: [slots, 1, width]."""
    require_tensor(kv_buffer, "kv_buffer", 3)
    require_shape(kv_buffer, "kv_buffer", (None, 1, None))
    return kv_buffer
