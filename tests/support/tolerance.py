"""The error bounds of `mla.tolerance` as assertions."""

from __future__ import annotations

import torch

from mla.tolerance import lse_error, output_error, precision_of

__all__ = ["assert_lse", "assert_output", "precision_of", "same_bits"]


def assert_output(actual: torch.Tensor, expected: torch.Tensor, precision: str, factor: float = 1.0) -> None:
    """Compare an output with the oracle's; rows that are NaN there must have been left NaN."""
    share = output_error(actual, expected, precision)
    assert share <= factor, f"the output is {share:.3g} times its bound away ({precision}); inf: NaN in the wrong rows"


def assert_lse(actual: torch.Tensor, expected: torch.Tensor, precision: str, factor: float = 1.0) -> None:
    """Compare LSE with the oracle's: -inf exactly where it is there, NaN where it was left."""
    share = lse_error(actual, expected, precision)
    assert share <= factor, (
        f"an LSE is {share:.3g} times its bound away ({precision}); inf: NaN or -inf in the wrong rows"
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors of a 16-bit dtype are equal bit by bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
