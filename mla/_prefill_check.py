"""Everything about a prefill call that can be judged without reading its data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla._check import (
    FP8_DTYPES,
    alignment,
    require_device,
    require_dtype,
    require_last_dim_contiguous,
    require_no_overlap,
    require_shape,
    require_tensor,
    short_dtype,
)
from mla._check import as_index as check_index
from mla.errors import ArgumentError, DTypeError, ShapeError
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection
from mla.kv_layouts import GRANULARITIES
from mla.masks import as_mask
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM, SUPPORTED_DIMS, Problem, RopeKind
from mla.target import device_arch

if TYPE_CHECKING:
    from mla._prefill_call import Call

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def describe(call: Call) -> Problem:
    """Check a call and return the problem that it poses.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        Naming the argument, what came and what is allowed.
    """
    as_mask(call.mask, "mask_functor")
    for name, value in (("scale", call.scale), ("softcap", call.softcap)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise DTypeError(f"{name} must be a Python float, got {type(value).__name__}")
    if not isinstance(call.rope_prescaled, bool):
        raise DTypeError(f"rope_prescaled must be a bool, got {type(call.rope_prescaled).__name__}")
    if call.q_max_seq_len is not None and (not isinstance(call.q_max_seq_len, int) or call.q_max_seq_len < 1):
        raise ArgumentError(f"q_max_seq_len must be an int of at least 1, got {call.q_max_seq_len!r}")
    dims = _check_operands(call)
    rope = _check_rope(call)
    batch = _check_indices(call, rope)
    call.mask.check(batch, call.q.shape[1], call.q.device)
    dtypes = _dtype_row(call)
    granularity = _check_scales(call, dtypes)
    _check_extras(call)

    cache = call.k_rope if isinstance(call.k_rope, PagedKVCache) else None
    v = call.v.permute(1, 2, 0) if _is_transposed(call.v) else call.v  # the contiguous dimension last
    data = (call.output, call.q, call.q_rope, call.k, v, None if cache else call.k_rope)
    aligned = alignment(*(x if isinstance(x, torch.Tensor) else None for x in data))
    if cache is not None:
        aligned = min(aligned, alignment(cache.rope))
    rope_width = 0 if isinstance(call.k_rope, PagedKVCache) else call.k_rope.shape[-1]
    rope_column = KV_LORA_RANK if cache is not None else rope_width - QK_ROPE_HEAD_DIM
    features = {
        "lse": call.lse is not None,
        "sinks": call.sinks is not None,
        "softcap": call.softcap != 0,
        "bias": bool(call.mask.biases),
        "split_q": call.q_rope is not None,
        "batch_invariant": call.batch_invariant,
        "q_scale": call.q_scale is not None,
        "k_scales": call.k_scales is not None,
        "v_scale": call.v_scale is not None,
        "v_transposed": _is_transposed(call.v),
        "rope_prescaled": call.rope_prescaled and call.q_rope is not None,
        "scales": granularity != 0,
        "split_rope_scales": rope_column % (granularity or 1) + QK_ROPE_HEAD_DIM > granularity > 0,
    }
    return Problem(
        op="prefill",
        dtypes=dtypes,
        out_dtype=short_dtype(call.output.dtype),
        dims=dims,
        page_size=cache.page_size if cache is not None else 0,
        csr=cache is not None and cache.page_indptr is not None,
        rope=rope,
        mask=call.mask.program,
        features=frozenset(name for name, present in features.items() if present),
        granularity=granularity,
        alignment=aligned,
    )


def _check_operands(call: Call) -> tuple[int, int]:
    """Check output, q, k and v against each other; return (q_depth, v_head_dim)."""
    q, k, v, output = call.q, call.k, call.v, call.output
    q_name = "q" if call.q_rope is None else "q_nope"
    for tensor, name in ((q, q_name), (k, "k"), (v, "v"), (output, "output")):
        require_tensor(tensor, name, 3)
        require_device(tensor, name, q.device)
    nope = q.shape[2]
    if call.q_rope is not None:
        require_tensor(call.q_rope, "q_rope", 3)
        require_device(call.q_rope, "q_rope", q.device)
        require_shape(call.q_rope, "q_rope", (*q.shape[:2], QK_ROPE_HEAD_DIM), f"q_nope has shape {tuple(q.shape)}")
        require_last_dim_contiguous(call.q_rope, "q_rope")
    else:
        nope -= QK_ROPE_HEAD_DIM
    dims = (nope + QK_ROPE_HEAD_DIM, v.shape[2])
    if dims not in SUPPORTED_DIMS:
        allowed = ", ".join(map(str, SUPPORTED_DIMS))
        raise ShapeError(
            f"(q_depth, v_head_dim) = {dims} is not supported; allowed: {allowed}; "
            f"{q_name} has shape {tuple(q.shape)}, v has shape {tuple(v.shape)}"
        )
    require_shape(k, "k", (None, q.shape[1], nope), f"{q_name} has shape {tuple(q.shape)}")
    require_shape(v, "v", (k.shape[0], k.shape[1], None), f"k has shape {tuple(k.shape)}")
    why = f"{q_name} has shape {tuple(q.shape)}, v has shape {tuple(v.shape)}"
    require_shape(output, "output", (q.shape[0], q.shape[1], v.shape[2]), why)
    if q.shape[1] < 1:
        raise ShapeError(f"{q_name} must have at least one head, got shape {tuple(q.shape)}")
    for tensor, name in ((q, q_name), (k, "k"), (output, "output")):
        require_last_dim_contiguous(tensor, name)
    require_no_overlap(output, "output")
    if not _is_transposed(v):
        require_last_dim_contiguous(v, "v")
    return dims


def _is_transposed(v: torch.Tensor) -> bool:
    """Tell whether an fp8 v lies as V^T: contiguous along its rows instead of its last dimension."""
    return v.dtype in FP8_DTYPES and v.stride(2) != 1 and v.stride(0) == 1


def _check_rope(call: Call) -> RopeKind:
    """Check where the rope part of the keys comes from."""
    rope, q = call.k_rope, call.q
    if isinstance(rope, PagedKVCacheCollection):
        raise DTypeError("k_rope must be one layer of the cache, got a PagedKVCacheCollection; pass its .layer(i)")
    if isinstance(rope, PagedKVCache):
        require_device(rope.rope, "k_rope", q.device)
        return "paged"
    if not isinstance(rope, torch.Tensor):
        raise DTypeError(f"k_rope must be a PagedKVCache or a torch.Tensor, got {type(rope).__name__}")
    require_tensor(rope, "k_rope", (3, 4))
    require_device(rope, "k_rope", q.device)
    require_last_dim_contiguous(rope, "k_rope")
    if rope.ndim == 3:
        require_shape(rope, "k_rope", (call.k.shape[0], 1, QK_ROPE_HEAD_DIM), f"k has shape {tuple(call.k.shape)}")
        if call.cache_offsets is not None and (call.start_positions is None or call.kv_lengths is None):
            missing = "start_positions" if call.start_positions is None else "kv_lengths"
            raise ArgumentError(
                f"{missing} is missing: k_rope of shape {tuple(rope.shape)} has rows as k, and with cache_offsets "
                "they alone do not tell the positions; give start_positions and kv_lengths"
            )
        return "ragged"
    if rope.shape[2] != 1 or rope.shape[3] < QK_ROPE_HEAD_DIM:
        raise ShapeError(f"k_rope must have shape (B, n, 1, D >= {QK_ROPE_HEAD_DIM}), got {tuple(rope.shape)}")
    return "batched"


def _check_indices(call: Call, rope: RopeKind) -> int:
    """Check the index tensors' form; return the batch size."""
    device = call.q.device
    for name, index in call.indices.items():
        if index is not None:
            require_tensor(index, name, 1)
    batch = call.valid_length.shape[0] - 1
    if batch < 0:
        raise ShapeError("valid_length must have at least one element, got none")
    for name, index in call.indices.items():
        if index is not None:
            extent = batch + 1 if name in ("valid_length", "cache_row_offsets") else batch
            if index.shape[0] != extent:
                raise ShapeError(
                    f"{name} must have length {extent}, got {index.shape[0]}; "
                    f"valid_length has {batch + 1} for {batch} sequences"
                )
            check_index(index, name, extent, device)
    held = call.k_rope.batch_size if isinstance(call.k_rope, PagedKVCache) else call.k_rope.shape[0]
    if rope != "ragged" and held != batch:
        raise ShapeError(f"the batch size disagrees: k_rope has {held} sequences, valid_length has {batch}")
    return batch


