"""The attention function that transformers' models call: their keys and values, viewed as `mla.prefill` takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from mla.errors import ShapeError, UnsupportedError
from mla.integrations import target_of
from mla.integrations.transformers.latent_cache import PagedLatents, attend_paged
from mla.integrations.transformers.step import Step, prepare_step, query_rows, step_of_bias
from mla.masks import CausalMask
from mla.prefill import prefill
from mla.problem import QK_ROPE_HEAD_DIM, SUPPORTED_DIMS

#: The value of ``attn_implementation``.
NAME = "mla_prefill"

#: Arguments of transformers' attention functions that change the result and are not served.
_REFUSED = ("sliding_window", "softcap", "s_aux", "indices", "position_bias", "head_mask")


def register(name: str = NAME) -> None:
    """Give transformers the attention function and the mask function that belong together, under one name.

    Parameters
    ----------
    name : str
        What ``attn_implementation`` is set to, when a model is loaded or by ``model.set_attn_implementation``.
    """
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, prepare_step)


def use_latent_cache(model: PreTrainedModel) -> None:
    """Let a DeepSeek-V2/V3 model attend straight from the pages of a `LatentCache`.

    Switches the model to this library's attention and replaces the method ``expand_kv``, which projects all cached
    latents up, of each of its attention modules: latents in pages pass through it untouched, and are projected up
    by `mla.chunked_prefill` in bounded memory. Any other cache keeps working. Calling it again changes nothing.

    Raises
    ------
    UnsupportedError
        The model has no attention module that caches latents.
    """
    modules: list[Any] = [
        module for module in model.modules() if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")
    ]
    if not modules:
        raise UnsupportedError(
            f"{type(model).__name__} has no attention module with expand_kv, as DeepSeek-V2 and V3 have "
            "since transformers 5.17"
        )
    register()
    model.set_attn_implementation(NAME)
    for module in modules:
        if not isinstance(module.expand_kv, functools.partial):
            module.expand_kv = functools.partial(_expand_kv, module.expand_kv)


def _expand_kv(original: Callable[..., Any], kv_nope: Any, k_rot: Any) -> Any:
    return (kv_nope, k_rot) if isinstance(kv_nope, PagedLatents) else original(kv_nope, k_rot)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | PagedLatents,
    value: torch.Tensor | PagedLatents,
    attention_mask: Step | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention functions do.

    Parameters
    ----------
    module : torch.nn.Module
        An MLA attention module: its keys are qk_nope_head_dim columns of the head's own and 64 that all heads share.
    query, key, value : torch.Tensor
        [B, H, Sq, dn + 64], [B, H, Sk, dn + 64] and [B, H, Sk, dv] with (dn + 64, dv) of (192, 128) or (256, 256). The
        two parts of the key are read where they lie. For B > 1 q and v are copied once, to be rows of one tensor. Or
        what `LatentCache` and `use_latent_cache` put in the place of key and value.
    attention_mask : Step or torch.Tensor, optional
        What `prepare_step` made; or [B, 1 or H, Sq, Sk], bool or additive; causal when missing.
    dropout : float
        0; there is none.
    scaling : float
        Softmax scale, YaRN's mscale included.
    **kwargs
        position_ids, or cu_seq_lens_q, cu_seq_lens_k and max_length_q, tell where packed sequences begin.

    Returns
    -------
    torch.Tensor
        [B, Sq, H, dv].
    None
        In place of attention weights, which are never formed.

    Raises
    ------
    UnsupportedError
        A module that is not MLA, dropout, or another thing that is not served.
    ShapeError, DTypeError, DeviceError, ArgumentError
        As `mla.prefill`; a query that requires a gradient among them.
    """
    _refuse(module, dropout, kwargs)
    if scaling is None:
        scaling = float(query.shape[-1] ** -0.5)
    if isinstance(key, PagedLatents):
        if kwargs.get("cu_seq_lens_q") is not None:
            raise UnsupportedError("packed sequences cannot be cached; pass use_cache=False")
        return attend_paged(module, query, key, _step_of(attention_mask, query, key.length), scaling), None
    assert isinstance(value, torch.Tensor)
    if (key.shape[-1], value.shape[-1]) not in SUPPORTED_DIMS or key.shape[1] != query.shape[1]:
        allowed = ", ".join(map(str, SUPPORTED_DIMS))
        raise ShapeError(
            f"key and value must have the heads of query, and widths that are one of {allowed}; got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        )
    step = _step_of(attention_mask, query, key.shape[2])
    batch_size, heads, queries, _ = query.shape
    keys, stride = _key_rows(key.contiguous())
    values, _ = _key_rows(value if batch_size == 1 else value.contiguous())
    rows = step.rows(query, key, stride, kwargs)
    nope = key.shape[-1] - QK_ROPE_HEAD_DIM
    output = prefill(
        query_rows(query),
        keys[..., :nope],
        values,
        keys[:, :1, nope:],
        step.mask,
        rows.cu_seqlens_q,
        rows.cache_row_offsets,
        scaling,
        kv_lengths=rows.kv_lengths,
        q_max_seq_len=rows.max_seqlen_q,
        target=target_of(query.device),
    )
    assert isinstance(output, torch.Tensor)
    return output.view(batch_size, queries, heads, value.shape[-1]), None


def _key_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """View [B, H, S, D] as rows [L, H, D], and return how many rows a row of the batch is after the one before it.

    Token s of batch row b is row ``b * H * S + s``; the rows between are tokens of other heads, and are never read as
    long as the key length of a sequence is S.
    """
    batch_size, heads, tokens, width = x.shape
    if batch_size == 1:
        return x[0].transpose(0, 1), tokens
    stride = heads * tokens
    shape = ((batch_size - 1) * stride + tokens, heads, width)
    return x.as_strided(shape, (width, tokens * width, 1)), stride


def _step_of(attention_mask: Step | torch.Tensor | None, query: torch.Tensor, keys: int) -> Step:
    if isinstance(attention_mask, Step):
        return attention_mask
    return Step(CausalMask()) if attention_mask is None else step_of_bias(attention_mask, query, keys)


def _refuse(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise on what would give other numbers than the caller means."""
    rope = getattr(module, "qk_rope_head_dim", None)
    if rope != QK_ROPE_HEAD_DIM or not hasattr(module, "kv_b_proj"):
        raise UnsupportedError(
            f"{type(module).__name__} is no MLA attention with qk_rope_head_dim {QK_ROPE_HEAD_DIM}, got {rope}; "
            "keys whose last columns differ between heads cannot be served"
        )
    if dropout:
        raise UnsupportedError(f"dropout must be 0, got {dropout}; call model.eval()")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedError("bidirectional attention is not served; pass a 4-D attention_mask to a causal module")
    if kwargs.get("output_attentions"):
        raise UnsupportedError("attention weights are never formed; use attn_implementation='eager' for them")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{name} is not served, got {kwargs[name]!r}")
