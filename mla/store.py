"""This step's latent and roped rows into the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla._check import (
    alignment,
    as_index,
    check_non_negative,
    check_offsets,
    is_capturing,
    require_device,
    require_dtype,
    require_last_dim_contiguous,
    require_no_grad,
    require_shape,
    require_tensor,
    short_dtype,
    signature,
)
from mla._launch import Stream, stream_scope, traced_target
from mla._repeat import repeating
from mla.dispatch import Memo, Runner, resolve
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM, Again, Problem, StoreArgs

if TYPE_CHECKING:
    from mla.kv_cache import PagedKVCache, PagedKVCacheCollection
    from mla.target import Target

_ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_runs = Memo()


def store(
    kv_collection: PagedKVCacheCollection,
    layer_idx: int,
    input_row_offsets: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    *,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> None:
    """Write this step's rows behind the cached ones: row i of sequence b goes to position ``cached[b] + i``.

    An fp8 cache is quantised in blocks of ``quantization_granularity`` columns of the 576-wide row (of the 512 latent
    ones beside a bf16 rope): ``scale = max(amax / fp8_max, 2**-126)``, ``stored = round(clamp(x / scale))``, in f32.

    Parameters
    ----------
    kv_collection : PagedKVCacheCollection
        The lengths before this step, or with it (`seq_lens`).
    layer_idx : int
        Layer of `kv_collection`.
    input_row_offsets : torch.Tensor
        [B+1], cumulative new tokens; rows outside [first, last) are not stored.
    latent, rope : torch.Tensor
        [T, 512] and [T, 64], any row stride, one dtype: that of the cache, or bf16, fp16 or fp32 for an fp8 cache
        (bf16 where its rope is bf16).
    target, stream
        As in `mla.generic_flare_mla_prefill_ragged_paged_plan`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        Before anything is launched.
    """
    _store_layer(kv_collection.layer(layer_idx), input_row_offsets, latent, rope, target, stream=stream)


def store_layer(
    cache: PagedKVCache,
    input_row_offsets: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    target: str | Target = "gpu",
    *,
    stream: Stream | None = None,
) -> Again | None:
    """Write the rows of one layer; see `mla._repeat.repeating` for what is returned."""
    require_tensor(latent, "latent", 2)
    require_tensor(rope, "rope", 2)
    require_no_grad(latent=latent, rope=rope, kv_collection=cache.latent)
    if torch.compiler.is_compiling():
        torch.ops.mla.store(*cache.operands, input_row_offsets, latent, rope, traced_target(target, stream))
        return None
    aligned_to = min(cache.alignment, alignment(latent, rope))
    key = (cache.signature, target, aligned_to, *signature(latent, rope))
    run = _runs.get(key)
    if run is None:
        run = _runs.remember(key, _validated(cache, latent, rope, aligned_to, target))
    if is_capturing(cache.device):
        cache.check_capturable()
    offsets = as_index(input_row_offsets, "input_row_offsets", cache.batch_size + 1, cache.device)
    check_offsets(input_row_offsets, "input_row_offsets", latent.shape[0], "latent")
    if cache.device.type == "cpu":
        cache.check_indices(offsets)
        check_non_negative(cache.cached_lengths(offsets), "seq_lens less the new tokens")
    if latent.shape[0] == 0:
        return None
    with stream_scope(cache.device, stream):
        again = run(StoreArgs(offsets, cache, latent, rope))
    return again if offsets is input_row_offsets else None


_store_layer = repeating(store_layer)


def _validated(
    cache: PagedKVCache, latent: torch.Tensor, rope: torch.Tensor, aligned_to: int, target: str | Target
) -> Runner:
    require_shape(latent, "latent", (None, KV_LORA_RANK))
    require_shape(rope, "rope", (latent.shape[0], QK_ROPE_HEAD_DIM), f"latent has shape {tuple(latent.shape)}")
    if cache.scales is None or cache.rope.dtype == torch.bfloat16:
        require_dtype(latent, "latent", (cache.rope.dtype,))
    require_dtype(latent, "latent", _ROW_DTYPES)
    require_dtype(rope, "rope", (latent.dtype,))
    for tensor, name in ((latent, "latent"), (rope, "rope")):
        require_device(tensor, name, cache.device)
        require_last_dim_contiguous(tensor, name)
    problem = Problem(
        "store",
        short_dtype(latent.dtype),
        cache.dtypes,
        page_size=cache.page_size,
        csr=cache.page_indptr is not None,
        features=frozenset() if cache.scales is None else frozenset({"scales"}),
        granularity=cache.quantization_granularity,
        alignment=aligned_to,
    )
    return resolve(problem, target, cache.device)
