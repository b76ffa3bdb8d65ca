"""The paged KV cache: all layers' pages and the tables of one batch.

Nothing is copied: a collection holds views of the caller's tensors, whose page and token strides are read from them.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mla._check import (
    FP8_DTYPES,
    alignment,
    as_index,
    check_non_negative,
    check_offsets,
    is_capturing,
    require_int,
    require_tensor,
    short_dtype,
)
from mla.dispatch import Memo
from mla.errors import ArgumentError, DeviceError
from mla.kv_layouts import GRANULARITIES, ROW_DIM, CacheViews, as_blocks, split_blocks
from mla.page_tables import check_live_pages, csr_lengths, make_tables

if TYPE_CHECKING:
    from mla.target import Target

_forms = Memo()
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PagedKVCache:
    """One layer of the cache with the batch's tables, as kernels see it; made by `PagedKVCacheCollection.layer`.

    Token t of sequence b lies in slot ``t % page_size`` of page ``page_table[b, t // page_size]``, or
    ``page_table[page_indptr[b] + t // page_size]`` in the CSR form.

    Attributes
    ----------
    latent, rope : torch.Tensor
        [num_pages, P, 512] and [num_pages, P, 64], strided views; only the last dimension is contiguous.
    page_table : torch.Tensor
        int32 [B, cols] with any row stride; [nnz] where `page_indptr` is given.
    page_indptr : torch.Tensor or None
        int32 [B+1].
    lengths : torch.Tensor
        int32 [B]: tokens cached before this step, or with this step's where `lengths_include_new`.
    scales : torch.Tensor or None
        f32 [num_pages, P, n] of an fp8 cache: latent column d has scale ``d // quantization_granularity``, an fp8 rope
        column d has scale ``(512 + d) // quantization_granularity``.
    max_seq_length, max_cache_length : int
        Upper bounds of the new and of all tokens of a sequence.
    dtypes : str
        ``bf16``, ``fp16``, ``fp32``, ``fp8``, ``fp8_fnuz``, or ``fp8+bf16_rope`` and ``fp8_fnuz+bf16_rope``.
    alignment : int
        The largest power of two up to 16 that divides the base and the outer strides of latent and rope, in bytes.
    signature : tuple
        All that a kernel is chosen by, hashable.
    copied : str
        Why a captured graph would not see new tables: they were converted when the cache was made. Empty where kernels
        read the caller's own memory.
    form : int
        A number that layers share whose tensors have the same shapes, strides and dtypes and whose bounds are equal; 0
        where the layer was made while `torch.compile` traced.
    """

    latent: torch.Tensor
    rope: torch.Tensor
    page_table: torch.Tensor
    page_indptr: torch.Tensor | None
    lengths: torch.Tensor
    lengths_include_new: bool
    scales: torch.Tensor | None
    quantization_granularity: int
    page_size: int
    num_pages: int
    batch_size: int
    max_seq_length: int
    max_cache_length: int
    dtypes: str
    alignment: int
    signature: tuple[Any, ...]
    copied: str
    form: int

    @classmethod
    def of(
        cls,
        latent: torch.Tensor,
        rope: torch.Tensor,
        scales: torch.Tensor | None,
        quantization_granularity: int,
        page_table: torch.Tensor,
        page_indptr: torch.Tensor | None,
        lengths: torch.Tensor,
        lengths_include_new: bool,
        max_seq_length: int,
        max_cache_length: int,
        copied: str = "",
    ) -> PagedKVCache:
        """Make a layer of tensors that are in their canonical form; the order is that of `operands`."""
        num_pages, page_size, _ = latent.shape
        batch_size, device = lengths.shape[0], latent.device
        latent_dtype, rope_dtype = short_dtype(latent.dtype), short_dtype(rope.dtype)
        dtypes = latent_dtype if rope_dtype == latent_dtype else f"{latent_dtype}+{rope_dtype}_rope"
        # While a call is traced there are no addresses, and nothing asks for them.
        traced = torch.compiler.is_compiling()
        aligned_to = 1 if traced else alignment(latent, rope)
        signature = (
            dtypes, page_size, page_indptr is not None, quantization_granularity, aligned_to, batch_size,
            lengths_include_new, device,
        )  # fmt: skip
        form = 0
        if not traced:
            tensors = (latent, rope, scales, page_table, page_indptr, lengths)
            looks = [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]
            key = (*looks, signature, max_seq_length, max_cache_length)
            form = _forms.get(key) or _forms.remember(key, next(_numbers))
        return cls(
            latent,
            rope,
            page_table,
            page_indptr,
            lengths,
            lengths_include_new,
            scales,
            quantization_granularity,
            page_size,
            num_pages,
            batch_size,
            max_seq_length,
            max_cache_length,
            dtypes,
            aligned_to,
            signature,
            copied,
            form,
        )

    @property
    def operands(self) -> tuple[Any, ...]:
        """What `of` takes: the layer as operators of ``torch.ops.mla`` take it."""
        return (
            self.latent,
            self.rope,
            self.scales,
            self.quantization_granularity,
            self.page_table,
            self.page_indptr,
            self.lengths,
            self.lengths_include_new,
            self.max_seq_length,
            self.max_cache_length,
        )

    def check_capturable(self) -> None:
        """Raise a `DeviceError` if a graph that is being captured would not see new tables and lengths."""
        if self.copied:
            raise DeviceError(f"a graph is being captured, and a replay would not see new values: {self.copied}")

    def __repr__(self) -> str:
        form = "page table" if self.page_indptr is None else "page list"
        return (
            f"PagedKVCache({self.dtypes}, {self.num_pages} pages of {self.page_size} tokens, {form} "
            f"{tuple(self.page_table.shape)}, batch {self.batch_size}, {self.device})"
        )

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.latent.device

    def total_lengths(self, input_row_offsets: torch.Tensor) -> torch.Tensor:
        """Return the tokens of each sequence, cached and new: int64 [B], on the device of the tables."""
        lengths = self.lengths.to(torch.int64)
        return lengths if self.lengths_include_new else lengths + input_row_offsets.to(torch.int64).diff()

    def cached_lengths(self, input_row_offsets: torch.Tensor) -> torch.Tensor:
        """Return the tokens of each sequence before this step: int64 [B], on the device of the tables."""
        lengths = self.lengths.to(torch.int64)
        return lengths - input_row_offsets.to(torch.int64).diff() if self.lengths_include_new else lengths

    def page_ids(self, sequence: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
        """Look up the `page`-th page of each `sequence` (int64, broadcast together); both must be in range."""
        if self.page_indptr is None:
            return self.page_table[sequence, page].to(torch.int64)
        return self.page_table[self.page_indptr.to(torch.int64)[sequence] + page].to(torch.int64)

    def check_indices(self, input_row_offsets: torch.Tensor) -> None:
        """Raise unless the tables hold every token that this step reads. One sync on a device, none on the CPU.

        Parameters
        ----------
        input_row_offsets : torch.Tensor
            [B+1], int32 or int64, on the device of the tables: the cumulative new tokens.

        Raises
        ------
        ArgumentError
            A negative count, or a live page id outside [0, num_pages).
        ShapeError
            A page table too narrow for a length.
        """
        offsets = input_row_offsets.to("cpu", torch.int64)
        check_offsets(offsets, "input_row_offsets")
        lengths = self.lengths.to("cpu")
        total = lengths if self.lengths_include_new else lengths + offsets.diff()
        # seq_lens may be less than the new tokens: of a sequence spread over ranks only some keys are here.
        check_non_negative(lengths, "seq_lens" if self.lengths_include_new else "cache_lengths")
        self.check_pages(total)

    def check_pages(self, counts: torch.Tensor) -> None:
        """Raise unless the tables hold `counts` tokens ([B], on the CPU); the rest is that of `check_indices`."""
        indptr = None if self.page_indptr is None else self.page_indptr.to("cpu")
        check_live_pages(self.page_table.to("cpu"), indptr, counts, self.page_size, self.num_pages)


class PagedKVCacheCollection:
    """All layers of a paged MLA cache and the page table and lengths of the current batch.

    Parameters
    ----------
    blocks : torch.Tensor
        [num_pages, 1, num_layers, P, 1, 576], bf16, fp16, fp32 or fp8 (e4m3fn, e4m3fnuz): latent in [0, 512), roped key
        in [512, 576) of each row. Strides are free, only the last dimension is contiguous. Also 512 wide beside
        `kpe_cache`, or FlashMLA's 656-byte rows (uint8 or float8_e4m3fn).
    cache_lengths : torch.Tensor or None
        [B], tokens cached BEFORE this step. This step's tokens are stored behind them.
    lookup_table : torch.Tensor
        [B, cols], any row stride; entries at or past ``ceil(len / P)`` may be garbage.
    max_seq_length, max_cache_length : int, optional
        The longest count of new tokens and of cached + new tokens, as host numbers; bounds from shapes when missing.
    seq_lens : torch.Tensor, optional
        [B], cached + new; in place of `cache_lengths`.
    kpe_cache : torch.Tensor, optional
        Roped keys in a tensor of their own, shaped as `blocks` with 64 columns.
    scales : torch.Tensor, optional
        f32, shaped as `blocks` with ``ceil(576 / g)`` columns (``ceil(512 / g)`` beside a bf16 rope); an fp8 cache
        needs them. value = stored * scales[column // g].
    quantization_granularity : int, optional
        g, one of 64, 128, 576; read from the columns of `scales` when missing.

    Notes
    -----
    Index tensors are int32, uint32 or int64, on the device of the blocks or on the CPU. int32 and uint32 tensors on the
    device are used in place (a CUDA graph sees what is written into them later); others are converted once, here,
    without waiting. Values on the CPU are checked here; `PagedKVCache.check_indices` checks them anywhere.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        Naming the argument, what came and what is allowed.
    """

    def __init__(
        self,
        blocks: torch.Tensor,
        cache_lengths: torch.Tensor | None,
        lookup_table: torch.Tensor,
        max_seq_length: int | None = None,
        max_cache_length: int | None = None,
        *,
        seq_lens: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        quantization_granularity: int | None = None,
    ) -> None:
        views = split_blocks(blocks, kpe_cache, scales, quantization_granularity)
        self._bind(views, lookup_table, None, cache_lengths, seq_lens, max_seq_length, max_cache_length)

    @classmethod
    def from_pages(
        cls,
        kv_cache: torch.Tensor,
        page_table: torch.Tensor,
        cache_lengths: torch.Tensor | None = None,
        *,
        seq_lens: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        quantization_granularity: int | None = None,
        max_seq_length: int | None = None,
        max_cache_length: int | None = None,
    ) -> PagedKVCacheCollection:
        """View one layer of an engine's cache, without a copy.

        Parameters
        ----------
        kv_cache : torch.Tensor
            [num_pages, P, D], [num_pages, P, 1, D] or [num_pages, 1, P, D], with D as in the constructor's `blocks`.
        page_table : torch.Tensor
            [B, cols].
        kpe_cache, scales : torch.Tensor, optional
            In one of the same three forms.

        The other parameters are the constructor's.
        """
        views = _views_of_pages(kv_cache, kpe_cache, scales, quantization_granularity)
        collection = cls.__new__(cls)
        collection._bind(views, page_table, None, cache_lengths, seq_lens, max_seq_length, max_cache_length)
        return collection

    @classmethod
    def from_csr(
        cls,
        kv_cache: torch.Tensor,
        kv_page_indptr: torch.Tensor,
        kv_page_indices: torch.Tensor,
        cache_lengths: torch.Tensor | None = None,
        *,
        kv_last_page_len: torch.Tensor | None = None,
        input_row_offsets: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        quantization_granularity: int | None = None,
        max_seq_length: int | None = None,
        max_cache_length: int | None = None,
    ) -> PagedKVCacheCollection:
        """View one layer whose pages are listed end to end (FlashInfer; SGLang's slot list with P = 1).

        Parameters
        ----------
        kv_cache : torch.Tensor
            As in `from_pages`.
        kv_page_indptr, kv_page_indices : torch.Tensor
            [B+1] and [nnz]: the pages of sequence b are ``kv_page_indices[kv_page_indptr[b]:kv_page_indptr[b+1]]``.
        kv_last_page_len : torch.Tensor, optional
            [B], tokens in the last page of each sequence, this step's included; 1 to P. In place of `cache_lengths`.
            With P = 1 it says nothing and may be left out: every listed slot then holds a token.
        input_row_offsets : torch.Tensor, optional
            [B+1]. With it the lengths are turned into lengths before this step.

        The other parameters are the constructor's.
        """
        views = _views_of_pages(kv_cache, kpe_cache, scales, quantization_granularity)
        require_tensor(kv_page_indptr, "kv_page_indptr", 1)
        device = _table_device(views, kv_page_indptr)
        worked_out = ""
        if cache_lengths is None and (seq_lens is None or input_row_offsets is not None) and not is_capturing(device):
            worked_out = "the lengths of a page list were worked out before; give cache_lengths, or seq_lens alone"
        if cache_lengths is None and seq_lens is None:
            seq_lens = csr_lengths(kv_page_indptr, kv_last_page_len, views.latent.shape[2], device)
        elif kv_last_page_len is not None:
            raise ArgumentError("kv_last_page_len cannot be given with cache_lengths or seq_lens")
        if input_row_offsets is not None and seq_lens is not None:
            seq_lens = as_index(seq_lens, "seq_lens", None, device)
            offsets = as_index(input_row_offsets, "input_row_offsets", seq_lens.shape[0] + 1, device)
            cache_lengths, seq_lens = seq_lens - offsets.diff(), None
        collection = cls.__new__(cls)
        collection._bind(
            views, kv_page_indices, kv_page_indptr, cache_lengths, seq_lens, max_seq_length, max_cache_length
        )
        if worked_out:
            collection._tables = dataclasses.replace(collection._tables, copied=worked_out)
        return collection

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        page_size: int,
        num_layers: int = 1,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        quantization_granularity: int | None = None,
        cache_lengths: torch.Tensor | None = None,
        lookup_table: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_seq_length: int | None = None,
        max_cache_length: int | None = None,
    ) -> PagedKVCacheCollection:
        """Allocate zeroed pages; without tables the batch is empty until `with_batch`.

        Parameters
        ----------
        num_pages, page_size, num_layers : int
            Extents of the blocks [num_pages, 1, num_layers, page_size, 1, 576].
        quantization_granularity : int, optional
            For an fp8 `dtype`, which it allocates scales for; 128 when missing.

        The other parameters are the constructor's.
        """
        for name, value in (("num_pages", num_pages), ("page_size", page_size), ("num_layers", num_layers)):
            require_int(value, name)
            if value < 1:
                raise ArgumentError(f"{name} must be at least 1, got {value}")
        if lookup_table is None and not (cache_lengths is None and seq_lens is None):
            raise ArgumentError("cache_lengths and seq_lens need a lookup_table")
        shape = (num_pages, 1, num_layers, page_size, 1)
        scales = None
        if dtype in FP8_DTYPES:
            granularity = 128 if quantization_granularity is None else quantization_granularity
            if granularity not in GRANULARITIES:
                raise ArgumentError(f"quantization_granularity must be one of {GRANULARITIES}, got {granularity}")
            scales = torch.ones(*shape, -(-ROW_DIM // granularity), dtype=torch.float32, device=device)
            quantization_granularity = granularity
        blocks = torch.zeros(*shape, ROW_DIM, dtype=dtype, device=device)
        if lookup_table is None:
            cache_lengths = torch.zeros(0, dtype=torch.int32, device=device)
            lookup_table = torch.zeros(0, 0, dtype=torch.int32, device=device)
        return cls(
            blocks,
            cache_lengths,
            lookup_table,
            max_seq_length,
            max_cache_length,
            seq_lens=seq_lens,
            scales=scales,
            quantization_granularity=quantization_granularity,
        )

    def with_batch(
        self,
        cache_lengths: torch.Tensor | None,
        lookup_table: torch.Tensor,
        max_seq_length: int | None = None,
        max_cache_length: int | None = None,
        *,
        seq_lens: torch.Tensor | None = None,
    ) -> PagedKVCacheCollection:
        """Return a collection of the same pages with the tables of another batch."""
        collection = type(self).__new__(type(self))
        collection._bind(self._views, lookup_table, None, cache_lengths, seq_lens, max_seq_length, max_cache_length)
        return collection

    def layer(self, layer_idx: int) -> PagedKVCache:
        """Return the view of one layer; the same object at every call.

        Raises
        ------
        ArgumentError
            `layer_idx` is not in [0, num_layers).
        """
        require_int(layer_idx, "layer_idx")
        if not 0 <= layer_idx < self.num_layers:
            raise ArgumentError(f"layer_idx must be in [0, {self.num_layers}), got {layer_idx}")
        if torch.compiler.is_compiling():
            return self._make_layer(layer_idx)
        layer = self._layers[layer_idx]
        if layer is None:
            layer = self._layers[layer_idx] = self._make_layer(layer_idx)
        return layer

    def store(
        self,
        layer_idx: int,
        input_row_offsets: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        *,
        target: str | Target = "gpu",
        stream: torch.cuda.Stream | int | None = None,
    ) -> None:
        """Write this step's rows behind the cached ones, quantised where the cache is; see `mla.store.store`."""
        from mla.store import store

        store(self, layer_idx, input_row_offsets, latent, rope, target=target, stream=stream)

    def _bind(
        self,
        views: CacheViews,
        page_table: torch.Tensor,
        page_indptr: torch.Tensor | None,
        cache_lengths: torch.Tensor | None,
        seq_lens: torch.Tensor | None,
        max_seq_length: int | None,
        max_cache_length: int | None,
    ) -> None:
        page_size, num_pages = views.latent.shape[2], views.latent.shape[0]
        tables = make_tables(
            page_table,
            page_indptr,
            cache_lengths,
            seq_lens,
            max_seq_length,
            max_cache_length,
            page_size=page_size,
            num_pages=num_pages,
            device=_table_device(views, page_table),
        )
        self._views = views
        self._tables = tables
        self._layers: list[PagedKVCache | None] = [None] * views.latent.shape[1]
        self.num_layers = len(self._layers)
        self.num_pages = num_pages
        self.page_size = page_size
        self.batch_size = tables.lengths.shape[0]
        self.device = views.latent.device

    def _make_layer(self, layer_idx: int) -> PagedKVCache:
        views, tables = self._views, self._tables
        return PagedKVCache.of(
            views.latent[:, layer_idx],
            views.rope[:, layer_idx],
            None if views.scales is None else views.scales[:, layer_idx],
            views.quantization_granularity,
            tables.page_table,
            tables.page_indptr,
            tables.lengths,
            tables.lengths_include_new,
            tables.max_seq_length,
            tables.max_cache_length,
            tables.copied,
        )


def _views_of_pages(
    kv_cache: torch.Tensor, kpe_cache: torch.Tensor | None, scales: torch.Tensor | None, granularity: int | None
) -> CacheViews:
    return split_blocks(
        as_blocks(kv_cache, "kv_cache"),
        None if kpe_cache is None else as_blocks(kpe_cache, "kpe_cache"),
        None if scales is None else as_blocks(scales, "scales"),
        granularity,
    )


def _table_device(views: CacheViews, table: torch.Tensor) -> torch.device:
    """Tables lie with the pages; pages on the meta device stand in for memory that is not there, tables do not."""
    device = views.latent.device
    return table.device if device.type == "meta" else device