def _dtype_row(call: Call) -> str:
    """Return the row of `mla.problem.PREFILL_DTYPES` that the call belongs to."""
    q, k, v = call.q, call.k, call.v
    rope = call.k_rope.rope if isinstance(call.k_rope, PagedKVCache) else call.k_rope
    q_name = "q" if call.q_rope is None else "q_nope"
    require_dtype(q, q_name, (*FLOAT_DTYPES, *FP8_DTYPES))
    for tensor, name in ((q, q_name), (k, "k"), (v, "v"), (rope, "k_rope")):
        require_fp8_format(tensor, name)
    for tensor, name in ((k, "k"), (v, "v")):
        if tensor.dtype != q.dtype:
            raise DTypeError(f"{name} must have the dtype of {q_name}, {q.dtype}, got {tensor.dtype}")
    if call.q_rope is not None:
        if q.dtype not in FP8_DTYPES:
            raise DTypeError(f"q_nope beside q_rope must be fp8, got {q.dtype}; other dtypes take q in one tensor")
        require_dtype(call.q_rope, "q_rope", (torch.bfloat16,))
        require_dtype(rope, "k_rope", (torch.bfloat16,))
        row = "fp8+bf16_rope"
    elif q.dtype in FP8_DTYPES:
        if rope.dtype != q.dtype:
            raise DTypeError(
                f"k_rope must have the dtype of q, {q.dtype}, got {rope.dtype}; "
                "for a bfloat16 rope pass q_nope and q_rope apart"
            )
        row = "fp8"
    elif rope.dtype in FP8_DTYPES:
        row = f"{short_dtype(q.dtype)}+fp8_rope"
    elif rope.dtype == q.dtype:
        row = short_dtype(q.dtype)
    else:
        raise DTypeError(f"k_rope must have the dtype of q, {q.dtype}, or be fp8 with scales, got {rope.dtype}")
    result = torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype
    require_dtype(call.output, "output", dict.fromkeys((result, torch.float32)))
    return row


