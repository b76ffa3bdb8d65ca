"""Attention under the names of FlashInfer's ragged prefill wrapper. FlashInfer itself is not needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from mla._check import as_index
from mla._prefill_check import FLOAT_DTYPES
from mla.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from mla.integrations import target_of
from mla.masks import CausalMask, Mask, NullMask, SlidingWindowCausalMask, SlidingWindowNonCausalMask
from mla.prefill import prefill
from mla.problem import QK_ROPE_HEAD_DIM, SUPPORTED_DIMS

_LOG2_E = math.log2(math.e)

#: Arguments that FlashInfer has for its own speed: taken, and without effect.
_HINTS = {
    "use_fp16_qk_reduction", "fixed_split_size", "disable_split_kv", "seq_lens", "seq_lens_q", "max_sequence_kv",
    "qo_indptr_cpu", "kv_indptr_cpu", "uniform_q_len", "enable_pdl",
}  # fmt: skip
#: Arguments that change the result and are not served.
_REFUSED = {
    "custom_mask_buf", "mask_indptr_buf", "jit_args", "jit_kwargs", "variant_owns_mask", "custom_mask",
    "packed_custom_mask", "rope_scale", "rope_theta", "prefix_len_ptr", "token_pos_in_items_ptr",
    "token_pos_in_items_len", "max_item_len_ptr", "v_indptr", "o_indptr", "use_token_head_sf", "args", "q_scale",
    "k_scale", "v_scale", "o_scale", "kv_cache_sf",
}  # fmt: skip


@dataclass(frozen=True)
class _Planned:
    """What the runs of a step have in common."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    shapes: dict[str, tuple[int, int]]
    mask: Mask
    softmax_scale: float
    softcap: float
    dtype: torch.dtype
    out_dtype: torch.dtype
    max_seqlen_q: int | None


