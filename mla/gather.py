"""Latent rows out of the pages, and their up-projection to keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mla._check import (
    alignment,
    as_index,
    check_non_negative,
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
    short_dtype,
    signature,
)
from mla._launch import Stream, stream_scope, traced_target
from mla._repeat import repeating
from mla.dispatch import Memo, Runner, resolve
from mla.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection
from mla.problem import KV_LORA_RANK, Again, GatherArgs, Problem, ProjectArgs

if TYPE_CHECKING:
    from mla.target import Target

Weight = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]

_BUFFER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_runs = Memo()


def generic_flare_mla_decompress_k_cache_ragged_paged(
    buffer_row_offsets_1d: torch.Tensor,
    cache_offsets_1d: torch.Tensor,
    buffer_length: int | torch.Tensor,
    weight: Weight,
    kv_collection: PagedKVCacheCollection,
    layer_idx: int,
    k_latent_buffer: torch.Tensor,
    k_buffer: torch.Tensor,
    *,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> None:
    """Gather one chunk of the latent cache and project it up: ``k_buffer = latent @ weight.T``.

    The heads' keys and values are views of the result: with ``kv = k_buffer[:n].view(n, H, dn + dv)``,
    ``k = kv[..., :dn]`` and ``v = kv[..., dn:]``.

    Parameters
    ----------
    buffer_row_offsets_1d, cache_offsets_1d : torch.Tensor
        [B+1] and [B]: one row of the plan's tables.
    buffer_length : int or torch.Tensor
        Rows to write, at most N; -1 or 0 for none. A tensor on the device is not read by the host: the projection then
        runs over all N rows. Rows at or past ``buffer_row_offsets_1d[B]`` become zero, so that an upper bound will do.
    weight : torch.Tensor or callable
        kv_b_proj, [H * (dn + dv), 512], in the dtype of the buffer; or a callable from the latent rows [n, 512] to
        [n, H * (dn + dv)], for a quantised linear.
    kv_collection : PagedKVCacheCollection
        Dequantised where it is fp8.
    layer_idx : int
        Layer of `kv_collection`.
    k_latent_buffer : torch.Tensor
        Output [N, 512], bf16, fp16 or fp32; the dtype of the cache unless that is fp8. Last dimension contiguous.
    k_buffer : torch.Tensor
        Output [N, H * (dn + dv)], in the dtype of `k_latent_buffer`, last dimension contiguous.
    target, stream
        As in `mla.generic_flare_mla_prefill_ragged_paged_plan`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        Before anything is launched.
    """
    require_tensor(k_buffer, "k_buffer", 2)
    require_tensor(k_latent_buffer, "k_latent_buffer", 2)
    rows = k_latent_buffer.shape[0]
    require_shape(k_buffer, "k_buffer", (rows, None), f"k_latent_buffer has shape {tuple(k_latent_buffer.shape)}")
    require_dtype(k_buffer, "k_buffer", (k_latent_buffer.dtype,))
    require_device(k_buffer, "k_buffer", k_latent_buffer.device)
    require_last_dim_contiguous(k_buffer, "k_buffer")
    require_no_overlap(k_buffer, "k_buffer")
    if isinstance(weight, torch.Tensor):
        why = f"k_buffer has shape {tuple(k_buffer.shape)}"
        require_shape(weight, "weight", (k_buffer.shape[1], KV_LORA_RANK), why)
        if weight.dtype != k_latent_buffer.dtype:
            raise DTypeError(
                f"weight is {weight.dtype}, but k_latent_buffer is {k_latent_buffer.dtype}; for a quantised linear "
                "pass a callable from the latent rows to their projection"
            )
        require_device(weight, "weight", k_latent_buffer.device)
        require_no_grad(weight=weight)
    elif not callable(weight):
        raise DTypeError(f"weight must be a torch.Tensor or a callable, got {type(weight).__name__}")
    require_no_grad(k_buffer=k_buffer)

    with stream_scope(k_latent_buffer.device, stream):
        gather_latent(
            buffer_row_offsets_1d,
            cache_offsets_1d,
            buffer_length,
            kv_collection,
            layer_idx,
            k_latent_buffer,
            target=target,
        )
        if isinstance(buffer_length, int):
            rows = max(buffer_length, 0)
        up_project(k_latent_buffer[:rows], weight, k_buffer[:rows])


def gather_latent(
    buffer_row_offsets_1d: torch.Tensor,
    cache_offsets_1d: torch.Tensor,
    buffer_length: int | torch.Tensor,
    kv_collection: PagedKVCacheCollection,
    layer_idx: int,
    k_latent_buffer: torch.Tensor,
    *,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> None:
    """Gather one chunk of the latent cache; the parameters are those of the decompression, which begins with this."""
    if not isinstance(kv_collection, PagedKVCacheCollection):
        raise DTypeError(f"kv_collection must be a PagedKVCacheCollection, got {type(kv_collection).__name__}")
    cache = kv_collection.layer(layer_idx)
    _gather_layer(k_latent_buffer, buffer_row_offsets_1d, cache_offsets_1d, buffer_length, cache, target, stream=stream)


def gather_layer(
    k_latent_buffer: torch.Tensor,
    buffer_row_offsets_1d: torch.Tensor,
    cache_offsets_1d: torch.Tensor,
    buffer_length: int | torch.Tensor,
    cache: PagedKVCache,
    target: str | Target = "gpu",
    *,
    stream: Stream | None = None,
) -> Again | None:
    """Gather one chunk of one layer; see `mla._repeat.repeating` for what is returned."""
    require_tensor(k_latent_buffer, "k_latent_buffer", 2)
    require_no_grad(k_latent_buffer=k_latent_buffer, kv_collection=cache.latent)
    if torch.compiler.is_compiling():
        known = not isinstance(buffer_length, torch.Tensor)
        torch.ops.mla.gather(
            k_latent_buffer, buffer_row_offsets_1d, cache_offsets_1d, buffer_length if known else None,
            None if known else buffer_length, *cache.operands, traced_target(target, stream),
        )  # fmt: skip
        return None
    run = find_run(cache, k_latent_buffer, target)
    device, rows = k_latent_buffer.device, k_latent_buffer.shape[0]
    row_offsets = as_index(buffer_row_offsets_1d, "buffer_row_offsets_1d", cache.batch_size + 1, device)
    offsets = as_index(cache_offsets_1d, "cache_offsets_1d", cache.batch_size, device)
    check_offsets(buffer_row_offsets_1d, "buffer_row_offsets_1d", rows, "k_latent_buffer")
    check_non_negative(cache_offsets_1d, "cache_offsets_1d")
    length = _buffer_length(buffer_length, rows, device)
    if isinstance(length, int) and length <= 0:
        return None
    with stream_scope(device, stream):
        again = run(GatherArgs(row_offsets, offsets, length, cache, k_latent_buffer))
    copied = row_offsets is not buffer_row_offsets_1d or offsets is not cache_offsets_1d
    if isinstance(length, torch.Tensor):
        assert isinstance(buffer_length, torch.Tensor)
        copied = copied or length.data_ptr() != buffer_length.data_ptr()
    return None if copied or isinstance(buffer_length, torch.Tensor) != isinstance(length, torch.Tensor) else again


_gather_layer = repeating(gather_layer)


def find_run(cache: PagedKVCache, k_latent_buffer: torch.Tensor, target: str | Target) -> Runner:
    """Return what serves a gather into such a buffer or fewer rows; checks it when it has not met its like."""
    aligned_to = min(cache.alignment, alignment(k_latent_buffer))
    key = (cache.signature, target, aligned_to, *signature(k_latent_buffer))
    run: Runner | None = _runs.get(key)
    if run is None:
        run = _runs.remember(key, _validated(cache, k_latent_buffer, aligned_to, target))
    if is_capturing(k_latent_buffer.device):
        cache.check_capturable()
    return run


def up_project(latent: torch.Tensor, weight: Weight, output: torch.Tensor) -> None:
    """Write ``latent @ weight.T``, or what a callable makes of the latent, into `output` [n, H * (dn + dv)]."""
    if isinstance(weight, torch.Tensor):
        torch.mm(latent, weight.t(), out=output)
        return
    result = weight(latent)
    require_tensor(result, "the result of weight", 2)
    require_shape(result, "the result of weight", output.shape, f"k_latent_buffer has {tuple(latent.shape)} rows here")
    require_no_grad(**{"the result of weight": result})
    output.copy_(result)


def projects_to_fp8(dtype: torch.dtype, fp8: torch.dtype, target: str | Target, device: torch.device) -> bool:
    """Return whether something on a target divides by a scale and rounds to fp8 as it projects."""
    key = ("projects to fp8", dtype, fp8, target, device)
    found: bool | None = _runs.get(key)
    if found is None:
        try:
            found = bool(_find_projection(dtype, fp8, 16, target, device))
        except UnsupportedError:
            found = False
        _runs.remember(key, found)
    return found


@repeating
def project_to_fp8(
    output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    target: str | Target,
    *,
    stream: Stream | None = None,
) -> Again | None:
    """Write ``a @ b.T / scale``; the arguments, the library's own, are those of `mla.problem.ProjectArgs`."""
    run = _find_projection(a.dtype, output.dtype, alignment(a, b, output), target, output.device)
    with stream_scope(output.device, stream):
        return run(ProjectArgs(a, b, output, scale))


