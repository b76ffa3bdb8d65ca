"""The ROCm backend on a machine without AMD hardware: its kernels compiled by clang and executed by the interpreter.

`executed(monkeypatch, arch)` replaces what touches a device (loading, device properties) and nothing else: the entry
classes, their specs and the packing of parameters are the backend's own.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla import dispatch, registry
from mla.backends.rocm import compiler, runtime
from mla.backends.rocm.compiler import KernelSpec
from mla.errors import UnsupportedError
from mla.masks import Mask
from tests.support.amdgcn import Memory, Stats, launch
from tests.support.hip import compile_hip

#: Changes a kernel's source text before it is compiled.
Mutation = Callable[[str], str]


def assembly(spec: KernelSpec, arch: str, mutate: Mutation | None = None) -> str:
    """Assembly of a kernel, by the clang of the ziglang wheel."""
    text = compiler.unit(spec, arch).text
    if mutate is not None:
        mutated = mutate(text)
        if mutated == text:
            raise ValueError("the mutation changes nothing")
        text = mutated
    return compile_hip(text, arch)


class Executor:
    """Stands for a device: what `runtime.load` returns launches into the interpreter.

    Attributes
    ----------
    stats : list of Stats
        One of each launch.
    seed : int
        Order of the waves; another one for each launch.
    """

    def __init__(self, arch: str, mutate: Mutation | None = None, seed: int = 0) -> None:
        self.arch, self.mutate, self.seed = arch, mutate, seed
        self.memory = Memory()
        self.stats: list[Stats] = []

    def load(self, spec: KernelSpec, device: torch.device) -> Any:
        """Take the place of `runtime.load`."""
        asm = assembly(spec, self.arch, self.mutate)

        def run(params: ctypes.Structure, grid_x: int, grid_y: int = 1, grid_z: int = 1) -> None:
            assert isinstance(params, spec.params)
            if grid_x and grid_y and grid_z:
                grid, block = (grid_x, grid_y, grid_z), (spec.threads,)
                self.stats.append(launch(asm, spec.symbol, grid, block, bytes(params), self.memory, seed=self.seed))

        return SimpleNamespace(launch=run)

    def run(self, prepared: Callable[[Any], None], args: Any) -> None:
        """Call a prepared entry with its tensors as the only memory there is."""
        self.memory = Memory()
        for tensor in tensors_of(args):
            self.memory.add(tensor)
        prepared(args)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside an argument object."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mask):
        yield from (*value.captures_on(torch.device("cpu")), *value.biases)
    elif is_dataclass(value):
        for one in fields(value):
            yield from tensors_of(getattr(value, one.name))
    elif hasattr(type(value), "__slots__") or hasattr(value, "__dict__"):
        for one in vars(value).values() if hasattr(value, "__dict__") else ():
            if isinstance(one, torch.Tensor):
                yield one


def executed(monkeypatch: pytest.MonkeyPatch, arch: str, mutate: Mutation | None = None, seed: int = 0) -> Executor:
    """Run the entries of the ROCm backend on CPU tensors for the rest of a test."""
    executor = Executor(arch, mutate, seed)
    stand_in(monkeypatch, executor)
    return executor


def stand_in(monkeypatch: pytest.MonkeyPatch, executor: Any) -> None:
    """Let an executor (``arch``, ``load``) take the place of the device."""
    monkeypatch.setattr(runtime, "load", executor.load)
    monkeypatch.setattr(runtime, "arch_of", lambda device: executor.arch)
    monkeypatch.setattr(runtime, "properties", lambda device: SimpleNamespace(multi_processor_count=4))


def through_public_functions(monkeypatch: pytest.MonkeyPatch, executor: Any) -> None:
    """Let the public functions of the library run the backend's registered entries, whatever target is asked for.

    Raises (when called so)
    -----------------------
    UnsupportedError
        The registry or the entry refuses the problem.
    """

    def resolve(problem: Any, target: object, device: torch.device) -> Callable[[Any], None]:
        entries = [one for one in registry.default() if one.backend == "rocm" and one.op == problem.op]
        if not entries:
            raise UnsupportedError(f"ROCm has no {problem.op}")
        (one,) = entries
        _, faults = one.requires.compare(problem, executor.arch)
        entry = one.load()
        refusal = None if faults else entry.check(problem, executor.arch)
        if faults or refusal:
            raise UnsupportedError("; ".join([*faults, *([refusal] if refusal else [])]))
        return functools.partial(executor.run, entry.prepare(problem, device))

    for module in ("dispatch", "plan", "gather", "store", "merge", "quantize"):
        monkeypatch.setattr(f"mla.{module}.resolve", resolve)
    dispatch.forget()