def require_fp8_format(tensor: torch.Tensor, name: str) -> None:
    """Raise if an fp8 tensor has the format of another vendor's hardware."""
    if tensor.dtype not in FP8_DTYPES or tensor.device.type != "cuda":
        return
    arch = device_arch(tensor.device)
    wanted = torch.float8_e4m3fnuz if arch.startswith("gfx94") else torch.float8_e4m3fn
    if tensor.dtype != wanted:
        raise DTypeError(f"{name} is {tensor.dtype}, but {arch} computes in {wanted}; convert it")


def _check_scales(call: Call, dtypes: str) -> int:
    """Check every scale; return the granularity of the rope's scales, 0 where it has none."""
    given = {"q_scale": call.q_scale, "k_scales": call.k_scales, "v_scale": call.v_scale}
    if call.q.dtype in FP8_DTYPES:
        required = ("q_scale", "k_scales", "v_scale") if dtypes == "fp8" else ("q_scale", "k_scales")
        for name in required:
            if given[name] is None:
                raise ArgumentError(
                    f"{name} is missing: q, k and v are {call.q.dtype}, and no scale is ever assumed; "
                    f"pass {', '.join(required)} (1.0 for data that was never scaled)"
                )
    elif names := [name for name, scale in given.items() if scale is not None]:
        raise ArgumentError(f"{names[0]} belongs to fp8 inputs, but q is {call.q.dtype}")
    rows = {"q_scale": call.q.shape[0], "k_scales": call.k.shape[0], "v_scale": call.k.shape[0]}
    for name, scale in given.items():
        if not isinstance(scale, torch.Tensor):
            if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
                raise DTypeError(f"{name} must be a float32 tensor or a Python float, got {type(scale).__name__}")
            continue
        require_tensor(scale, name)
        require_dtype(scale, name, (torch.float32,))
        require_device(scale, name, call.q.device)
        per_head = name == "v_scale" and scale.shape == (call.q.shape[1],)
        if scale.shape != (rows[name], 1) and scale.numel() != 1 and not per_head:
            heads = f", ({call.q.shape[1]},)" if name == "v_scale" else ""
            shape = tuple(scale.shape)
            raise ShapeError(f"{name} must have shape ({rows[name]}, 1){heads} or one element, got {shape}")
    return _rope_granularity(call, dtypes)


