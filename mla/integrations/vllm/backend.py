"""The backend class; importing it imports vLLM's base class."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend

from mla._check import short_dtype
from mla.dispatch import explain
from mla.errors import DTypeError, UnsupportedError
from mla.integrations import target_of
from mla.masks import CausalMask, Mask, NullMask
from mla.prefill import prefill
from mla.problem import QK_ROPE_HEAD_DIM, SUPPORTED_DIMS

_CAUSAL, _ALL = CausalMask(), NullMask()


class _Backend(MLAPrefillBackend):
    """What every version of vLLM asks for in the same words."""

    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [
        MLADimensions(qk_nope_head_dim=q_depth - QK_ROPE_HEAD_DIM, qk_rope_head_dim=QK_ROPE_HEAD_DIM, v_head_dim=width)
        for q_depth, width in SUPPORTED_DIMS
    ]

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's log."""
        return "MLA_PREFILL"

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        """Return the reasons against this backend: vLLM's own, then those of every candidate of the registry."""
        reasons: list[str] = super().validate_configuration(device_capability, selector_config)
        if not reasons:
            dims, dtype = selector_config.mla_dimensions, short_dtype(selector_config.dtype)
            explanation = explain(
                "prefill",
                dtypes=dtype,
                out_dtype=dtype,
                dims=(dims.qk_nope_head_dim + dims.qk_rope_head_dim, dims.v_head_dim),
                rope="ragged",
                page_size=0,
                mask=_CAUSAL,
                features={"lse", "batch_invariant"},
            )
            if explanation.chosen is None:
                reasons.append(str(explanation))
        return reasons

    def supports_out(self) -> bool:
        """Tell that results are written into the tensor that vLLM gives."""
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend from new tokens to each other, causally; see `_attend` for shapes."""
        if output_scale is not None:
            raise UnsupportedError("output_scale: quantised output is not written; supports_quant_output is False")
        step = self._prefill_metadata
        starts, longest = step.query_start_loc, step.max_query_len
        return self._attend(q, k, v, starts, starts, longest, _CAUSAL, return_softmax_lse, out)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        mask: Mask,
        return_lse: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend from q [T, H, dn + 64] to k [L, H, dn + 64] and v [L, H, dv].

        Returns
        -------
        torch.Tensor, or a pair of them
            Output [T, H, dv], and LSE float32 [H, T], natural logarithm; -inf, and output 0, where there are no keys.
        """
        if q.dtype not in self.supported_dtypes:
            raise DTypeError(
                f"q must be one of {self.supported_dtypes}, got {q.dtype}; unset use_prefill_query_quantization"
            )
        nope = k.shape[-1] - QK_ROPE_HEAD_DIM
        return prefill(
            q,
            k[..., :nope],
            v,
            k[:, :1, nope:],
            mask,
            cu_seqlens_q,
            cu_seqlens_k,
            self.scale,
            output=out,
            return_lse=return_lse,
            lse_layout="HT",
            q_max_seq_len=max_seqlen_q,
            target=target_of(q.device),
        )


class _ByIndex(_Backend):
    """vLLM 0.26: chunks are columns of the step's tables."""

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from new tokens to all of one chunk of their cached ones."""
        step = self._prefill_metadata
        keys = step.chunked_context.cu_seq_lens[chunk_idx]
        return self._attend(q, k, v, step.query_start_loc, keys, step.max_query_len, _ALL, True)  # type: ignore[return-value]


class _ByChunk(_Backend):
    """vLLM 0.33: a chunk is an object, and may hold some of the step's sequences only."""

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from the new tokens of a chunk's sequences to all of their cached ones in it."""
        return self._attend(  # type: ignore[return-value]
            q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, _ALL, True, out
        )


def _of_this_vllm() -> type[_Backend]:
    names = list(inspect.signature(MLAPrefillBackend.run_prefill_context_chunk).parameters)
    for backend in (_ByIndex, _ByChunk):
        if list(inspect.signature(backend.run_prefill_context_chunk).parameters)[:5] == names[:5]:
            return backend
    raise UnsupportedError(f"this vLLM's run_prefill_context_chunk takes {names}; served: chunk_idx or chunk, q, k, v")


MlaPrefillBackend = _of_this_vllm()
