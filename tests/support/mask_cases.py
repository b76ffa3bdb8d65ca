"""Masks that every printer is tried on, and random points and tiles to try them at."""

from __future__ import annotations

import torch

from mla.masks import (
    CausalMask,
    CausalPaddingMask,
    ChunkedCausalMask,
    ChunkedMask,
    Mask,
    MaterializedMask,
    NullMask,
    SlidingWindowCausalMask,
    SlidingWindowNonCausalMask,
)
from tests.support.mask_expressions import BATCH, HEADS

LENGTHS = torch.tensor([0, 7, 25])
PER_HEAD = torch.tensor([4, 1], dtype=torch.int32)


def _biases() -> list[torch.Tensor]:
    special = torch.tensor([0.0, -torch.inf, torch.inf, 6e-8, -5.9e-5, 65504.0])
    full = torch.cat([torch.randn(BATCH * HEADS * 9 * 13 - 6), special]).view(BATCH, HEADS, 9, 13)
    return [full, full[:, :1].to(torch.bfloat16).expand(-1, -1, 9, 13), full.half()[:, :, ::2, :11], full[:, 0]]


def masks() -> dict[str, Mask]:
    """Return the masks by name; the biases are drawn from torch's generator."""
    fp32, bf16, fp16, shared = _biases()
    return {
        "null": NullMask(),
        "causal": CausalMask(),
        "chunked": ChunkedMask(5),
        "chunked by a power of two": ChunkedMask(8),
        "chunked causal": ChunkedCausalMask(5),
        "window": SlidingWindowCausalMask(6),
        "widest window": SlidingWindowCausalMask(2**31 - 1),
        "window, non-causal": SlidingWindowNonCausalMask(6),
        "padding": CausalPaddingMask(LENGTHS),
        "sinks": Mask.from_function(lambda b, h, q, k: (k <= q) & ((q - k < 9) | (k < 3))),
        "chunks by head": Mask.from_function(
            lambda b, h, q, k: (q // PER_HEAD[h] == k // PER_HEAD[h]) | (k < LENGTHS[b])
        ),
        "least integer": Mask.from_function(lambda b, h, q, k: (k > -(2**31)) & (q % 4 != k % -4)),
        "bias": MaterializedMask(fp32),
        "two biases": CausalMask() & MaterializedMask(bf16) & MaterializedMask(fp16),
        "bias for all heads": MaterializedMask(shared),
    }


def random_points(count: int = 4000) -> torch.Tensor:
    """Draw [count, 4] of b, h, q, k; positions on both sides of 0."""
    b, h = torch.randint(BATCH, (count,)), torch.randint(HEADS, (count,))
    return torch.stack([b, h, *torch.randint(-30, 30, (2, count))], 1)


def random_tiles(count: int = 4000) -> torch.Tensor:
    """Draw [count, 6] of b, h, q_lo, q_hi, k_lo, k_hi."""
    points, sizes = random_points(count), torch.randint(0, 12, (count, 2))
    q, k = points[:, 2], points[:, 3]
    return torch.stack([points[:, 0], points[:, 1], q, q + sizes[:, 0], k, k + sizes[:, 1]], 1)