class BatchPrefillWithRaggedKVCacheWrapper:
    """Plan once a step, run once a layer, as FlashInfer's class of this name; for keys as MLA makes them.

    Signatures are those of FlashInfer 0.7.4; arguments that would change the result and are not served are refused.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        uint8, on the device of the calls: their workspace.
    kv_layout : str
        ``NHD``.
    use_cuda_graph : bool
        Copy what `plan` is given into `qo_indptr_buf` and `kv_indptr_buf`, which a captured `run` reads.
    qo_indptr_buf, kv_indptr_buf : torch.Tensor, optional
        int32 [B+1], on that device; both with `use_cuda_graph`.
    backend : str
        Any; ``mla.explain`` tells which implementation serves.
    **others
        FlashInfer's other arguments, at their defaults.

    Raises
    ------
    UnsupportedError
        An argument that changes the result and is not served; the methods raise it too.
    ArgumentError
        An argument that FlashInfer does not have, or buffers and `use_cuda_graph` that disagree.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        **others: Any,
    ) -> None:
        _check(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf, **others)
        if kv_layout != "NHD":
            raise UnsupportedError(f"kv_layout must be 'NHD', got {kv_layout!r}")
        if use_cuda_graph != (qo_indptr_buf is not None) or use_cuda_graph != (kv_indptr_buf is not None):
            raise ArgumentError("qo_indptr_buf and kv_indptr_buf must both be given with use_cuda_graph, and only then")
        self._workspace = float_workspace_buffer
        self._indptr_bufs = (qo_indptr_buf, kv_indptr_buf)
        self._planned: _Planned | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        *,
        max_token_per_sequence: int | None = None,
        **others: Any,
    ) -> None:
        """Say what the runs of this step have in common.

        Parameters
        ----------
        qo_indptr, kv_indptr : torch.Tensor
            [B+1] cumulative rows of q and of k; int32 or int64, on the device or on the CPU.
        num_qo_heads, num_kv_heads : int
            Equal.
        head_dim_qk, head_dim_vo : int
            (192, 128) or (256, 256).
        causal : bool
            The last query sees the last key.
        window_left : int
            Keys before the query's own that it sees; -1 for all.
        logits_soft_cap, sm_scale : float, optional
            0, and 1 / sqrt(head_dim_qk), when missing.
        q_data_type, kv_data_type, o_data_type : str or torch.dtype
            bfloat16, float16, or float32 where a target serves it; kv as q; o as q, or float32.
        max_token_per_sequence : int, optional
            Longest count of queries of a sequence, a hint.
        **others
            FlashInfer's other arguments. Those for its own speed have no effect here.
        """
        _check(
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            **others,
        )
        if pos_encoding_mode != "NONE":
            raise UnsupportedError(f"pos_encoding_mode must be 'NONE', got {pos_encoding_mode!r}; keys come roped")
        dims = (head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo)
        if dims not in SUPPORTED_DIMS or num_kv_heads != num_qo_heads:
            allowed = ", ".join(map(str, SUPPORTED_DIMS))
            raise ShapeError(
                f"(head_dim_qk, head_dim_vo) must be one of {allowed} and num_kv_heads equal to num_qo_heads, "
                f"got {dims} and {num_kv_heads}, {num_qo_heads}"
            )
        dtype = _dtype(q_data_type)
        if kv_data_type is not None and _dtype(kv_data_type) != dtype:
            raise DTypeError(f"kv_data_type must be q_data_type, {dtype}, got {kv_data_type}")
        device = self._workspace.device
        indptrs = []
        for name, indptr, buffer in zip(
            ("qo_indptr", "kv_indptr"), (qo_indptr, kv_indptr), self._indptr_bufs, strict=True
        ):
            index = as_index(indptr, name, None if buffer is None else buffer.shape[0], device)
            indptrs.append(index if buffer is None else buffer.copy_(index, non_blocking=non_blocking))
        self._planned = _Planned(
            cu_seqlens_q=indptrs[0],
            cu_seqlens_k=indptrs[1],
            shapes={"q": (num_qo_heads, dims[0]), "k": (num_qo_heads, dims[0]), "v": (num_qo_heads, dims[1])},
            mask=_mask(causal, window_left),
            softmax_scale=head_dim_qk**-0.5 if sm_scale is None else float(sm_scale),
            softcap=float(logits_soft_cap or 0.0),
            dtype=dtype,
            out_dtype=dtype if o_data_type is None else _dtype(o_data_type),
            max_seqlen_q=max_token_per_sequence,
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend from q to k and v of the planned step.

        Parameters
        ----------
        q : torch.Tensor
            [T, H, dn + 64].
        k : torch.Tensor
            [L, H, dn + 64]. Its last 64 columns, the rope part, are read from head 0 for all heads: MLA makes them
            equal, and nothing checks that they are.
        v : torch.Tensor
            [L, H, dv].
        out : torch.Tensor, optional
            [T, H, dv]; allocated when missing.
        lse : torch.Tensor, optional
            float32, in `lse_layout`; allocated when missing.
        return_lse : bool
        lse_base : {"log2", "ln"}
            FlashInfer's LSE is in base 2, that of `mla.prefill` and of most merges is natural.
        lse_layout : {"NH", "HN"}
            [T, H] or [H, T].
        **others
            FlashInfer's other arguments, at their defaults.

        Returns
        -------
        torch.Tensor, or a pair of them
            out, or (out, lse).
        """
        _check(args=args, **others)
        step = self._planned
        if step is None:
            raise ArgumentError("plan must be called before run")
        if lse_base not in ("log2", "ln") or lse_layout not in ("NH", "HN"):
            raise ArgumentError(
                f"lse_base must be 'log2' or 'ln' and lse_layout 'NH' or 'HN', got {lse_base!r} and {lse_layout!r}"
            )
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dtype != step.dtype or tuple(tensor.shape[1:]) != step.shapes[name]:
                raise ShapeError(
                    f"{name} was planned as (*, {step.shapes[name][0]}, {step.shapes[name][1]}) {step.dtype}, got "
                    f"{tuple(tensor.shape)} {tensor.dtype}"
                )
        if out is None:
            out = torch.empty(q.shape[0], *step.shapes["v"], dtype=step.out_dtype, device=q.device)
        nope = k.shape[-1] - QK_ROPE_HEAD_DIM
        result = prefill(
            q,
            k[..., :nope],
            v,
            k[:, :1, nope:],
            step.mask,
            step.cu_seqlens_q,
            step.cu_seqlens_k,
            step.softmax_scale,
            output=out,
            lse=lse if return_lse else None,
            return_lse=return_lse,
            lse_layout="TH" if lse_layout == "NH" else "HT",
            softcap=step.softcap,
            q_max_seq_len=step.max_seqlen_q,
            workspace=self._workspace,
            target=target_of(q.device),
        )
        if isinstance(result, tuple) and lse_base == "log2":
            result[1].mul_(_LOG2_E)
        return result

    def run_return_lse(self, *args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run with ``return_lse=True``."""
        return self.run(*args, return_lse=True, **kwargs)

    begin_forward = plan


def _check(**others: Any) -> None:
    """Raise on arguments that change the result, unless they are at their defaults."""
    for name, value in others.items():
        if name not in _HINTS and name not in _REFUSED:
            raise ArgumentError(f"{name} is no argument of FlashInfer's here")
        if name in _REFUSED and (isinstance(value, torch.Tensor) or value not in (None, False, 0, ())):
            raise UnsupportedError(f"{name} is not served, got {value!r}")


def _dtype(name: str | torch.dtype) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if dtype not in FLOAT_DTYPES:
        raise DTypeError(f"data types must be one of {FLOAT_DTYPES}, got {name}")
    return dtype


def _mask(causal: bool, window_left: int) -> Mask:
    if window_left < 0:
        return CausalMask() if causal else NullMask()
    window = window_left + 1  # the query's own token counts
    return SlidingWindowCausalMask(window) if causal else SlidingWindowNonCausalMask(window)
