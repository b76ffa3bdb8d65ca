"""A transformers cache that keeps latents in pages, and attention straight from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from mla.chunked import chunked_prefill
from mla.errors import ArgumentError, BufferOverflowError, ShapeError, UnsupportedError
from mla.gather import Weight
from mla.integrations import target_of
from mla.integrations.transformers.step import Step, query_rows
from mla.kv_cache import PagedKVCacheCollection
from mla.plan import PrefillPlan, prefill_plan
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM


@dataclass(frozen=True)
class _Batch:
    """The tables of one forward pass, shared by all layers."""

    collection: PagedKVCacheCollection
    input_row_offsets: torch.Tensor  # [B+1]
    plan: PrefillPlan
    cached: int
    new: int
    attention_dtype: torch.dtype | None


class PagedLatents:
    """Latents of one layer in their pages; stands for key and value between the cache and the attention function."""

    def __init__(self, batch: _Batch, layer_idx: int) -> None:
        self.batch = batch
        self.layer_idx = layer_idx

    @property
    def length(self) -> int:
        """Keys of each sequence."""
        return self.batch.cached + self.batch.new

    @property
    def shape(self) -> torch.Size:
        """Raise: a model that asks for it is about to project all keys up."""
        raise UnsupportedError(
            "a LatentCache needs mla.integrations.transformers.use_latent_cache(model), and the attention that it sets"
        )


class LatentCache(Cache):
    """Past tokens of a DeepSeek-V2/V3 model as 576 numbers a token and layer, in pages of one `PagedKVCacheCollection`.

    For a model that `use_latent_cache` has prepared. Every sequence owns the pages of `max_length` tokens. Padding
    tokens are cached too, as transformers' own caches do, and hidden by the mask.

    Parameters
    ----------
    config : PretrainedConfig
        The model's: kv_lora_rank 512 and qk_rope_head_dim 64.
    batch_size : int
    max_length : int
        Tokens that a sequence may come to have.
    page_size : int
        Tokens a page.
    dtype : torch.dtype
        That of the model's activations; or float8_e4m3fn, quantised with one scale for each 128 columns.
    device : torch.device
    buffer_token_size : int
        Rows that are projected up at a time; see `mla.chunked_prefill`.
    attention_dtype : torch.dtype, optional
        As `mla.chunked_prefill` takes it: float8_e4m3fn for attention in fp8, in a bfloat16 model.

    Raises
    ------
    ShapeError
        The config's dims are others.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        batch_size: int,
        max_length: int,
        *,
        page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        buffer_token_size: int = 16384,
        attention_dtype: torch.dtype | None = None,
    ) -> None:
        dims = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
        if dims != (KV_LORA_RANK, QK_ROPE_HEAD_DIM):
            raise ShapeError(
                f"config must have (kv_lora_rank, qk_rope_head_dim) = {(KV_LORA_RANK, QK_ROPE_HEAD_DIM)}, got {dims}"
            )
        for name, extent in (("batch_size", batch_size), ("max_length", max_length)):
            if extent < 1:
                raise ArgumentError(f"{name} must be at least 1, got {extent}")
        pages = -(-max_length // page_size)
        layers = config.num_hidden_layers
        self.max_length = max_length
        self.buffer_token_size = buffer_token_size
        self.attention_dtype = attention_dtype
        self.pages = PagedKVCacheCollection.allocate(batch_size * pages, page_size, layers, dtype=dtype, device=device)
        self._table = torch.arange(batch_size * pages, dtype=torch.int32, device=device).view(batch_size, pages)
        self._batch: _Batch | None = None
        super().__init__(layers=[_LatentLayer(self, i) for i in range(layers)])

    def batch_of(self, cached: int, new: int) -> _Batch:
        """Return the tables of a step of `new` tokens behind `cached` ones in every sequence; made once a step."""
        batch = self._batch
        if batch is None or (batch.cached, batch.new) != (cached, new):
            if cached + new > self.max_length:
                raise BufferOverflowError(
                    f"the cache holds max_length {self.max_length} tokens a sequence, got {cached} + {new}"
                )
            size, device = self._table.shape[0], self._table.device
            lengths = torch.full((size,), cached, dtype=torch.int32, device=device)
            collection = self.pages.with_batch(lengths, self._table, new, cached + new)
            offsets = torch.arange(size + 1, dtype=torch.int32, device=device) * new
            plan = prefill_plan(
                offsets,
                collection,
                0,
                self.buffer_token_size,
                seq_lens_cpu=[cached + new] * size,
                target=target_of(device),
            )
            self._batch = batch = _Batch(collection, offsets, plan, cached, new, self.attention_dtype)
        return batch


class _LatentLayer(CacheLayerMixin):
    """One layer: the length is its own, the pages are the cache's."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: LatentCache, layer_idx: int) -> None:
        super().__init__()
        self._cache = cache
        self._layer_idx = layer_idx
        self._length = 0
        self.batch_size = cache._table.shape[0]

    def update(  # type: ignore[override]  # not tensors, but what stands for them
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[PagedLatents, PagedLatents]:
        """Store latents [B, 1, S, 512] and roped keys [B, 1, S, 64] behind the cached ones."""
        size, _, new, _ = key_states.shape
        if size != self.batch_size or (key_states.shape[-1], value_states.shape[-1]) != (
            KV_LORA_RANK,
            QK_ROPE_HEAD_DIM,
        ):
            raise ShapeError(
                f"a LatentCache for {self.batch_size} sequences takes latents (B, 1, S, {KV_LORA_RANK}) and roped keys "
                f"(B, 1, S, {QK_ROPE_HEAD_DIM}), got {tuple(key_states.shape)} and {tuple(value_states.shape)}"
            )
        batch = self._cache.batch_of(self._length, new)
        batch.collection.store(
            self._layer_idx,
            batch.input_row_offsets,
            key_states.reshape(size * new, KV_LORA_RANK),
            value_states.reshape(size * new, QK_ROPE_HEAD_DIM),
            target=target_of(key_states.device),
        )
        self._length += new
        latents = PagedLatents(batch, self._layer_idx)
        return latents, latents

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pages are there."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys of a step and the position of the first."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens cached in every sequence."""
        return self._length

    def get_max_length(self) -> int:
        """Return the tokens that a sequence may have."""
        return self._cache.max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; the number is negative, or 0."""
        if not -self._length <= tokens_to_remove <= 0:
            raise ArgumentError(f"tokens_to_remove must be from {-self._length} to 0, got {tokens_to_remove}")
        self._length += tokens_to_remove

    def reset(self) -> None:
        """Forget all tokens."""
        self._length = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refuse: sequences own their pages."""
        raise UnsupportedError("a LatentCache keeps its sequences in order; beam search needs a DynamicCache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse, as `reorder_cache`."""
        self.reorder_cache(torch.arange(self.batch_size))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refuse, as `reorder_cache`."""
        self.reorder_cache(indices)


def attend_paged(
    module: torch.nn.Module, query: torch.Tensor, latents: PagedLatents, step: Step, scaling: float
) -> torch.Tensor:
    """Attend from [B, H, S, q_depth] to the latents in their pages; return [B, S, H, dv]."""
    size, heads, new, _ = query.shape
    batch = latents.batch
    output = chunked_prefill(
        query_rows(query),
        batch.collection,
        latents.layer_idx,
        _weight_of(module.kv_b_proj, query.dtype),
        batch.input_row_offsets,
        step.mask,
        scaling,
        plan=batch.plan,
        attention_dtype=batch.attention_dtype,
        target=target_of(query.device),
    )
    assert isinstance(output, torch.Tensor)
    return output.view(size, new, heads, -1)


def _weight_of(projection: Any, dtype: torch.dtype) -> Weight:
    """Return the weight of a plain linear, or the module itself where it is another kind, such as a quantised one."""
    plain = type(projection) is torch.nn.Linear and projection.bias is None and projection.weight.dtype == dtype
    return projection.weight if plain else projection
