"""The entries that the registry names, and which kernels of theirs are compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

from mla.backends.cuda.gather import Gather
from mla.backends.cuda.merge import Merge
from mla.backends.cuda.plan import Plan
from mla.backends.cuda.prefill_fp8_sm90 import PrefillFp8Sm90
from mla.backends.cuda.prefill_sm80 import PrefillSm80
from mla.backends.cuda.prefill_sm90 import PrefillSm90
from mla.backends.cuda.project import ProjectSm90
from mla.backends.cuda.quantize import Quantize
from mla.backends.cuda.store import Store
from mla.problem import Problem

__all__ = [
    "ENTRIES",
    "Gather",
    "Merge",
    "Plan",
    "PrefillFp8Sm90",
    "PrefillSm80",
    "PrefillSm90",
    "ProjectSm90",
    "Quantize",
    "Store",
    "variants",
]

ENTRIES = (Plan, Gather, Store, Merge, PrefillSm80, PrefillSm90, PrefillFp8Sm90, ProjectSm90, Quantize)


def variants(arch: str) -> Iterator[tuple[str, Problem]]:
    """Yield (kernel id, problem) of every kernel that is compiled ahead for an architecture, each kernel once."""
    seen = set()
    for entry in ENTRIES:
        for problem in entry.problems(arch):
            for spec in entry.specs(problem, arch):
                if (kernel_id := spec.kernel_id(arch)) not in seen:
                    seen.add(kernel_id)
                    yield kernel_id, problem