def _rope_granularity(call: Call, dtypes: str) -> int:
    scales = call.k_rope_scales
    quantised = dtypes == "fp8" or dtypes.endswith("+fp8_rope")
    if isinstance(call.k_rope, PagedKVCache):
        if scales is not None:
            raise ArgumentError("k_rope_scales cannot be given with a paged k_rope: the cache holds its own scales")
        return call.k_rope.quantization_granularity if quantised else 0
    rope = call.k_rope
    if scales is None:
        if quantised:
            raise ArgumentError(
                f"k_rope_scales is missing: k_rope is {rope.dtype}, and no scale is ever assumed; "
                "pass k_rope_scales after k_rope (ones for data that was never scaled)"
            )
        return 0
    if not quantised:
        raise ArgumentError(f"k_rope_scales belongs to an fp8 k_rope, but k_rope is {rope.dtype}")
    require_tensor(scales, "k_rope_scales", rope.ndim)
    require_dtype(scales, "k_rope_scales", (torch.float32,))
    require_device(scales, "k_rope_scales", call.q.device)
    require_last_dim_contiguous(scales, "k_rope_scales")
    columns = rope.shape[-1]
    for granularity in GRANULARITIES:
        if scales.shape == (*rope.shape[:-1], -(-columns // granularity)):
            return granularity
    allowed = ", ".join(str((*rope.shape[:-1], -(-columns // g))) for g in GRANULARITIES)
    raise ShapeError(
        f"k_rope_scales must have one of the shapes {allowed} for granularity {GRANULARITIES}, "
        f"got {tuple(scales.shape)}; k_rope has shape {tuple(rope.shape)}"
    )


def _check_extras(call: Call) -> None:
    """Check lse, sinks and workspace."""
    total, heads = call.q.shape[:2]
    if call.lse_layout not in ("TH", "HT"):
        raise ArgumentError(f"lse_layout must be 'TH' or 'HT', got {call.lse_layout!r}")
    if call.lse is not None:
        require_tensor(call.lse, "lse", 2)
        require_dtype(call.lse, "lse", (torch.float32,))
        require_device(call.lse, "lse", call.q.device)
        shape = (total, heads) if call.lse_layout == "TH" else (heads, total)
        require_shape(call.lse, "lse", shape, f"q has {total} rows and {heads} heads in layout {call.lse_layout}")
        require_no_overlap(call.lse, "lse")
    if call.sinks is not None:
        require_tensor(call.sinks, "sinks", 1)
        require_dtype(call.sinks, "sinks", (torch.float32,))
        require_device(call.sinks, "sinks", call.q.device)
        require_shape(call.sinks, "sinks", (heads,), f"q has {heads} heads")
    if call.workspace is not None:
        require_tensor(call.workspace, "workspace", 1)
        require_dtype(call.workspace, "workspace", (torch.uint8,))
        require_device(call.workspace, "workspace", call.q.device)
        require_last_dim_contiguous(call.workspace, "workspace")