def _find_projection(
    dtype: torch.dtype, fp8: torch.dtype, aligned_to: int, target: str | Target, device: torch.device
) -> Runner:
    key = ("project", dtype, fp8, aligned_to, target, device)
    run: Runner | None = _runs.get(key)
    if run is None:
        static = frozenset({"static_scale"})
        problem = Problem("project", short_dtype(dtype), short_dtype(fp8), features=static, alignment=aligned_to)
        run = _runs.remember(key, resolve(problem, target, device))
    return run


def _validated(cache: PagedKVCache, k_latent_buffer: torch.Tensor, aligned_to: int, target: str | Target) -> Runner:
    require_shape(k_latent_buffer, "k_latent_buffer", (None, KV_LORA_RANK))
    require_last_dim_contiguous(k_latent_buffer, "k_latent_buffer")
    require_no_overlap(k_latent_buffer, "k_latent_buffer")
    require_dtype(
        k_latent_buffer, "k_latent_buffer", _BUFFER_DTYPES if cache.scales is not None else (cache.latent.dtype,)
    )
    require_device(k_latent_buffer, "k_latent_buffer", cache.device)
    problem = Problem(
        "gather",
        short_dtype(cache.latent.dtype),
        short_dtype(k_latent_buffer.dtype),
        page_size=cache.page_size,
        csr=cache.page_indptr is not None,
        features=frozenset() if cache.scales is None else frozenset({"scales"}),
        granularity=cache.quantization_granularity,
        alignment=aligned_to,
    )
    return resolve(problem, target, cache.device)


def _buffer_length(buffer_length: int | torch.Tensor, rows: int, device: torch.device) -> int | torch.Tensor:
    """Return an int where the host has it, else an int32 [1] tensor on the device."""
    if isinstance(buffer_length, torch.Tensor):
        if buffer_length.numel() != 1:
            raise ShapeError(f"buffer_length must hold one number, got shape {tuple(buffer_length.shape)}")
        length = as_index(buffer_length.reshape(1), "buffer_length", 1, device)
        if not readable(buffer_length):
            return length
        buffer_length = int(buffer_length)
    if not isinstance(buffer_length, int):
        raise DTypeError(f"buffer_length must be an int or a tensor, got {type(buffer_length).__name__}")
    if buffer_length < -1:
        raise ArgumentError(f"buffer_length must be a row count, or -1 for none, got {buffer_length}")
    if buffer_length > rows:
        raise ShapeError(f"buffer_length is {buffer_length}, but k_latent_buffer has {rows} rows")
    return buffer_length
