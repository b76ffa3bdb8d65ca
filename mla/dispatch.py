"""From a problem and a target to the implementation that serves it, or to every reason why none does.

`resolve` is the hot path: a hit is one look-up. `explain` tells the same story in words, for hardware that is here or
not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from mla import registry
from mla.errors import ArgumentError, DeviceError, UnsupportedError
from mla.explanation import Candidate, Explanation, describe
from mla.problem import OPS, Again, Op, Problem
from mla.requirements import listed
from mla.target import BACKENDS, Availability, Target, device_arch, runs_on

if TYPE_CHECKING:
    from mla.registry_file import Implementation

Runner = Callable[[Any], Again | None]
_V = TypeVar("_V")
_lock = threading.RLock()
_memos: list[Memo] = []


class Memo(dict[Hashable, Any]):
    """A bounded memory, for a module's lifetime, of what follows from the registry; empties when that changes.

    Look up with ``get``. Keys hold no tensors. The oldest entry leaves first.
    """

    def __init__(self, limit: int = 1024) -> None:
        super().__init__()
        self._limit = limit
        _memos.append(self)

    def remember(self, key: Hashable, value: _V) -> _V:
        """Store and return ``value``."""
        with _lock:
            if len(self) >= self._limit:
                del self[next(iter(self))]
            self[key] = value
        return value


def forget() -> None:
    """Empty every memory, so that the next calls choose and prepare anew."""
    with _lock:
        for memo in _memos:
            memo.clear()


Watcher = Callable[["Implementation", Problem, Runner], Runner]
_watcher: Watcher | None = None


def watch(watcher: Watcher | None) -> None:
    """Let `watcher` put a callable of its own in the place of each prepared one; None ends that."""
    global _watcher
    _watcher = watcher
    forget()


registry.on_change(forget)
_runners = Memo()
_choices = Memo()


def resolve(problem: Problem, target: Target | str, device: torch.device) -> Runner:
    """Return the prepared callable that serves a problem on a device.

    Parameters
    ----------
    problem : Problem
    target : Target or str
    device : torch.device
        Device of the call's tensors, with its index.

    Returns
    -------
    callable
        Takes the op's ``*Args`` and launches on torch's current stream; nothing is compiled when it is called. May
        return what launches the same again.

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
                implementation = chosen(problem, target, device)
                runner = implementation.load().prepare(problem, device)
                if _watcher is not None:
                    runner = _watcher(implementation, problem, runner)
                _runners.remember(key, runner)
    return cast("Runner", runner)


def chosen(problem: Problem, target: Target | str, device: torch.device) -> Implementation:
    """Return the implementation that `resolve` prepares; raises as it does, but compiles nothing."""
    key = (problem, target, device)
    implementation = _choices.get(key)
    if implementation is None:
        parsed = _parse(target)
        _check_device(parsed, device)
        explanation = _explain(problem, parsed, device)
        if explanation.chosen is None:
            raise UnsupportedError(f"{problem.op}: nothing serves this problem on target {str(target)!r}", explanation)
        implementation = _choices.remember(key, registry.default()[explanation.chosen])
    return cast("Implementation", implementation)


