"""Page tables and lengths of one batch in the canonical form, checked as far as that is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla._check import (
    INT32_MAX,
    as_index,
    as_page_ids,
    check_non_negative,
    check_offsets,
    is_capturing,
    readable,
    require_int,
    require_tensor,
)
from mla.errors import ArgumentError, ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class BatchTables:
    """Where the tokens of each sequence lie; the fields are those of `mla.PagedKVCache`."""

    page_table: torch.Tensor
    page_indptr: torch.Tensor | None
    lengths: torch.Tensor
    lengths_include_new: bool
    max_seq_length: int
    max_cache_length: int
    copied: str


def make_tables(
    page_table: torch.Tensor,
    page_indptr: torch.Tensor | None,
    cache_lengths: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    max_seq_length: int | None,
    max_cache_length: int | None,
    *,
    page_size: int,
    num_pages: int,
    device: torch.device,
) -> BatchTables:
    """Check the tables of a batch against each other and bring them to `device` as int32."""
    if (cache_lengths is None) == (seq_lens is None):
        given = "neither" if seq_lens is None else "both"
        raise ArgumentError(f"exactly one of cache_lengths and seq_lens must be given, got {given}")
    name, lengths = ("cache_lengths", cache_lengths) if seq_lens is None else ("seq_lens", seq_lens)
    assert lengths is not None
    require_tensor(lengths, name, 1)
    table_name = "lookup_table" if page_indptr is None else "kv_page_indices"
    require_tensor(page_table, table_name, 2 if page_indptr is None else 1)
    shapes = f"{tuple(page_table.shape)} and {name} {tuple(lengths.shape)}"
    if page_indptr is None:
        if page_table.shape[0] != lengths.shape[0]:
            raise ShapeError(f"the batch size disagrees: lookup_table has shape {shapes}")
    else:
        require_tensor(page_indptr, "kv_page_indptr", 1)
        if page_indptr.shape[0] != lengths.shape[0] + 1:
            raise ShapeError(
                f"kv_page_indptr must have one entry more than {name}, got shapes {tuple(page_indptr.shape)} "
                f"and {tuple(lengths.shape)}"
            )
        check_offsets(page_indptr, "kv_page_indptr", page_table.shape[0], "kv_page_indices")
    check_non_negative(lengths, name)
    for bound_name, value in (("max_seq_length", max_seq_length), ("max_cache_length", max_cache_length)):
        if value is not None:
            require_int(value, bound_name)
            if value < 0:
                raise ArgumentError(f"{bound_name} must not be negative, got {value}")
    if max_cache_length is not None and readable(lengths) and bool((lengths.to(torch.int64) > max_cache_length).any()):
        raise ArgumentError(f"max_cache_length is {max_cache_length}, but {name} goes up to {int(lengths.max())}")
    table_bound = min(page_table.shape[-1] * page_size, INT32_MAX)
    if max_cache_length is not None and max_cache_length > table_bound:
        raise ShapeError(
            f"page table too narrow: max_cache_length {max_cache_length} needs {-(-max_cache_length // page_size)} "
            f"pages, {table_name} has {page_table.shape[-1]} columns for pages of {page_size} tokens"
        )
    on_cpu = all(t is None or t.device.type == "cpu" for t in (lengths, page_table, page_indptr))
    if on_cpu and not torch.compiler.is_compiling():
        check_live_pages(page_table, page_indptr, lengths, page_size, num_pages)
    bound = table_bound if max_cache_length is None else max_cache_length
    sources: dict[str, torch.Tensor | None] = {table_name: page_table, "kv_page_indptr": page_indptr, name: lengths}
    table = as_page_ids(page_table, table_name, device)
    indptr = None if page_indptr is None else as_index(page_indptr, "kv_page_indptr", None, device)
    canonical = as_index(lengths, name, None, device)
    return BatchTables(
        table,
        indptr,
        canonical,
        seq_lens is not None,
        bound if max_seq_length is None else max_seq_length,
        bound,
        _what_was_copied(sources, (table, indptr, canonical), device),
    )


def _what_was_copied(
    given: dict[str, torch.Tensor | None], used: Sequence[torch.Tensor | None], device: torch.device
) -> str:
    """Name a table that was converted outside of a capture; a conversion that is captured is replayed too."""
    for (name, tensor), table in zip(given.items(), used, strict=True):
        if tensor is None or table is None:
            continue
        converted = tensor.dtype == torch.int64 or tensor.device != device or tensor.stride() != table.stride()
        if converted and not is_capturing(device):
            return f"{name} ({tensor.dtype} on {tensor.device}) was copied to int32 on {device} before; keep it there"
    return ""


def csr_lengths(
    kv_page_indptr: torch.Tensor, kv_last_page_len: torch.Tensor | None, page_size: int, device: torch.device
) -> torch.Tensor:
    """Return the tokens of each sequence, this step's included, from its pages and the filling of the last one."""
    require_tensor(kv_page_indptr, "kv_page_indptr", 1)
    if kv_last_page_len is None:
        if page_size != 1:
            raise ArgumentError("one of cache_lengths, seq_lens and kv_last_page_len must be given when P > 1")
        return as_index(kv_page_indptr, "kv_page_indptr", None, device).diff()
    require_tensor(kv_last_page_len, "kv_last_page_len", 1)
    on_cpu = kv_page_indptr.device.type == "cpu" and kv_last_page_len.device.type == "cpu"
    where = kv_page_indptr.device if on_cpu else device
    pages = as_index(kv_page_indptr, "kv_page_indptr", None, where).diff()
    last = as_index(kv_last_page_len, "kv_last_page_len", pages.shape[0], where)
    if on_cpu and not torch.compiler.is_compiling() and bool(((last > page_size) | ((last < 1) & (pages > 0))).any()):
        raise ArgumentError(f"kv_last_page_len must be from 1 to the page size {page_size}, got {last.tolist()}")
    return torch.where(pages > 0, (pages - 1) * page_size + last, torch.zeros_like(last))


def check_live_pages(
    page_table: torch.Tensor, page_indptr: torch.Tensor | None, lengths: torch.Tensor, page_size: int, num_pages: int
) -> None:
    """Raise unless each sequence has enough pages and they exist; CPU tensors.

    Entries behind a sequence are not looked at.
    """
    needed = -(-lengths.to(torch.int64) // page_size)
    if needed.numel() == 0:
        return
    if page_indptr is None:
        columns = page_table.shape[1]
        available = torch.full_like(needed, columns)
        live = page_table.to(torch.int64)[torch.arange(columns, device="cpu") < needed[:, None]]
    else:
        starts = page_indptr.to(torch.int64)
        available = starts.diff()
        entry = torch.arange(int(starts[0]), int(starts[-1]), device="cpu")
        owner = torch.repeat_interleave(available)
        live = page_table.to(torch.int64)[entry[entry - starts[owner] < needed[owner]]]
    short = (needed > available).nonzero()
    if short.numel():
        b = int(short[0])
        raise ShapeError(
            f"page table too narrow: sequence {b} has {int(lengths[b])} tokens in {int(needed[b])} pages of "
            f"{page_size}, its row holds {int(available[b])} pages"
        )
    if live.numel() and (int(live.min()) < 0 or int(live.max()) >= num_pages):
        raise ArgumentError(
            f"page ids must be in [0, {num_pages}), got values from {int(live.min())} to {int(live.max())}"
        )
