"""The prefill plan in torch: all sequences and chunks at once, exact in int64."""

from __future__ import annotations

import torch

from mla.problem import PlanArgs


@torch.inference_mode()
def plan(args: PlanArgs) -> None:
    """Fill the tables of `args`; `mla.plan` has the formulas."""
    cache, capacity, page_size = args.cache, args.buffer_token_size, args.cache.page_size
    if cache.batch_size == 0:
        args.buffer_lengths.zero_()
        if args.required_chunks is not None:
            args.required_chunks.zero_()
        return
    padded = (cache.total_lengths(args.input_row_offsets) + page_size - 1) // page_size * page_size
    starts = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    total = starts[-1]
    chunk_starts = torch.arange(args.buffer_lengths.shape[0], device=starts.device) * capacity
    args.buffer_row_offsets.copy_((starts - chunk_starts[:, None]).clamp_(0, capacity))
    args.cache_offsets.copy_((chunk_starts[:, None] - starts[:-1]).clamp_(min=0).minimum(padded))
    left = total - chunk_starts
    args.buffer_lengths.copy_(torch.where(left > 0, left.clamp(max=capacity), -1))
    if args.required_chunks is not None:
        args.required_chunks.copy_((total + capacity - 1) // capacity)
