"""What all layers of one forward pass share: who sees whom, and which rows belong to which sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import causal_mask_function

from mla.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from mla.masks import CausalMask, Mask, MaterializedMask

#: Columns of a bias are padded to so many, which keeps its rows on the 16-byte borders that kernels ask for.
_BIAS_COLUMNS = 8


class Rows(NamedTuple):
    """Rows of q and of k that each sequence has, as `mla.prefill` takes them; int32 on the device of the call."""

    cu_seqlens_q: torch.Tensor  # [B+1]
    cache_row_offsets: torch.Tensor  # [B+1]
    kv_lengths: torch.Tensor  # [B]; rows of k from there to the next sequence's first are another head's
    max_seqlen_q: int


@dataclass
class Step:
    """The mask of one forward pass, made by `prepare_step` and handed to every layer as its attention mask.

    Attributes
    ----------
    mask : Mask
    packed : bool
        Several sequences stand end to end in each row of the batch; position_ids or cu_seq_lens_q say where.
    padded : bool
        Some keys are padding, which `mask` hides.
    """

    mask: Mask
    packed: bool = False
    padded: bool = False
    _rows: Rows | None = field(default=None, repr=False)

    def rows(self, query: torch.Tensor, key: torch.Tensor, stride: int, kwargs: dict[str, Any]) -> Rows:
        """Return the rows of each sequence; worked out in the first layer.

        Parameters
        ----------
        query, key : torch.Tensor
            [B, H, Sq, D] and [B, H, Sk, D].
        stride : int
            Rows of k between the first tokens of two rows of the batch.
        kwargs : dict
            What transformers passes beside: position_ids, cu_seq_lens_q, cu_seq_lens_k, max_length_q.
        """
        if self._rows is None:
            offsets = kwargs.get("cu_seq_lens_q")
            if offsets is not None:
                self._rows = self._given_rows(query, key, kwargs)
            elif self.packed:
                self._rows = _packed_rows(kwargs.get("position_ids"), query, stride)
            else:
                self._rows = _whole_rows(query, key, stride)
        return self._rows

    def _given_rows(self, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]) -> Rows:
        if query.shape[0] != 1 or self.padded:
            what = "a padded batch" if self.padded else f"a batch of {query.shape[0]}"
            raise ArgumentError(f"cu_seq_lens_q describes sequences packed into one row, got {what} with it")
        cu_q, cu_k = (kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
        if not isinstance(cu_q, torch.Tensor) or not isinstance(cu_k, torch.Tensor):
            raise ArgumentError("cu_seq_lens_q and cu_seq_lens_k must be given together, as tensors")
        cu_q, cu_k = (x.to(query.device, torch.int32) for x in (cu_q, cu_k))
        longest = kwargs.get("max_length_q")
        return Rows(cu_q, cu_k, cu_k.diff(), query.shape[2] if longest is None else int(longest))


def prepare_step(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Step:
    """Make the mask of one forward pass; transformers calls it by the name that `register` gives it.

    Synchronises once where `attention_mask` is given, to find its form, as transformers does for FlashAttention.

    Parameters
    ----------
    batch_size, q_length, kv_length, q_offset, kv_offset
        Extents of the pass: queries, keys, and the position of the first of each.
    mask_function : callable
        transformers' own causal function, or that of packed sequences.
    attention_mask : torch.Tensor, optional
        bool [batch_size, kv_length], False where a key is padding.

    Raises
    ------
    UnsupportedError
        A static cache, a sliding window, or a mask function of the caller's.
    ShapeError
        `attention_mask` has another extent than the keys.
    """
    if isinstance(q_offset, torch.Tensor) or kv_offset or q_offset + q_length != kv_length:
        raise UnsupportedError(
            f"queries must be the last of the keys, got {q_length} queries from position {q_offset} and {kv_length} "
            f"keys from position {kv_offset}; in the place of a StaticCache use a DynamicCache or LatentCache"
        )
    packed = mask_function is not causal_mask_function
    if packed and (use_vmap or attention_mask is not None or q_offset):
        raise UnsupportedError(
            "mask functions other than the causal one are not taken; pass a 4-D attention_mask, bool or additive"
        )
    if attention_mask is None:
        return Step(CausalMask(), packed)
    if tuple(attention_mask.shape) != (batch_size, kv_length):
        raise ShapeError(
            f"attention_mask must have shape {(batch_size, kv_length)}, got {tuple(attention_mask.shape)}; "
            "it covers cached tokens too"
        )
    return _padded(attention_mask, q_length)


def step_of_bias(attention_mask: torch.Tensor, query: torch.Tensor, keys: int) -> Step:
    """Return the step of a mask that the caller prepared: [B or 1, 1 or H, Sq, Sk], bool or additive.

    An additive element at the least number of its dtype hides, as -inf does.
    """
    queries = query.shape[2]
    if attention_mask.ndim != 4 or tuple(attention_mask.shape[2:]) != (queries, keys):
        raise ShapeError(f"attention_mask must have shape (*, *, {queries}, {keys}), got {tuple(attention_mask.shape)}")
    if attention_mask.dtype == torch.bool:
        hidden, bias = ~attention_mask, torch.zeros((), dtype=query.dtype, device=query.device)
    elif attention_mask.dtype.is_floating_point:
        hidden, bias = attention_mask <= torch.finfo(attention_mask.dtype).min, attention_mask
    else:
        raise DTypeError(f"a 4-D attention_mask must be bool or additive, got {attention_mask.dtype}")
    bias = torch.where(hidden, -torch.inf, bias)
    return Step(MaterializedMask(_aligned(bias).expand(query.shape[0], -1, -1, -1)), padded=True)


def query_rows(query: torch.Tensor) -> torch.Tensor:
    """Return [B, H, S, D] as rows [B * S, H, D]: a view where B is 1."""
    return query[0].transpose(0, 1) if query.shape[0] == 1 else query.transpose(1, 2).flatten(0, 1)


def _padded(visible: torch.Tensor, q_length: int) -> Step:
    """Return the causal mask over keys that are not padding: as an interval of each sequence where it is one."""
    batch_size, keys = visible.shape
    first = visible.int().argmax(1)
    end = keys - visible.flip(1).int().argmax(1)
    everything, intervals = torch.stack([visible.all(), (visible.sum(1) == end - first).all()]).tolist()  # the sync
    if everything:
        return Step(CausalMask())
    if intervals:
        # Keys from `end` on are seen by queries from there on alone, which are padding too.
        first = first.int()
        return Step(Mask.from_function(lambda b, h, q, k: (k <= q) & (k >= first[b])), padded=True)
    bias = _aligned(torch.where(visible, 0.0, -torch.inf)[:, None, None])
    return Step(CausalMask() & MaterializedMask(bias.expand(batch_size, 1, q_length, keys)), padded=True)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """Return a bias whose rows are `_BIAS_COLUMNS` apart, or a multiple."""
    keys = bias.shape[-1]
    wide = bias.new_empty(*bias.shape[:-1], -(-keys // _BIAS_COLUMNS) * _BIAS_COLUMNS)
    wide[..., :keys] = bias
    return wide[..., :keys]


def _whole_rows(query: torch.Tensor, key: torch.Tensor, stride: int) -> Rows:
    """One sequence in each row of the batch."""
    batch_size, _, queries, _ = query.shape
    keys = key.shape[2]
    number = torch.arange(batch_size + 1, dtype=torch.int32, device=query.device)
    row_offsets = (number * stride).clamp_(max=(batch_size - 1) * stride + keys)
    return Rows(number * queries, row_offsets, torch.full_like(number[1:], keys), queries)


def _packed_rows(position_ids: torch.Tensor | None, query: torch.Tensor, stride: int) -> Rows:
    """A sequence begins in each row of the batch, and wherever positions do not go on by one. One sync."""
    batch_size, _, tokens, _ = query.shape
    if position_ids is None:
        raise ArgumentError("packed sequences need position_ids, or cu_seq_lens_q and cu_seq_lens_k")
    positions = position_ids.expand(batch_size, tokens)
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff() != 1
    begin = begins.flatten().nonzero().flatten().int()
    cu_seqlens_q = torch.cat([begin, begin.new_tensor([batch_size * tokens])])
    rows = begin // tokens * stride + begin % tokens
    row_offsets = torch.cat([rows, rows.new_tensor([(batch_size - 1) * stride + tokens])])
    return Rows(cu_seqlens_q, row_offsets, cu_seqlens_q.diff(), tokens)
