"""The reference entries of the registry. Nothing is compiled: preparing one returns the function itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mla.backends.reference.gather import gather
from mla.backends.reference.merge import Merge
from mla.backends.reference.plan import plan
from mla.backends.reference.prefill import Prefill
from mla.backends.reference.quantize import Quantize
from mla.backends.reference.store import store
from mla.problem import GatherArgs, PlanArgs, Problem, StoreArgs

__all__ = ["Gather", "Merge", "Plan", "Prefill", "Quantize", "Store"]


class _Anything:
    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return why a problem cannot be served: never."""
        return None


class Plan(_Anything):
    """The plan, exact in int64."""

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PlanArgs], None]:
        """Return the callable that runs the problem."""
        return plan


class Gather(_Anything):
    """Latent rows out of the pages."""

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[GatherArgs], None]:
        """Return the callable that runs the problem."""
        return gather


class Store(_Anything):
    """This step's rows into the pages."""

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[StoreArgs], None]:
        """Return the callable that runs the problem."""
        return store
