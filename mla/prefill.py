"""Attention of new tokens over up-projected keys and values, the rope part read from where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, overload

import torch

from mla._check import FP8_DTYPES, require_tensor
from mla._launch import Stream
from mla._prefill_call import Call, Scale, launch
from mla._repeat import repeating
from mla.errors import ArgumentError
from mla.kv_cache import PagedKVCache
from mla.masks import Mask, as_mask
from mla.problem import Again
from mla.target import Target

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Names of the operands after `output` for each place where the mask may stand; see `flare_mla_prefill`.
_WHOLE_Q = ("q", "k", "v", "k_rope", "mask_functor", "valid_length", "cache_row_offsets", "scale")
_WHOLE_Q_SCALED = (*_WHOLE_Q[:4], "k_rope_scales", *_WHOLE_Q[4:])
_SPLIT_Q = ("q_nope", "q_rope", "q_scale", "k", "k_scales", "v", "k_rope", *_WHOLE_Q[4:])
_LAYOUTS: dict[int, tuple[str, ...]] = {
    names.index("mask_functor"): names for names in (_WHOLE_Q, _WHOLE_Q_SCALED, _SPLIT_Q)
}


class PrefillKeywords(TypedDict, total=False):
    """Keywords that every form of prefill takes; told in `flare_mla_prefill`."""

    q_max_seq_len: int | None
    cache_offsets: torch.Tensor | None
    start_positions: torch.Tensor | None
    kv_lengths: torch.Tensor | None
    v_scale: Scale
    rope_prescaled: bool
    lse: torch.Tensor | None
    lse_layout: str
    sinks: torch.Tensor | None
    softcap: float
    workspace: torch.Tensor | None
    check_indices: bool
    batch_invariant: bool
    target: str | Target
    stream: Stream | None


class WholeQKeywords(PrefillKeywords, total=False):
    """Those, and the scales that are operands where q comes in two parts."""

    q_scale: Scale
    k_scales: Scale


@overload
def flare_mla_prefill(
    output: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: PagedKVCache,
    mask_functor: Mask,
    valid_length: torch.Tensor,
    cache_row_offsets: torch.Tensor,
    scale: float,
    **keywords: Unpack[WholeQKeywords],
) -> None: ...
@overload
def flare_mla_prefill(
    output: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor,
    mask_functor: Mask,
    valid_length: torch.Tensor,
    cache_row_offsets: torch.Tensor,
    scale: float,
    **keywords: Unpack[WholeQKeywords],
) -> None: ...
@overload
def flare_mla_prefill(
    output: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor,
    k_rope_scales: torch.Tensor,
    mask_functor: Mask,
    valid_length: torch.Tensor,
    cache_row_offsets: torch.Tensor,
    scale: float,
    **keywords: Unpack[WholeQKeywords],
) -> None: ...
@overload
def flare_mla_prefill(
    output: torch.Tensor,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scales: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor,
    mask_functor: Mask,
    valid_length: torch.Tensor,
    cache_row_offsets: torch.Tensor,
    scale: float,
    **keywords: Unpack[PrefillKeywords],
) -> None: ...
@overload
def flare_mla_prefill(
    output: torch.Tensor,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scales: torch.Tensor,
    v: torch.Tensor,
    k_rope: PagedKVCache,
    mask_functor: Mask,
    valid_length: torch.Tensor,
    cache_row_offsets: torch.Tensor,
    scale: float,
    **keywords: Unpack[PrefillKeywords],
) -> None: ...
@repeating
def flare_mla_prefill(output: torch.Tensor, *operands: Any, **keywords: Any) -> Again | None:
    """Attend from ragged queries over a ragged K/V buffer, the rope part of the keys read from a cache or a tensor.

    The overloads are told apart by where the mask stands: after ``q, k, v, k_rope`` (paged or tensor rope), after
    ``q, k, v, k_rope, k_rope_scales``, or after ``q_nope, q_rope, q_scale, k, k_scales, v, k_rope``. For sequence b of
    the batch, query i and key j::

        s[i,j]     = scale * (q[i,h,:dn] . k[j,h] + q[i,h,dn:] . rope(pos_k(j)))     pos_k(j) = cache_offsets[b] + j
        s          = softcap * tanh(s / softcap); plus the mask's bias; hidden where the mask hides
        output[i]  = sum_j exp(s[i,j] - lse[i]) v[j]
        lse[i]     = log(sum_j exp(s[i,j]) + exp(sinks))

    Parameters
    ----------
    output : torch.Tensor
        [T, H, dv], the dtype of q (bfloat16 for fp8 q), or float32 for a partial result to be merged. Written in rows
        [valid_length[0], valid_length[-1]) only; it may hold anything before.
    q : torch.Tensor
        [T, H, dn + 64]; bf16, fp16, fp32 or fp8. (dn + 64, dv) is (192, 128) or (256, 256).
    q_nope, q_rope : torch.Tensor
        [T, H, dn] fp8 and [T, H, 64] bfloat16.
    k, v : torch.Tensor
        [L, H, dn] and [L, H, dv], the dtype of q. Any strides with a contiguous last dimension, here and for q and
        output; an fp8 v may instead be contiguous along its rows.
    k_rope : PagedKVCache or torch.Tensor
        A layer of the cache; or [B, n, 1, D >= 64], whose last 64 columns are the rope part of n key positions; or
        [L, 1, 64] with rows as k. The dtype of q, or fp8 with scales; bfloat16 beside `q_rope`.
    k_rope_scales : torch.Tensor
        float32, shaped as `k_rope` with ceil(D / g) columns, g one of 64, 128, 576: the scales of an fp8 tensor rope.
    mask_functor : Mask
        On positions of the whole sequence; see `mla.masks`.
    valid_length : torch.Tensor
        [B+1] cumulative rows of q.
    cache_row_offsets : torch.Tensor
        [B+1] cumulative rows of k and v: ``plan.buffer_row_offsets[c]``.
    scale : float
        Softmax scale; finite.
    q_max_seq_len : int, optional
        Longest count of queries of a sequence, a hint for the launch. Results do not depend on it.
    cache_offsets : torch.Tensor, optional
        [B] cache position of each sequence's first row of k: ``plan.cache_offsets[c]``; zeros when missing.
    start_positions, kv_lengths : torch.Tensor, optional
        [B] position of each sequence's first query (may be negative) and its key length. Defaults: paged, cached and
        cached + new; [B, n, 1, D], n - new and n; [L, 1, 64], the rows of the sequence less new and its rows. Rows of
        k at positions from the key length on are not read.
    q_scale, k_scales : torch.Tensor or float
        float32 [T, 1] and [L, 1], or one number; required for fp8 q and k.
    v_scale : torch.Tensor or float
        float32 [L, 1], [H] or one number; required where all of q is fp8, optional beside `q_rope`.
    rope_prescaled : bool
        Beside `q_rope`: whether q_rope and k_rope were divided by q_scale and k_scales, so that the scales multiply
        the whole score; False for an ordinary rope, when they multiply the nope part alone.
    lse : torch.Tensor, optional
        float32, [T, H] or [H, T] as `lse_layout` says, any strides: written as `output` is. Natural logarithm.
    lse_layout : {"TH", "HT"}
    sinks : torch.Tensor, optional
        float32 [H]: a logit of each head that takes part in the sum and has no value.
    softcap : float
        0 for none.
    workspace : torch.Tensor, optional
        uint8, at least `workspace_size` bytes; allocated when missing.
    check_indices : bool
        Check offsets, lengths and page ids also where they are on a device, which synchronises once.
    batch_invariant : bool
        Keep a sequence's result bitwise the same whatever else is in the batch.
    target : str or Target
    stream : torch.cuda.Stream or int, optional
        torch's current stream when missing.

    Notes
    -----
    Index tensors are int32, uint32 or int64, on the device of q or on the CPU. Without `check_indices` nothing
    synchronises, and those on a device are trusted. A row that sees no key becomes 0, its LSE -inf (sinks[h] with
    sinks). Rows of k and v and slots of pages outside a sequence's keys may hold NaN.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        Naming the argument, what came and what is allowed.
    UnsupportedError
        Nothing serves the problem on the target; with every candidate's reasons.
    """
    stream = keywords.pop("stream")
    return launch(bind(output, operands, keywords), stream)


def bind(output: torch.Tensor, operands: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
    """Return the call that one of the overloads of `flare_mla_prefill` describes."""
    place = next((i for i in _LAYOUTS if i < len(operands) and isinstance(operands[i], Mask)), 0)
    names = _LAYOUTS.get(place, ())
    if len(operands) != len(names) or not names:
        names = _layout(operands, keywords)
        operands += tuple(keywords.pop(name) for name in names[len(operands) :])
    if names == _WHOLE_Q:  # not `is`, which torch.compile does not follow
        q, k, v, k_rope, mask, valid_length, row_offsets, scale = operands
        rope_scales = keywords.pop("k_rope_scales", None)
        fields = (output, q, None, k, v, k_rope, rope_scales, mask, valid_length, row_offsets, scale)
        return _call("flare_mla_prefill", *fields, **keywords)
    if names == _WHOLE_Q_SCALED:
        q, k, v, k_rope, rope_scales, mask, valid_length, row_offsets, scale = operands
        fields = (output, q, None, k, v, k_rope, rope_scales, mask, valid_length, row_offsets, scale)
        return _call("flare_mla_prefill", *fields, **keywords)
    q, q_rope, q_scale, k, k_scales, v, k_rope, mask, valid_length, row_offsets, scale = operands
    fields = (output, q, q_rope, k, v, k_rope, None, mask, valid_length, row_offsets, scale)
    if repeated := [name for name in ("q_scale", "k_scales") if name in keywords]:
        raise TypeError(f"flare_mla_prefill() got multiple values for argument {repeated[0]!r}")
    return _call("flare_mla_prefill", *fields, q_scale=q_scale, k_scales=k_scales, **keywords)


def _call(function: str, *fields: Any, **keywords: Any) -> Call:
    try:
        return Call(*fields, **keywords)
    except TypeError as error:  # an unknown keyword, or one that repeats an operand
        raise TypeError(str(error).replace("Call.__init__", function)) from None


def _layout(operands: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[str, ...]:
    """Return the overload whose remaining operands were given by name."""
    for names in reversed(_LAYOUTS.values()):
        rest = names[len(operands) :]
        mask_fits = "mask_functor" in rest or isinstance(operands[names.index("mask_functor")], Mask)
        if len(operands) <= len(names) and mask_fits and all(name in keywords for name in rest):
            return names
    by_count = next((names for names in _LAYOUTS.values() if len(names) == len(operands)), None)
    if by_count is not None:  # the right count, and something that is no mask where the mask stands
        as_mask(operands[by_count.index("mask_functor")], "mask_functor")
    forms = "; ".join("(output, " + ", ".join(names) + ")" for names in _LAYOUTS.values())
    raise ArgumentError(
        f"flare_mla_prefill got {len(operands) + 1} positional arguments and {sorted(keywords)}, "
        f"which is none of {forms}"
    )


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: PagedKVCache | torch.Tensor,
    mask: Mask,
    valid_length: torch.Tensor,
    cache_row_offsets: torch.Tensor,
    scale: float,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope_scales: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    return_lse: bool = False,
    **keywords: Unpack[WholeQKeywords],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend as `flare_mla_prefill` does, and allocate what is returned.

    Parameters
    ----------
    q_rope : torch.Tensor, optional
        [T, H, 64]; q is then [T, H, dn].
    output : torch.Tensor, optional
        Allocated when missing: [T, H, dv], the dtype of q, bfloat16 for fp8. Rows outside the sequences are undefined.
    return_lse : bool
        Return the LSE too, float32 [T, H], or [H, T] where `lse_layout` says so; `lse` itself where that is given.
    **keywords
        Those of `flare_mla_prefill`, as are the other parameters.

    Returns
    -------
    torch.Tensor, or a pair of them
        output, or (output, lse).

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        As `flare_mla_prefill`.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_tensor(tensor, name, 3)
    if output is None:
        dtype = torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype
        output = torch.empty(*q.shape[:2], v.shape[2], dtype=dtype, device=q.device)
    if return_lse and keywords.get("lse") is None:
        shape = q.shape[:2] if keywords.get("lse_layout", "TH") == "TH" else (q.shape[1], q.shape[0])
        keywords["lse"] = torch.empty(shape, dtype=torch.float32, device=q.device)
    fields = (output, q, q_rope, k, v, k_rope, k_rope_scales, mask, valid_length, cache_row_offsets, scale)
    _attend_fields(*fields, **keywords)
    lse = keywords.get("lse")
    return (output, lse) if return_lse and lse is not None else output


@repeating
def _attend_fields(*fields: Any, stream: Stream | None, **keywords: Any) -> Again | None:
    return launch(_call("prefill", *fields, **keywords), stream)
