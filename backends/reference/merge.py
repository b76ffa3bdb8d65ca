"""The weighted mean of two attention results over disjoint key sets, in torch on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mla.problem import MergeArgs, Problem

#: Rows merged at a time: bounds the fp32 copies of the parts.
BLOCK_ROWS = 1024


class Merge:
    """`merge` for CPU tensors: any strides, aliasing allowed."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: every merge fits."""
        return None

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[MergeArgs], None]:
        """Return the function that merges."""
        return merge


@torch.inference_mode()
def merge(args: MergeArgs) -> None:
    """Write the merged rows block by block, so that an output may alias a part."""
    for first in range(0, args.output.shape[0], BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        prefix_lse, suffix_lse = (
            lse[rows].masked_fill(lse[rows] == math.inf, -math.inf) for lse in (args.prefix_lse, args.suffix_lse)
        )
        lse = torch.logaddexp(prefix_lse, suffix_lse)
        merged = torch.zeros(args.output[rows].shape, dtype=torch.float32, device=args.output.device)
        sides = ((prefix_lse, suffix_lse, args.prefix_output), (suffix_lse, prefix_lse, args.suffix_output))
        for own, other, part in sides:
            present = (own != -math.inf).unsqueeze(-1)
            weight = torch.sigmoid(own - other).unsqueeze(-1)  # exp(own - lse) without the rounding of a large lse
            merged += torch.where(present, part[rows].float() * weight, 0.0)  # an empty side may hold NaN
        args.output[rows].copy_(merged)
        if args.output_lse is not None:
            args.output_lse[rows].copy_(lse)
