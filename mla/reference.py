"""The specification as code: what every backend is tested against, in float64 and written to be read.

Nothing here is fast and nothing is shared with the implementations. Inputs are the tensors a caller passes (already
rounded to their dtypes); results are float64 on the device of the inputs. Rows that a call does not touch are NaN.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch

from mla.kv_cache import PagedKVCache
from mla.masks import Mask
from mla.problem import QK_ROPE_HEAD_DIM

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
#: Elements of one float64 score block: bounds the memory of a long sequence.
BLOCK_ELEMENTS = 1 << 24


def plan(
    cached: Sequence[int], new: Sequence[int], page_size: int, buffer_token_size: int, chunks: int
) -> tuple[list[list[int]], list[list[int]], list[int], int]:
    """Return buffer_row_offsets, cache_offsets, buffer_lengths and required_chunks by laying rows out one by one."""
    owner: list[int] = []  # the sequence that has each row of the page-padded batch; never falls
    for s, (old, fresh) in enumerate(zip(cached, new, strict=True)):
        owner += [s] * (math.ceil((old + fresh) / page_size) * page_size)
    batch, size = len(new), buffer_token_size
    rows, offsets, lengths = [], [], []
    for c in range(chunks):
        chunk, before = owner[c * size : (c + 1) * size], owner[: c * size]
        rows.append([bisect_left(chunk, border) for border in range(batch + 1)])
        offsets.append([bisect_right(before, s) - bisect_left(before, s) for s in range(batch)])
        lengths.append(len(chunk) if chunk or batch == 0 else -1)
    return rows, offsets, lengths, math.ceil(len(owner) / size)


def cache_rows(cache: PagedKVCache, b: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latent [n, 512] and rope [n, 64] of the tokens of sequence `b` at `positions`, dequantised."""
    page, slot = positions // cache.page_size, positions % cache.page_size
    if cache.page_indptr is None:
        page = cache.page_table[b][page].long()
    else:
        page = cache.page_table[int(cache.page_indptr[b]) + page].long()
    latent, rope = (cache.latent[page, slot], cache.rope[page, slot])
    scales = None if cache.scales is None else cache.scales[page, slot]
    granularity = cache.quantization_granularity or 1
    return _dequantise(latent, scales, granularity, 0), _dequantise(rope, scales, granularity, latent.shape[-1])


