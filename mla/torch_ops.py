"""The library as operators of torch, ``torch.ops.mla``: the ops, and chunked_prefill.

An operator takes tensors, numbers and text only. A layer of the cache crosses as `PagedKVCache.operands`, a mask as
`Mask.operands` (its program in one line and its tensors), a plan as its tables. Every operator writes into tensors
that it is given and returns nothing, so that what is mutated stands in the schema and nothing has to be inferred.

The public functions call these operators where `torch.compile` traces them; otherwise they go straight to dispatch.
An operator that runs rebuilds the objects and calls what the public function would have called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla._check import require_no_grad
from mla._prefill_call import Call, launch
from mla._repeat import repeating
from mla.chunked import find_extents, run_job
from mla.errors import ArgumentError, DTypeError, ShapeError
from mla.gather import gather_layer
from mla.kv_cache import PagedKVCache
from mla.masks import Mask
from mla.merge import merge_attn_states
from mla.plan import PrefillPlan, write_plan
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM, Again
from mla.quantize import launch as launch_quantize
from mla.store import store_layer


def _layer(written: bool = False, optional: bool = False) -> str:
    """Return the schema of `PagedKVCache.operands`.

    Where they are `optional`, a tensor rope and its scales may stand for the cache's, with None for latent, page_table
    and lengths.
    """
    a, b, c = ("(a!)", "(b!)", "(c!)") if written else ("", "", "")
    o = "?" if optional else ""
    return (
        f"Tensor{a}{o} latent, Tensor{b} rope, Tensor{c}? scales, int quantization_granularity, Tensor{o} page_table, "
        f"Tensor? page_indptr, Tensor{o} lengths, bool lengths_include_new, SymInt max_seq_length, "
        "SymInt max_cache_length"
    )


_MASK = "str mask, Tensor[] captures, Tensor[] biases"

_SCHEMAS = {
    "plan": "Tensor(a!) buffer_row_offsets, Tensor(b!) cache_offsets, Tensor(c!) buffer_lengths, "
    f"Tensor(d!)? required_chunks, Tensor input_row_offsets, {_layer()}, SymInt buffer_token_size, str target='gpu'",
    "gather": "Tensor(a!) k_latent_buffer, Tensor buffer_row_offsets, Tensor cache_offsets, SymInt? rows, "
    f"Tensor? buffer_length, {_layer()}, str target='gpu'",
    "store": f"{_layer(written=True)}, Tensor input_row_offsets, Tensor new_latent, Tensor new_rope, str target='gpu'",
    # From q_max_seq_len on in the order of the fields of `Call`.
    "prefill": f"Tensor(a!) output, Tensor q, Tensor? q_rope, Tensor k, Tensor v, {_layer(optional=True)}, {_MASK}, "
    "Tensor valid_length, Tensor cache_row_offsets, float scale, SymInt? q_max_seq_len=None, "
    "Tensor? cache_offsets=None, Tensor? start_positions=None, Tensor? kv_lengths=None, Tensor? q_scale=None, "
    "Tensor? k_scales=None, Tensor? v_scale=None, bool rope_prescaled=True, Tensor(b!)? lse=None, "
    "str lse_layout='TH', Tensor? sinks=None, "
    "float softcap=0.0, Tensor(c!)? workspace=None, bool check_indices=False, bool batch_invariant=True, "
    "str target='gpu'",
    "merge": "Tensor(a!) output, Tensor(b!)? output_lse, Tensor prefix_output, Tensor prefix_lse, "
    "Tensor suffix_output, Tensor suffix_lse, *, str lse_layout='TH', str target='gpu'",
    "quantize": "Tensor(a!) output, Tensor(b!) scale, Tensor x, int granularity, bool static_scale, str target='gpu'",
    "chunked_prefill": "Tensor(a!) output, Tensor(b!)? lse, Tensor(c!)? workspace, Tensor q, "
    f"{_layer()}, Tensor weight, Tensor input_row_offsets, {_MASK}, float scale, "
    "Tensor? buffer_row_offsets, Tensor? cache_offsets, Tensor? buffer_lengths, Tensor? required_chunks, "
    "SymInt buffer_token_size, SymInt? total_rows, SymInt? max_chunks, Tensor? seq_lens_cpu, Tensor? row_offsets_cpu, "
    "Tensor? sinks, float softcap, bool keep_rows, str target='gpu', ScalarType? attention_dtype=None",
}
#: Operands of a `PagedKVCache` and of a `Mask`.
_CACHE_WIDTH, _MASK_WIDTH = 10, 3

_library = torch.library.Library("mla", "DEF")


# Arguments that equal their defaults are left out at the end of the list that an operator's function gets.


@repeating
def _plan(*args: Any, stream: None) -> Again | None:
    tables, offsets, cache, (size, *target) = args[:4], args[4], args[5 : 5 + _CACHE_WIDTH], args[5 + _CACHE_WIDTH :]
    return write_plan(offsets, _cache(cache), size, tables, *target)


@repeating
def _gather(
    buffer: torch.Tensor,
    row_offsets: torch.Tensor,
    offsets: torch.Tensor,
    rows: int | None,
    length: torch.Tensor | int | None,
    *args: Any,
    stream: None,
) -> Again | None:
    if length is None:
        length = rows
    if length is None or (rows is not None and rows is not length):
        raise ArgumentError("exactly one of rows and buffer_length must be given")
    cache, target = args[:_CACHE_WIDTH], args[_CACHE_WIDTH:]
    return gather_layer(buffer, row_offsets, offsets, length, _cache(cache), *target)


@repeating
def _store(*args: Any, stream: None) -> Again | None:
    return store_layer(_cache(args[:_CACHE_WIDTH]), *args[_CACHE_WIDTH:])


@repeating
def _prefill(
    output: torch.Tensor,
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    stream: None,
) -> Again | None:
    rope, args = args[:_CACHE_WIDTH], args[_CACHE_WIDTH:]
    mask, rest = Mask.from_text(*args[:_MASK_WIDTH]), args[_MASK_WIDTH:]
    paged = rope[4] is not None
    k_rope, rope_scales = (_cache(rope), None) if paged else (rope[1], rope[2])
    return launch(Call(output, q, q_rope, k, v, k_rope, rope_scales, mask, *rest), None)


def _merge(output: torch.Tensor, output_lse: torch.Tensor | None, *sides: Any, **keywords: Any) -> None:
    a, a_lse, b, b_lse = sides
    merge_attn_states(output, a, a_lse, b, b_lse, output_lse, **keywords)


def _chunked_prefill(
    output: torch.Tensor, lse: torch.Tensor | None, workspace: torch.Tensor | None, q: torch.Tensor, *args: Any
) -> None:
    cache, (weight, input_row_offsets, *more) = _cache(args[:_CACHE_WIDTH]), args[_CACHE_WIDTH:]
    mask, (scale, rows, offsets, lengths, required, *rest) = Mask.from_text(*more[:_MASK_WIDTH]), more[_MASK_WIDTH:]
    size, total_rows, max_chunks, seq_lens_cpu, row_offsets_cpu, sinks, softcap, keep_rows, *options = rest
    plan = None
    if rows is not None:
        host = total_rows, seq_lens_cpu, row_offsets_cpu
        plan = PrefillPlan(rows, offsets, lengths, required, size, cache.page_size, *host)
    target = options[0] if options else "gpu"
    attention_dtype = options[1] if len(options) > 1 else None
    extents = find_extents(q, cache, weight, size, plan, attention_dtype)
    require_no_grad(q=q, weight=weight)
    call = Call(
        output, q, None, q, q, cache, None, mask, input_row_offsets, input_row_offsets, scale,
        lse=lse, softcap=softcap, sinks=sinks, target=target,
    )  # fmt: skip
    run_job(call, weight, extents, plan, max_chunks, seq_lens_cpu, workspace, keep_rows)


def _cache(operands: Any) -> PagedKVCache:
    """Return the layer that the operands of an operator stand for, once they have the form that kernels read."""
    latent, rope, _, _, page_table, page_indptr, lengths, *_ = operands
    for tensor, name, width in ((latent, "latent", KV_LORA_RANK), (rope, "rope", QK_ROPE_HEAD_DIM)):
        if tensor is None or tensor.ndim != 3 or tensor.shape[2] != width or tensor.stride(2) != 1:
            got = None if tensor is None else tuple(tensor.shape)
            raise ShapeError(f"{name} must be [num_pages, P, {width}] with a contiguous last dimension, got {got}")
    for tensor, name in ((page_table, "page_table"), (page_indptr, "page_indptr"), (lengths, "lengths")):
        if tensor is not None and tensor.dtype != torch.int32:
            raise DTypeError(f"{name} must be int32, got {tensor.dtype}")
    if page_table.ndim != (2 if page_indptr is None else 1):
        raise ShapeError(f"page_table must be [B, cols], or [nnz] with page_indptr, got {tuple(page_table.shape)}")
    return PagedKVCache.of(*operands)


def _fake(name: str) -> Callable[..., None]:
    """Return what stands for an operator while it is traced: nothing is returned, and gradients are refused."""
    arguments = [a.name for a in getattr(torch.ops.mla, name).default._schema.arguments]

    def fake(*args: Any, **keywords: Any) -> None:
        given = dict(zip(arguments, args, strict=False)) | keywords
        require_no_grad(**{key: value for key, value in given.items() if isinstance(value, torch.Tensor)})

    return fake


for _name, _run in (
    ("plan", _plan), ("gather", _gather), ("store", _store), ("prefill", _prefill), ("merge", _merge),
    ("chunked_prefill", _chunked_prefill), ("quantize", launch_quantize),
):  # fmt: skip
    _library.define(f"{_name}({_SCHEMAS[_name]}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mla::{_name}", _fake(_name), lib=_library)
