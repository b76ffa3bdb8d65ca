"""The entries that the registry names, and which kernels of theirs are compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

from mla.backends.rocm.compiler import ARCHS
from mla.backends.rocm.gather import Gather
from mla.backends.rocm.merge import Merge
from mla.backends.rocm.plan import Plan
from mla.backends.rocm.prefill import Prefill
from mla.backends.rocm.quantize import Quantize
from mla.backends.rocm.store import Store
from mla.problem import Problem

__all__ = ["ENTRIES", "Gather", "Merge", "Plan", "Prefill", "Quantize", "Store", "variants"]

ENTRIES = (Plan, Gather, Store, Prefill, Merge, Quantize)


def variants(arch: str) -> Iterator[tuple[str, Problem]]:
    """Yield (kernel id, problem) of every kernel that is compiled ahead for an architecture, each kernel once."""
    if arch not in ARCHS:
        return
    seen = set()
    for entry in ENTRIES:
        for problem in entry.problems(arch):
            for spec in entry.specs(problem, arch):
                if (kernel_id := spec.kernel_id(arch)) not in seen:
                    seen.add(kernel_id)
                    yield kernel_id, problem
