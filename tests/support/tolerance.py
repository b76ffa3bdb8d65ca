"""The error bounds of the specification, against the float64 oracle."""

from __future__ import annotations

import math

import torch

#: Relative Frobenius error by row of the dtype table; fp8 in any operand of the products counts as fp8.
FROBENIUS = {"fp32": 1e-5, "bf16": 4e-3, "fp16": 4e-3, "fp8": 5e-2}


def precision_of(dtypes: str, out_dtype: str = "") -> str:
    """Return the key of the bounds for a row of `mla.problem.PREFILL_DTYPES`; fp8 rope counts as its 16-bit partner."""
    return "fp8" if dtypes.startswith("fp8") else dtypes.split("+")[0]


def assert_output(actual: torch.Tensor, expected: torch.Tensor, precision: str, factor: float = 1.0) -> None:
    """Compare an output with the oracle's; rows that are NaN there must have been left NaN."""
    actual, expected = actual.detach().double().cpu(), expected.cpu()
    untouched = expected.isnan()
    assert torch.equal(actual.isnan(), untouched), "NaN in a row that was to be written, or a row that was to stay"
    actual, expected = actual[~untouched], expected[~untouched]
    error = (actual - expected).abs()
    norm = expected.norm().item()
    frobenius = error.norm().item() / norm if norm else error.norm().item()
    assert frobenius <= factor * FROBENIUS[precision], f"relative Frobenius error {frobenius:.2e} ({precision})"
    if precision in ("bf16", "fp16"):
        excess = (error - factor * (1e-2 + 2**-7 * expected.abs())).max().item() if error.numel() else 0.0
        assert excess <= 0, f"an element is {excess:.2e} beyond its bound ({precision})"


def assert_lse(actual: torch.Tensor, expected: torch.Tensor, precision: str, factor: float = 1.0) -> None:
    """Compare LSE with the oracle's: -inf exactly where it is there, NaN where it was left."""
    actual, expected = actual.detach().double().cpu(), expected.cpu()
    assert torch.equal(actual.isnan(), expected.isnan()), (
        "NaN in an LSE that was to be written, or one that was to stay"
    )
    empty = expected == -math.inf
    assert torch.equal(actual == -math.inf, empty), "-inf where there are keys, or none where there are none"
    actual, expected = (x[~empty & ~expected.isnan()] for x in (actual, expected))
    absolute, relative = (1e-2, 2e-3) if precision == "fp8" else (1e-4, 1e-5)
    excess = (actual - expected).abs() - factor * (absolute + relative * expected.abs())
    assert not excess.numel() or excess.max() <= 0, (
        f"an LSE is {excess.max().item():.2e} beyond its bound ({precision})"
    )
