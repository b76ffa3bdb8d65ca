"""From a problem and a target to the implementation that serves it, or to every reason why none does.

`resolve` is the hot path: a hit is one look-up. `explain` tells the same story in words, for hardware that is here or not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch

from mla import registry
from mla.errors import ArgumentError, DeviceError, UnsupportedError
from mla.explanation import Candidate, Explanation, describe
from mla.problem import OPS, Op, Problem
from mla.registry import Implementation, Requirements
from mla.target import BACKENDS, Availability, Target, device_arch, runs_on

Runner = Callable[[Any], None]
_V = TypeVar("_V")
_memos: weakref.WeakSet[Memo] = weakref.WeakSet()
_lock = threading.RLock()


class Memo(dict[Hashable, Any]):
    """A bounded dict for what was derived from the registry; empties when the registry changes. Look up with ``get``.

    Keys must not hold tensors. The oldest entry leaves first.
    """

    __slots__ = ("__weakref__", "limit")
    __hash__ = object.__hash__  # the WeakSet goes by identity

    def __init__(self, limit: int = 1024) -> None:
        super().__init__()
        self.limit = limit
        _memos.add(self)

    def remember(self, key: Hashable, value: _V) -> _V:
        """Store and return ``value``."""
        with _lock:
            if len(self) >= self.limit:
                del self[next(iter(self))]
            self[key] = value
        return value


def clear() -> None:
    """Forget every choice and prepared callable."""
    with _lock:
        for memo in _memos:
            memo.clear()


registry.on_change(clear)

_runners = Memo()
_choices = Memo()


def resolve(problem: Problem, target: Target | str, device: torch.device) -> Runner:
    """Return the prepared callable that serves ``problem`` on ``device``.

    Parameters
    ----------
    problem : Problem
    target : Target or str
    device : torch.device
        Device of the call's tensors.

    Returns
    -------
    callable
        Takes the op's ``*Args`` and launches on torch's current stream; nothing is compiled when it is called.

    Raises
    ------
    TargetError, DeviceError, UnsupportedError, CompileError
    """
    key = (problem, target, device)
    runner = _runners.get(key)
    if runner is None:
        with _lock:  # one compile a problem, however many threads ask
            runner = _runners.get(key)
            if runner is None:
                entry = chosen(problem, target, device).load()
                runner = _runners.remember(key, entry.prepare(problem, device))
    return cast("Runner", runner)


def chosen(problem: Problem, target: Target | str, device: torch.device) -> Implementation:
    """Return the implementation that `resolve` prepares; raises as it does, but compiles nothing."""
    key = (problem, target, device)
    implementation = _choices.get(key)
    if implementation is None:
        explanation = _explain(problem, _check_device(_parse(target), device), device)
        if explanation.chosen is None:
            raise UnsupportedError(f"{problem.op}: nothing serves this problem on target {str(target)!r}", explanation)
        implementation = _choices.remember(key, registry.default()[explanation.chosen])
    return cast("Implementation", implementation)


def explain(
    op: Op | str,
    problem: Problem | None = None,
    *,
    target: Target | str = "gpu",
    device: torch.device | str | None = None,
    **fields: Any,
) -> Explanation:
    """Tell which implementation serves an op on a target, and why each of the others does or does not.

    Works for hardware that is not here: requirements are judged by the target's architecture, and what this machine
    lacks is said in a note.

    Parameters
    ----------
    op : str
        ``plan``, ``gather``, ``store``, ``prefill`` or ``merge``.
    problem : Problem, optional
        Default: a DeepSeek-V3 step in bf16 over a paged cache of 64 tokens a page, causal, with LSE.
    target : Target or str
    device : torch.device or str, optional
        Device whose architecture counts when the target names none. Default: the current GPU, where there is one.
    **fields
        Fields of `Problem` to change, for example ``dtypes="fp8"``, ``page_size=1``, ``mask=NullMask()``.

    Raises
    ------
    ArgumentError
        Unknown op or field.
    TargetError
        Unknown target.
    """
    parsed = _parse(target)
    if op not in OPS:
        raise ArgumentError(f"op: {op!r} is not one of {', '.join(OPS)}")
    problem = _default_problem(cast("Op", op)) if problem is None else problem
    if problem.op != op:
        raise ArgumentError(f"problem: it is a {problem.op} problem, but op is {op!r}")
    known = {one.name for one in dataclasses.fields(Problem)} - {"op"}
    if unknown := sorted(set(fields) - known):
        raise ArgumentError(f"{unknown[0]}: no such field of a problem; fields: {', '.join(sorted(known))}")
    if "features" in fields:
        fields["features"] = frozenset(fields["features"])
    if "mask" in fields:
        fields["mask"] = getattr(fields["mask"], "program", fields["mask"])
    problem = dataclasses.replace(problem, **fields)
    if device is not None:
        device = torch.device(device)
    elif parsed.arch is None:
        device = _device_here(parsed)
    return _explain(problem, parsed, device)


@functools.cache
def availability(backend: str) -> Availability:
    """Return what the backend's ``probe`` found, asked once. A backend of the user's own counts as available: its entries check."""
    if backend not in BACKENDS:
        return Availability(None)
    return cast("Availability", _runtime(backend).probe())


def _runtime(backend: str) -> Any:
    return importlib.import_module(f"mla.backends.{backend}.runtime")


def _arch_of(backend: str, device: torch.device) -> str:
    return cast("str", _runtime(backend).arch_of(device)) if backend in BACKENDS else device_arch(device)


def _parse(target: Target | str) -> Target:
    return target if isinstance(target, Target) else Target.parse(target, backends=registry.default().backends)


def _check_device(target: Target, device: torch.device) -> Target:
    """Refuse tensors that do not lie where the target runs."""
    places = {"cuda": "an NVIDIA GPU", "rocm": "an AMD GPU", "triton": "a GPU", "gpu": "a GPU", "cpu": "the CPU"}
    if not any(runs_on(backend, device) and (backend, target.name, device.type) != ("triton", "gpu", "cpu") for backend in target.backends):
        hint = "move them to the GPU, or pass target='cpu'" if device.type == "cpu" else "pass target='gpu'"
        if device.type == "cpu" and target.name == "triton":
            hint += "; with TRITON_INTERPRET=1 in the environment, Triton's interpreter takes CPU tensors"
        raise DeviceError(
            f"target {str(target)!r} needs tensors on {places[target.name]}, but they are on {str(device)!r}: {hint}"
        )
    if target.arch is not None and target.arch != device_arch(device):
        raise DeviceError(f"target {str(target)!r} names {target.arch}, but {device} is {device_arch(device)}")
    return target


def _device_here(target: Target) -> torch.device | None:
    if target.name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return device if any(runs_on(backend, device) for backend in target.backends) else None


def _default_problem(op: Op) -> Problem:
    if op == "plan":
        return Problem("plan", "int32", "int32", page_size=64)
    if op == "merge":
        return Problem("merge", "bf16", "bf16", features=frozenset({"lse"}))
    if op in ("gather", "store"):
        return Problem(op, "bf16", "bf16", page_size=64)
    from mla.masks import CausalMask

    return Problem(
        "prefill", "bf16", "bf16", page_size=64, rope="paged", mask=CausalMask().program, features=frozenset({"lse"})
    )


def _explain(problem: Problem, target: Target, device: torch.device | None) -> Explanation:
    backends = target.backends
    if device is not None and target.arch is None and target.name == "gpu":
        backends = tuple(backend for backend in backends if runs_on(backend, device))
    candidates = []
    for one in registry.default().candidates(problem.op, backends):
        candidates.append(_judge(one, problem, target, device))
    notes = () if candidates else (f"no implementation of {problem.op} is registered for {', '.join(backends)}",)
    best = next((candidate.id for candidate in candidates if not candidate.against), None)
    return Explanation(problem.op, describe(problem), str(target), best, tuple(candidates), notes)


def _judge(one: Implementation, problem: Problem, target: Target, device: torch.device | None) -> Candidate:
    """Collect the reasons for and against one candidate."""
    found = availability(one.backend)
    notes = [one.note] if one.note else []
    reasons: list[str] = []
    arch = target.arch
    if arch is None:
        if found.reason is not None:
            reasons.append(found.reason)
        elif device is not None:
            arch = _arch_of(one.backend, device)
        elif found.archs:
            arch = found.archs[0]
    elif arch not in found.archs:
        notes.append(f"cannot run here: {found.reason or f'no {arch} among the devices ({_list(found.archs)})'}")
    merits, faults = _compare(one.requires, problem, arch)
    reasons += faults
    if arch is not None and not reasons:
        try:
            refusal = one.load().check(problem, arch)
        except ImportError as error:
            refusal = f"{one.entry} cannot be imported: {error}"
        if refusal is not None:
            reasons.append(refusal)
    return Candidate(one.id, one.backend, one.priority, tuple(merits), tuple(reasons), tuple(notes), one.origin)


def _compare(requires: Requirements, problem: Problem, arch: str | None) -> tuple[list[str], list[str]]:
    """Hold each stated condition against the problem: sentences for, sentences against."""
    merits: list[str] = []
    faults: list[str] = []

    def state(what: str, has: object, fits: bool, wanted: str) -> None:
        (merits if fits else faults).append(f"{what} {has} {'is' if fits else 'is not'} {wanted}")

    if requires.arch is not None:
        if arch is None:
            faults.append(f"needs architecture {_list(requires.arch)}, and no device here or name in the target says which")
        else:
            state("architecture", arch, any(fnmatchcase(arch, glob) for glob in requires.arch), f"in {_list(requires.arch)}")
    if requires.dtypes is not None:
        state("dtype", problem.dtypes, problem.dtypes in requires.dtypes, f"in {_list(requires.dtypes)}")
    if requires.out_dtypes is not None and problem.out_dtype:
        state("output dtype", problem.out_dtype, problem.out_dtype in requires.out_dtypes, f"in {_list(requires.out_dtypes)}")
    if requires.dims is not None:
        state("(q_depth, v_head_dim)", problem.dims, problem.dims in requires.dims, f"in {_list(requires.dims)}")
    if requires.rope is not None and problem.rope is not None:
        state("rope", problem.rope, problem.rope in requires.rope, f"in {_list(requires.rope)}")
    if requires.page_size is not None and problem.page_size:
        size, limits = problem.page_size, requires.page_size
        fits = limits.min <= size <= (limits.max or size) and size % limits.multiple_of == 0
        upper = f" and at most {limits.max}" if limits.max else ""
        state("page size", size, fits, f"at least {limits.min}{upper} and a multiple of {limits.multiple_of}")
    if requires.granularity is not None and problem.granularity:
        state("granularity", problem.granularity, problem.granularity in requires.granularity, f"in {_list(requires.granularity)}")
    if requires.masks is not None and problem.mask is not None:
        state("mask", problem.mask.name, problem.mask.name in requires.masks, f"in {_list(requires.masks)}")
    if requires.features is not None:
        missing = sorted(problem.features - set(requires.features))
        if missing:
            faults.append(f"does not do {_list(missing)}")
        elif problem.features:
            merits.append(f"does {_list(sorted(problem.features))}")
    if requires.alignment is not None:
        state("alignment", f"{problem.alignment} bytes", problem.alignment >= requires.alignment, f"at least {requires.alignment}")
    return merits, faults


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"
