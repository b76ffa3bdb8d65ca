"""Conditions that an implementation states in the registry, and how a problem meets them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mla.problem import Problem


@dataclass(frozen=True, slots=True)
class PageSize:
    """Page sizes an implementation takes: within [min, max] and a multiple of ``multiple_of``."""

    min: int = 1
    max: int | None = None
    multiple_of: int = 1

    def __contains__(self, size: int) -> bool:
        return self.min <= size <= (self.max or size) and size % self.multiple_of == 0

    def __str__(self) -> str:
        upper = f", at most {self.max}" if self.max else ""
        return f"at least {self.min}{upper} and a multiple of {self.multiple_of}"


@dataclass(frozen=True, slots=True)
class Requirements:
    """Conditions on a problem and an architecture; None states no condition. The keys are told in docs/design.md."""

    arch: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    out_dtypes: tuple[str, ...] | None = None
    dims: tuple[tuple[int, int], ...] | None = None
    rope: tuple[str, ...] | None = None
    page_size: PageSize | None = None
    granularity: tuple[int, ...] | None = None
    masks: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None
    alignment: int | None = None

    def compare(self, problem: Problem, arch: str | None) -> tuple[list[str], list[str]]:
        """Hold each stated condition against a problem.

        Parameters
        ----------
        problem : Problem
        arch : str or None
            None where no device and no target says it; a condition on it is then not met.

        Returns
        -------
        merits, faults : list of str
            One sentence for each condition that is met, and for each that is not.
        """
        merits: list[str] = []
        faults: list[str] = []

        def state(fits: bool, what: str, value: object, wanted: str) -> None:
            (merits if fits else faults).append(f"{what} {value} {'is' if fits else 'is not'} {wanted}")

        def one_of(allowed: tuple[object, ...] | None, what: str, value: object) -> None:
            if allowed is not None and value not in (None, "", 0):
                state(value in allowed, what, value, f"in {listed(allowed)}")

        if self.arch is not None and arch is None:
            faults.append(
                f"needs architecture {listed(self.arch)}, and neither a device here nor the target says which"
            )
        elif self.arch is not None and arch is not None:
            fits = any(fnmatchcase(arch, pattern) for pattern in self.arch)
            state(fits, "architecture", arch, f"in {listed(self.arch)}")
        one_of(self.dtypes, "dtype", problem.dtypes)
        one_of(self.out_dtypes, "output dtype", problem.out_dtype)
        one_of(self.dims, "(q_depth, v_head_dim)", problem.dims)
        one_of(self.rope, "rope", problem.rope)
        if self.page_size is not None and problem.page_size:
            state(problem.page_size in self.page_size, "page size", problem.page_size, str(self.page_size))
        one_of(self.granularity, "granularity", problem.granularity)
        one_of(self.masks, "mask", problem.mask and problem.mask.name)
        if self.features is not None and problem.features:
            missing = problem.features - set(self.features)
            if missing:
                faults.append(f"does not do {listed(sorted(missing))}")
            else:
                merits.append(f"does {listed(sorted(problem.features))}")
        if self.alignment is not None:
            fits = problem.alignment >= self.alignment
            state(fits, "alignment", f"{problem.alignment} bytes", f"at least {self.alignment}")
        return merits, faults


def listed(values: Iterable[object]) -> str:
    """Join values for a sentence."""
    return ", ".join(map(str, values)) or "none"
