"""The Triton backend on AMD without AMD hardware: kernels compiled by Triton and executed by the interpreter.

`executed(monkeypatch, arch)` replaces what touches a device (loading, device properties) and nothing else: the entry
classes, their descriptions of kernels and the values of a call are the backend's own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from mla import dispatch, registry
from mla.backends.triton import compiler, configs, runtime
from mla.backends.triton.compiler import KernelSpec
from mla.errors import UnsupportedError
from tests.support.amdgcn import Stats, run_kernel

#: Changes a kernel's assembly before it is executed.
Mutation = Callable[[str], str]


class Launcher:
    """Stands for `runtime.Kernel`: a launch runs the compiled assembly."""

    def __init__(self, executor: Executor, spec: KernelSpec) -> None:
        self.executor, self.spec = executor, spec
        self.compiled = compiler.build(spec, executor.arch)

    def launch(self, values: Mapping[str, Any], grid_x: int, grid_y: int = 1) -> None:
        executor, compiled = self.executor, self.compiled
        if not (grid_x and grid_y):
            return
        text = compiled.asm["amdgcn"]
        if executor.mutate is not None and executor.mutated == self.spec.name:
            text = executor.mutate(text)
            assert text != compiled.asm["amdgcn"], "the mutation changes nothing"
        arguments = [values[name] for name, kind in self.spec.types if kind is not None]
        stats = run_kernel(
            text, compiled.metadata.name, (grid_x, grid_y), (compiled.metadata.num_warps * 64,), arguments,
            lds_bytes=compiled.metadata.shared, seed=executor.seed,
        )  # fmt: skip
        executor.stats.append((self.spec.name, stats))


@dataclasses.dataclass
class Executor:
    """Stands for a device.

    Attributes
    ----------
    stats : list of (str, Stats)
        Kernel and counts of each launch.
    seed : int
        Order of the waves.
    mutate, mutated : callable and str
        What happens to the assembly of which kernel before it runs.
    """

    arch: str
    seed: int = 0
    mutate: Mutation | None = None
    mutated: str = ""
    stats: list[tuple[str, Stats]] = dataclasses.field(default_factory=list)


def executed(monkeypatch: pytest.MonkeyPatch, executor: Executor) -> None:
    """Let the public functions run this backend's entries on CPU tensors, whatever target is asked for."""
    monkeypatch.setattr(runtime, "load", lambda spec, device: Launcher(executor, spec))
    monkeypatch.setattr(runtime, "arch_of", lambda device: executor.arch)
    monkeypatch.setattr(runtime, "shared_bytes", lambda device: configs.shared_bytes(executor.arch))

    def resolve(problem: Any, target: object, device: torch.device) -> Callable[[Any], None]:
        for one in registry.default():
            if (one.backend, one.op) == ("triton", problem.op) and not one.requires.compare(problem, executor.arch)[1]:
                entry = one.load()
                if refusal := entry.check(problem, executor.arch):
                    raise UnsupportedError(refusal)
                run: Callable[[Any], None] = functools.cache(entry.prepare)(problem, device)
                return run
        raise UnsupportedError("no entry fits")

    for module in ("dispatch", "plan", "gather", "store", "merge", "quantize"):
        monkeypatch.setattr(f"mla.{module}.resolve", resolve)
    dispatch.forget()
