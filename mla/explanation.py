"""The answer of `mla.explain`: every candidate with its reasons, as text and as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mla.problem import Problem


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation and what speaks for and against it.

    Attributes
    ----------
    merits, against : tuple of str
        Conditions met and not met, one sentence each; ``against`` is empty when the implementation fits.
    notes : tuple of str
        What is worth knowing without deciding anything, such as that this machine has no such device.
    origin : str
        ``file:line`` that registered it.
    """

    id: str
    backend: str
    priority: int
    merits: tuple[str, ...]
    against: tuple[str, ...]
    notes: tuple[str, ...]
    origin: str


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """Every candidate for one problem on one target, in the order they are tried; prints as text.

    Attributes
    ----------
    chosen : str or None
        Id of the first candidate with nothing against it.
    """

    op: str
    problem: str
    target: str
    chosen: str | None
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and strings, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.target}: {self.chosen or 'no implementation fits'}", f"  problem: {self.problem}"]
        lines += [f"  note: {note}" for note in self.notes]
        for one in self.candidates:
            verdict = "chosen" if one.id == self.chosen else "refused" if one.against else "fits, but comes later"
            lines.append(f"  {one.id} (priority {one.priority}): {verdict}")
            lines += [f"    - {reason}" for reason in one.against]
            lines += [f"    + {reason}" for reason in one.merits]
            lines += [f"    note: {note}" for note in one.notes]
        return "\n".join(lines)

    __repr__ = __str__


def describe(problem: Problem) -> str:
    """Put a problem into one line."""
    parts = [f"dtype {problem.dtypes}"]
    if problem.out_dtype:
        parts.append(f"output {problem.out_dtype}")
    if problem.op == "prefill":
        parts.append(f"q_depth {problem.dims[0]}, v_head_dim {problem.dims[1]}")
    if problem.page_size:
        parts.append(f"page size {problem.page_size}{' (csr)' if problem.csr else ''}")
    if problem.rope:
        parts.append(f"{problem.rope} rope")
    if problem.mask is not None:
        parts.append(problem.mask.name)
    if problem.granularity:
        parts.append(f"granularity {problem.granularity}")
    parts.append(f"alignment {problem.alignment} bytes")
    return ", ".join([*parts, *sorted(problem.features)])
