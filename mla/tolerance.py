"""The error bounds that every backend is held to, against the float64 oracle."""

from __future__ import annotations

import math

import torch

#: Relative Frobenius error of an output, on N(0, 1) inputs, by precision.
FROBENIUS = {"fp32": 1e-5, "bf16": 4e-3, "fp16": 4e-3, "fp8": 5e-2}


def precision_of(dtypes: str) -> str:
    """Return the precision of a row of `mla.problem.PREFILL_DTYPES`; fp8 rope alone counts as its 16-bit partner."""
    return "fp8" if dtypes.startswith("fp8") else dtypes.split("+")[0]


def output_error(actual: torch.Tensor, expected: torch.Tensor, precision: str) -> float:
    """Return the error of an output as a share of its bound: up to 1 is within it.

    Infinite where one of the two is NaN and the other is not: a row that was to be written, or one that was to be left.
    In bf16 and fp16 each element has a bound of its own too, ``1e-2 + 2^-7 |expected|``.
    """
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    written = ~expected.isnan()
    if not torch.equal(~actual.isnan(), written):
        return math.inf
    actual, expected = actual[written], expected[written]
    difference = (actual - expected).abs()
    norm = expected.norm().item()
    share = difference.norm().item() / (norm or 1.0) / FROBENIUS[precision]
    if precision in ("bf16", "fp16") and difference.numel():
        share = max(share, (difference / (1e-2 + 2**-7 * expected.abs())).max().item())
    return share


def lse_error(actual: torch.Tensor, expected: torch.Tensor, precision: str) -> float:
    """Return the error of an LSE as a share of its bound; infinite where -inf or NaN stand in only one of the two."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    for special in (torch.isnan, torch.isinf):
        if not torch.equal(special(actual), special(expected)):
            return math.inf
    finite = expected.isfinite()
    absolute, relative = (1e-2, 2e-3) if precision == "fp8" else (1e-4, 1e-5)
    share = (actual - expected).abs()[finite] / (absolute + relative * expected[finite].abs())
    return share.max().item() if share.numel() else 0.0