def explain(
    op: str,
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
        ``plan``, ``gather``, ``project``, ``store``, ``prefill``, ``merge`` or ``quantize``.
    problem : Problem, optional
        Default: a DeepSeek-V3 step in bf16 over a paged cache of 64 tokens a page, causal, with LSE.
    target : Target or str
    device : torch.device or str, optional
        Device whose architecture counts when the target names none. Default: the current GPU, where there is one.
    **fields
        Fields of `Problem` to change, for example ``dtypes="fp8"``, ``page_size=1``, ``mask=NullMask()``. The default
        has the scales that every call of such dtypes has.

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
    usual = problem is None
    problem = _usual_problem(op) if problem is None else problem
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
    if usual:
        problem = _with_scales(problem)
    if device is not None:
        return _explain(problem, parsed, torch.device(device))
    return _explain(problem, parsed, device_here(parsed) if parsed.arch is None else None)


@functools.cache
def availability(backend: str) -> Availability:
    """Return what the backend's ``probe`` found, asked once; a backend of the user's own counts as available."""
    if backend not in BACKENDS:
        return Availability(None)
    return cast("Availability", _runtime(backend).probe())


def _runtime(backend: str) -> Any:
    return importlib.import_module(f"mla.backends.{backend}.runtime")


def _parse(target: Target | str) -> Target:
    return Target.parse(target, backends=registry.default().backends)


def _check_device(target: Target, device: torch.device) -> None:
    """Refuse tensors that do not lie where the target runs."""
    if not any(runs_on(backend, device) for backend in target.backends):
        wanted = {"cuda": "an NVIDIA GPU", "rocm": "an AMD GPU", "cpu": "the CPU"}.get(target.name, "a GPU")
        hint = "pass target='cpu', or move them to the GPU" if device.type == "cpu" else "pass target='gpu'"
        if device.type == "cpu" and target.name == "triton":
            hint += "; with TRITON_INTERPRET=1 in the environment Triton's interpreter takes CPU tensors"
        raise DeviceError(f"target {str(target)!r} needs tensors on {wanted}, but they are on {str(device)!r}: {hint}")
    if target.arch is not None and target.arch != device_arch(device):
        raise DeviceError(f"target {str(target)!r} names {target.arch}, but {device} is {device_arch(device)}")


def device_here(target: Target | str) -> torch.device | None:
    """Return the device that a call on a target would most likely run on, where there is one."""
    target = _parse(target)
    gpu = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    for device in (*gpu, torch.device("cpu")):
        if any(runs_on(backend, device) for backend in target.backends):
            return device
    return None


def _usual_problem(op: str) -> Problem:
    if op == "plan":
        return Problem("plan", "int32", "int32", page_size=64)
    if op == "merge":
        return Problem("merge", "bf16", "bf16", features=frozenset({"lse"}))
    if op == "quantize":
        return Problem("quantize", "bf16", "fp8")
    if op == "project":
        return Problem("project", "bf16", "fp8", features=frozenset({"static_scale"}))
    if op != "prefill":
        return Problem(cast("Op", op), "bf16", "bf16", page_size=64)
    from mla.masks import CausalMask

    return Problem(
        "prefill", "bf16", "bf16", page_size=64, rope="paged", mask=CausalMask().program, features=frozenset({"lse"})
    )


def _with_scales(problem: Problem) -> Problem:
    """Add what no call of the problem's dtypes is without: the scales of fp8 operands, and of a cache in fp8."""
    operands, _, rope = problem.dtypes.partition("+")
    needed: set[str] = set()
    if problem.op == "prefill":
        if operands == "fp8":
            needed |= {"q_scale", "k_scales"} | ({"split_q"} if rope else {"v_scale"})
        if "fp8" in (rope.removesuffix("_rope"), problem.dtypes):
            needed.add("scales")
    elif "fp8" in {"gather": problem.dtypes, "store": problem.out_dtype}.get(problem.op, ""):
        needed.add("scales")
    granularity = problem.granularity or 128 if "scales" in needed else problem.granularity
    return dataclasses.replace(problem, features=problem.features | needed, granularity=granularity)


def _explain(problem: Problem, target: Target, device: torch.device | None) -> Explanation:
    """Judge every candidate by the target's architecture, else by the device's."""
    backends = target.backends
    if target.arch is None and device is not None:
        backends = tuple(backend for backend in backends if runs_on(backend, device))
    candidates = [
        _judge(one, problem, target.arch, device) for one in registry.default().candidates(problem.op, backends)
    ]
    notes = () if candidates else (f"no implementation of {problem.op} is registered for {listed(backends)}",)
    best = next((candidate.id for candidate in candidates if not candidate.against), None)
    return Explanation(problem.op, describe(problem), str(target), best, tuple(candidates), notes)


def _judge(one: Implementation, problem: Problem, arch: str | None, device: torch.device | None) -> Candidate:
    """Collect what speaks for and against one candidate; ``arch`` None stands for the architecture of the device."""
    here = availability(one.backend)
    notes = [one.note] if one.note else []
    against: list[str] = []
    if arch is not None:
        if arch not in here.archs:
            notes.append(f"cannot run here: {here.reason or f'the devices are {listed(here.archs)}'}")
    elif here.reason is not None:
        against.append(here.reason)
    if arch is None and device is not None:
        usable = here.reason is None and one.backend in BACKENDS
        arch = _runtime(one.backend).arch_of(device) if usable else device_arch(device)
    merits, faults = one.requires.compare(problem, arch)
    against += faults
    if arch is not None and not against:
        try:
            refusal = one.load().check(problem, arch)
        except ImportError as error:
            refusal = f"{one.entry} cannot be imported: {error}"
        if refusal is not None:
            against.append(refusal)
    return Candidate(one.id, one.backend, one.priority, tuple(merits), tuple(against), tuple(notes), one.origin)
