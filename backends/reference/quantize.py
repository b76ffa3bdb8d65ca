"""Rows to fp8 in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mla.problem import Problem, QuantizeArgs


class Quantize:
    """`quantize` for CPU tensors."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return None: every quantisation fits."""
        return None

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[QuantizeArgs], None]:
        """Return the callable that runs the problem."""
        static, granularity = "static_scale" in problem.features, problem.granularity

        @torch.inference_mode()
        def run(args: QuantizeArgs) -> None:
            tokens, heads, width = args.x.shape
            if static:
                args.output.copy_(_divided(args.x.to(torch.float32), args.scale, args.output.dtype))
                return
            rows = args.x.reshape(-1, width) if granularity else args.x.reshape(tokens, heads * width)
            stored, scales = quantize_rows(rows, granularity or heads * width, args.output.dtype)
            args.output.copy_(stored.reshape(args.x.shape))
            args.scale.copy_(scales.view(args.scale.shape))

        return run


def _divided(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limits = torch.finfo(dtype)
    return (values / scales).clamp_(limits.min, limits.max).to(dtype)


def quantize_rows(values: torch.Tensor, granularity: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [n, D] to fp8 with one scale for each `granularity` columns.

    The largest magnitude of a block becomes the largest fp8 number. A scale is at least the smallest normal f32, so
    that a block of zeros divides to zeros.

    Returns
    -------
    tuple of torch.Tensor
        The stored values [n, D] and their scales, f32 [n, ceil(D / granularity)].
    """
    limits, width = torch.finfo(dtype), values.shape[1]
    blocks = -(-width // granularity)
    padded = torch.nn.functional.pad(values.to(torch.float32), (0, blocks * granularity - width))
    padded = padded.view(-1, blocks, granularity)
    scales = (padded.abs().amax(dim=2) / limits.max).clamp_(min=torch.finfo(torch.float32).tiny)
    stored = _divided(padded, scales[..., None], dtype)
    return stored.view(-1, blocks * granularity)[:, :width], scales