def gather(buffer_row_offsets: torch.Tensor, cache_offsets: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
    """Return the latent rows [buffer_row_offsets[-1], 512] of one chunk of a plan; page padding included."""
    parts = []
    for b in range(cache_offsets.shape[0]):
        count = int(buffer_row_offsets[b + 1]) - int(buffer_row_offsets[b])
        positions = int(cache_offsets[b]) + torch.arange(count, device=cache.latent.device)
        parts.append(cache_rows(cache, b, positions)[0])
    return torch.cat(parts)


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
    cache_offsets: torch.Tensor | None = None,
    start_positions: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    q_scale: torch.Tensor | float | None = None,
    k_scales: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    rope_prescaled: bool = True,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [T, H, dv] and natural-log LSE [T, H]; the arguments are those of `mla.prefill`."""
    total, heads, device = q.shape[0], q.shape[1], q.device
    out = torch.full((total, heads, v.shape[-1]), math.nan, dtype=torch.float64, device=device)
    lse = torch.full((total, heads), math.nan, dtype=torch.float64, device=device)
    sink = torch.full((heads, 1), -math.inf, device=device) if sinks is None else sinks.view(heads, 1)
    queries_of, keys_of = valid_length.tolist(), cache_row_offsets.tolist()
    offsets = [0] * (len(queries_of) - 1) if cache_offsets is None else cache_offsets.tolist()
    starts, lengths = (None if given is None else given.tolist() for given in (start_positions, kv_lengths))
    cached = k_rope.lengths.tolist() if isinstance(k_rope, PagedKVCache) else []

    for b, offset in enumerate(offsets):
        (row, row_end), (key, key_end) = queries_of[b : b + 2], keys_of[b : b + 2]
        new = row_end - row
        if isinstance(k_rope, PagedKVCache):
            kv_len = cached[b] + (0 if k_rope.lengths_include_new else new)
        else:
            kv_len = key_end - key if _is_ragged(k_rope) else k_rope.shape[1]
        start = kv_len - new
        if lengths is not None:
            kv_len = lengths[b]
            if _is_ragged(k_rope):
                start = kv_len - new
        if starts is not None:
            start = starts[b]
        n_keys = min(key_end - key, max(0, kv_len - offset))

        pos_k = offset + torch.arange(n_keys, device=device)
        keys, values = k[key : key + n_keys].double(), v[key : key + n_keys].double()
        rope = _rope_rows(k_rope, k_rope_scales, b, key, pos_k)[:, None].expand(n_keys, heads, QK_ROPE_HEAD_DIM)
        if k_scales is not None:
            per_key = _column(k_scales, k.shape[0], device)[key : key + n_keys, None]
            keys = keys * per_key
            rope = rope * per_key if q_rope is not None and rope_prescaled else rope
        if v_scale is not None:
            values = values * _value_scale(v_scale, key, n_keys, heads, device)
        keys = torch.cat((keys, rope), -1).transpose(0, 1)  # [H, n_keys, q_depth]
        values = values.transpose(0, 1)

        block = max(1, BLOCK_ELEMENTS // max(1, heads * n_keys))
        for first in range(row, row_end, block):
            rows = slice(first, min(row_end, first + block))
            pos_q = start - row + torch.arange(rows.start, rows.stop, device=device)
            queries = _queries(q, q_rope, q_scale, rope_prescaled, rows).transpose(0, 1)
            scores = scale * (queries @ keys.transpose(1, 2))
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores + _bias(mask, b, heads, pos_q - start, pos_k)
            head = torch.arange(heads, device=device)[:, None, None]
            visible = mask.visible(torch.full((), b, device=device), head, pos_q[:, None], pos_k[None, :])
            scores = scores.masked_fill(~visible, -math.inf)

            row_lse = torch.logsumexp(torch.cat((scores, torch.full_like(scores[..., :1], -math.inf)), -1), -1)
            row_lse = torch.logaddexp(row_lse, sink.to(row_lse))
            weights = torch.exp(scores - row_lse[..., None])
            weights = torch.where(scores == -math.inf, 0.0, weights)  # rows without a key: 0, not exp(-inf + inf)
            out[rows] = (weights @ values).transpose(0, 1)
            lse[rows] = row_lse.T
    return out, lse


def merge(
    prefix_output: torch.Tensor, prefix_lse: torch.Tensor, suffix_output: torch.Tensor, suffix_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [T, H, dv] and LSE [T, H] of attention over both key sets; an LSE of +inf counts as empty."""
    a, b = (torch.where(x.double() == math.inf, -math.inf, x.double()) for x in (prefix_lse, suffix_lse))
    lse = torch.logaddexp(a, b)
    out = torch.zeros_like(prefix_output, dtype=torch.float64)
    for part_lse, part in ((a, prefix_output), (b, suffix_output)):
        present = part_lse != -math.inf
        out += torch.where(present, torch.exp(part_lse - lse), 0.0)[..., None] * torch.where(
            present[..., None], part.double(), 0.0
        )
    return out, lse


def _dequantise(data: torch.Tensor, scales: torch.Tensor | None, granularity: int, base: int) -> torch.Tensor:
    """Return float64 data; an fp8 column d has the scale of block (base + d) // granularity of its row."""
    if data.dtype not in FP8_DTYPES or scales is None:
        return data.double()
    blocks = (base + torch.arange(data.shape[-1], device=data.device)) // granularity
    return data.double() * scales.double()[..., blocks]


def _is_ragged(k_rope: PagedKVCache | torch.Tensor) -> bool:
    return isinstance(k_rope, torch.Tensor) and k_rope.ndim == 3


def _rope_rows(
    k_rope: PagedKVCache | torch.Tensor, scales: torch.Tensor | None, b: int, key: int, pos_k: torch.Tensor
) -> torch.Tensor:
    """Return the rope part [n_keys, dr] of the keys: by position, but for ragged tensors by row."""
    if isinstance(k_rope, PagedKVCache):
        return cache_rows(k_rope, b, pos_k)[1]
    index: tuple[int | torch.Tensor, ...] = (b, pos_k)
    if _is_ragged(k_rope):
        index = (key + torch.arange(pos_k.shape[0], device=pos_k.device),)
    columns = k_rope.shape[-1]
    row_scales = None if scales is None else scales[index][:, 0]
    granularity = next((g for g in (64, 128, 576) if scales is not None and -(-columns // g) == scales.shape[-1]), 1)
    base = columns - QK_ROPE_HEAD_DIM
    return _dequantise(k_rope[index][:, 0, base:], row_scales, granularity, base)


def _column(scale: torch.Tensor | float, rows: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(scale, dtype=torch.float64, device=device).reshape(-1, 1).expand(rows, 1)


def _value_scale(scale: torch.Tensor | float, key: int, n_keys: int, heads: int, device: torch.device) -> torch.Tensor:
    """Return a factor that broadcasts with [n_keys, H, dv]: a scalar, [H], or [L, 1]."""
    tensor = torch.as_tensor(scale, dtype=torch.float64, device=device)
    if tensor.ndim == 2:
        return tensor[key : key + n_keys, :, None]
    return tensor.reshape(1, -1, 1)


def _queries(
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    q_scale: torch.Tensor | float | None,
    rope_prescaled: bool,
    rows: slice,
) -> torch.Tensor:
    """Return the queries [n, H, q_depth] with their scale applied where it belongs."""
    nope = q[rows].double()
    factor = _column(1.0 if q_scale is None else q_scale, q.shape[0], q.device)[rows, None]
    if q_rope is None:
        return nope * factor
    rope = q_rope[rows].double()
    return torch.cat((nope * factor, rope * factor if rope_prescaled else rope), -1)


def _bias(mask: Mask, b: int, heads: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the sum of the mask's biases [H or 1, rows, columns]; -inf outside the extent of one of them."""
    total = torch.zeros(1, rows.shape[0], columns.shape[0], dtype=torch.float64, device=rows.device)
    for bias in mask.biases:
        height, width = bias.shape[2:]
        inside = ((rows >= 0) & (rows < height))[:, None] & (columns < width)[None, :]
        if height == 0 or width == 0:
            return total - math.inf
        block = bias[b].double()[:, rows.clamp(0, height - 1)][:, :, columns.clamp(0, width - 1)]
        total = total + torch.where(inside, block, -math.inf)
    return total
