"""The steps and shapes that ship with the package; mla/data/README.md tells where they come from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mla._paths import PACKAGE
from mla.errors import ArgumentError
from mla.masks import CausalMask, Mask, NullMask

#: Numbers of the steps that `mla demo` takes: ragged, several sequences each, 17 to 28 thousand tokens of context.
DEMO_STEPS = (976, 605, 1283)
#: Numbers of the steps that `mla bench` takes: every 150th of the trace.
BENCH_STEPS = tuple(range(5, 1500, 150))

_STEPS = PACKAGE / "data" / "steps.jsonl"
_SHAPES = PACKAGE / "data" / "shapes.yaml"


@dataclass(frozen=True, slots=True)
class Step:
    """One prefill step: what each sequence of the batch has cached and what it adds, in tokens."""

    name: str
    cached: tuple[int, ...]
    new: tuple[int, ...]
    heads: int = 16
    mask: str = "causal"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Cached and new tokens of each sequence."""
        return tuple(c + n for c, n in zip(self.cached, self.new, strict=True))

    @property
    def causal(self) -> bool:
        """Whether the mask is the causal one; else all keys are visible."""
        return self.mask == "causal"

    @property
    def flops(self) -> int:
        """Operations of attention in q_depth 192 and v_head_dim 128: 2 * (192 + 128) * heads * visible pairs."""
        pairs = sum(
            n * c + n * (n + 1) // 2 if self.causal else n * (c + n) for c, n in zip(self.cached, self.new, strict=True)
        )
        return 2 * (192 + 128) * self.heads * pairs

    def make_mask(self) -> Mask:
        """Return the mask that the step names."""
        return CausalMask() if self.causal else NullMask()


def find_steps(wanted: str | None, default: tuple[int, ...], heads: int) -> list[Step]:
    """Return steps by their numbers in the shipped file, ``"976,605"``, or all of a JSON-lines file of the user's.

    Raises
    ------
    ArgumentError
        A number that is not shipped, or a file that cannot be read as steps.
    """
    path = Path(wanted) if wanted is not None else _STEPS
    numbers: tuple[int, ...] | None = default if wanted is None else None
    if wanted is not None and not path.is_file():
        try:
            numbers, path = tuple(int(number) for number in wanted.split(",")), _STEPS
        except ValueError:
            raise ArgumentError(f"--steps: {wanted!r} is neither a file nor numbers such as 976,605") from None
    known = {step.name: step for step in _read(path, heads)}
    if numbers is None:
        return list(known.values())
    if missing := [number for number in numbers if str(number) not in known]:
        raise ArgumentError(f"--steps: no step {missing[0]}; steps shipped: {', '.join(known)}")
    return [known[str(number)] for number in numbers]


def find_shapes(kind: str, wanted: str | None = None) -> list[Step]:
    """Return the fixed shapes for ``gpu`` or ``cpu``: all of them, or those named, ``"8k,1k"``.

    Raises
    ------
    ArgumentError
        A name that no shape has.
    """
    found = yaml.safe_load(_SHAPES.read_text(encoding="utf-8"))[kind]
    shapes = {
        one["name"]: Step(one["name"], tuple(one["cached"]), tuple(one["new"]), one["heads"], one["mask"])
        for one in found
    }
    names = list(shapes) if wanted is None else wanted.split(",")
    if missing := [name for name in names if name not in shapes]:
        raise ArgumentError(f"--shapes: no shape {missing[0]!r}; shapes for a {kind.upper()}: {', '.join(shapes)}")
    return [shapes[name] for name in names]


def _read(path: Path, heads: int) -> list[Step]:
    steps = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            steps.append(_step(json.loads(line), number, heads))
        except (ValueError, KeyError, TypeError):
            raise ArgumentError(
                f'--steps: {path}:{number} is not a step; a line is {{"cached": [512, 0], "new": [100, 7]}}'
            ) from None
    return steps


def _step(fields: dict[str, Any], line: int, heads: int) -> Step:
    cached, new = ([int(count) for count in fields[name]] for name in ("cached", "new"))
    if len(cached) != len(new) or not new or min(*cached, *new) < 0 or sum(new) == 0:
        raise ValueError
    return Step(str(fields.get("step", line)), tuple(cached), tuple(new), heads)
