"""How much scratch memory a call needs, before it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla._prefill_call import workspace_bytes
from mla.chunked import find_extents
from mla.errors import ArgumentError
from mla.prefill import bind

if TYPE_CHECKING:
    import torch

    from mla.gather import Weight
    from mla.kv_cache import PagedKVCacheCollection
    from mla.plan import PrefillPlan
    from mla.target import Target


def workspace_size(op: str, *operands: Any, **keywords: Any) -> int:
    """Return the bytes of `workspace` that a call needs.

    Parameters
    ----------
    op : str
        ``flare_mla_prefill`` or ``chunked_prefill``.
    *operands, **keywords
        The arguments that the function of that name would get. Their shapes, dtypes, strides and device count, their
        data is not read. For ``chunked_prefill``: ``q, kv_collection, layer_idx, weight``, `buffer_token_size` or
        `plan`, `attention_dtype` and, where that is an fp8 dtype, `target`; others are ignored.

    Returns
    -------
    int
        Bytes. For ``chunked_prefill`` an upper bound over all batches of these shapes: the buffers of N rows and two
        partial results in fp32.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        As the call itself.
    """
    if op == "flare_mla_prefill":
        return _of_prefill(*operands, **keywords)
    if op == "chunked_prefill":
        return _of_chunked(*operands, **keywords)
    raise ArgumentError(f"op must be 'flare_mla_prefill' or 'chunked_prefill', got {op!r}")


def _of_prefill(output: torch.Tensor, *operands: Any, stream: Any = None, **keywords: Any) -> int:
    return workspace_bytes(bind(output, operands, keywords))


def _of_chunked(
    q: torch.Tensor,
    kv_collection: PagedKVCacheCollection,
    layer_idx: int,
    weight: Weight,
    *others: Any,
    buffer_token_size: int = 16384,
    plan: PrefillPlan | None = None,
    attention_dtype: torch.dtype | None = None,
    target: str | Target = "gpu",
    **other_keywords: Any,
) -> int:
    cache = kv_collection.layer(layer_idx)
    extents = find_extents(q, cache, weight, buffer_token_size, plan, attention_dtype)
    return extents.on(target, q.device).workspace_bytes()
