"""What the entries of this backend share."""

from __future__ import annotations

import torch

from mla.backends.triton.runtime import interpreted
from mla.problem import Problem


class Entry:
    """An entry that every GPU serves, and the CPU where Triton's interpreter is on."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return why a problem cannot be served, or None."""
        if arch == "cpu" and not interpreted():
            return "CPU tensors need TRITON_INTERPRET=1 in the environment"
        return None


def search_steps(batch_size: int) -> int:
    """Return how many halvings find one of `batch_size` sequences."""
    return max(batch_size - 1, 1).bit_length()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View fp8 as bytes: kernels decode it themselves."""
    return x.view(torch.uint8)
