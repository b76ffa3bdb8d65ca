"""Kernels of the Triton backend that are launched again get what a call made anew would give them.

Kernels are neither compiled nor run. Triton's own launcher, in Python, ends in a double of what it compiles in C.
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mla
from mla import dispatch
from mla.backends.triton import compiler, runtime
from mla.backends.triton.compiler import KernelSpec
from mla.backends.triton.launch import Launch, take_apart
from tests.support import repeated_launches
from tests.support.repeated_launches import CHANGES, PAIRS, Given, check, check_nothing_is_kept_alive

nvidia = pytest.importorskip("triton.backends.nvidia.driver")

ARCHS = ("sm_90a", "sm_80")  # whose prefill takes tensor maps, and orders a batch by a kernel before; which does not
OWN = 13  # arguments that Triton's launcher puts before a kernel's


class Driver(repeated_launches.Driver):
    """What stands for what Triton's launcher ends in: a launch is its kernel's name and its arguments."""

    def __init__(self, arch: str) -> None:
        super().__init__(f"triton:{arch}")
        self.arch = arch
        self.slots = 0  # address of the memory between the kernels of a call

    def compile(self, spec: KernelSpec, arch: str) -> Any:
        """Return what stands for a compiled kernel, with Triton's launcher on it."""
        kinds = dict(spec.types)
        names = compiler.function(spec).arg_names
        signature = {i: compiler._type(kinds.get(name)) for i, name in enumerate(names)}
        maps = [name for name in names if str(kinds.get(name)).startswith(("map", "tensordesc"))]
        place = OWN + names.index("slots") + sum(6 for _ in maps) if kinds.get("slots") else None

        def launch(*arguments: Any) -> None:
            values = list(arguments)
            if place is not None and spec.name != "prefill.schedule" and spec.name != "prefill.clear":
                values[place] = "those of before" if values[place] == self.slots else values[place]
            elif place is not None:
                self.slots, values[place] = values[place], "new ones"
            self.launches.append((spec.name, values))

        run = object.__new__(nvidia.CudaLauncher)
        run.launch = nvidia.wrap_handle_tensordesc(launch, signature, [{"of": name} for name in maps])
        run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, False
        run.global_scratch_size = run.profile_scratch_size = 0
        run.global_scratch_align = run.profile_scratch_align = 1
        return types.SimpleNamespace(run=run, function=7, packed_metadata=(spec.num_warps, 1, 0))


@pytest.fixture(params=ARCHS)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    double = Driver(request.param)
    double.take_over(monkeypatch)
    monkeypatch.setattr(dispatch, "chosen", double.choose)
    monkeypatch.setattr(runtime, "load", lambda spec, device: runtime.Kernel(spec, torch.device("cuda", 0)))
    monkeypatch.setattr(runtime, "arch_of", lambda device: double.arch)
    monkeypatch.setattr(runtime, "shared_bytes", lambda device: 163 << 10)
    monkeypatch.setattr(compiler, "build", double.compile)
    monkeypatch.setattr(
        nvidia, "make_tensordesc_arg", lambda arg, of: [(of["of"], arg.address), *arg.shape, *arg.strides]
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    processors = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    dispatch.forget()
    yield double
    dispatch.forget()


class Turned(Given):
    """The arguments of calls; queries are turned, in a copy, where the scale is negative."""

    def copies(self) -> bool:
        return super().copies() or (isinstance(self.scale, float) and self.scale < 0)


def test_any_change_is_seen(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        for changes in (*((name,) for name in CHANGES), *PAIRS):
            given = Turned(monkeypatch)
            assert check(driver, given, "nothing") >= len(given.calls()) - 2, "the second of each, of jobs in part"
            for name in changes:
                check(driver, given.changed(name), changes)


def test_any_row_of_changes_is_seen(driver: Driver, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chosen = random.Random(seed)
    given, done = Turned(monkeypatch), []
    with torch.no_grad():
        for _ in range(30):
            driver.stream = chosen.choice([1, 1, 1, 2])
            done.append(chosen.choice(list(CHANGES)))
            check(driver, given.changed(done[-1]), done)


def test_what_was_copied_is_not_repeated(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(monkeypatch).changed("scale below 0")
    with torch.no_grad():
        for _ in range(4):
            prepared = driver.prepared
            given.calls()["prefill"]()
            assert driver.prepared == prepared + 1


def test_nothing_is_kept_alive(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    check_nothing_is_kept_alive(driver, monkeypatch)


@pytest.mark.parametrize("given", [False, True], ids=["own memory", "workspace"])
def test_items_of_one_sequence_are_counted_from_zero(driver: Driver, given: bool) -> None:
    if driver.arch != "sm_90a":
        pytest.skip("only the persistent kernel counts")
    tokens, heads = 640, 32  # more items than multiprocessors
    q, kv, output = (torch.zeros(tokens, heads, width, dtype=torch.bfloat16) for width in (192, 256, 128))
    offsets, pages = torch.tensor([0, tokens], dtype=torch.int32), torch.zeros(10, 64, 576, dtype=torch.bfloat16)
    table, lengths = torch.arange(10, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
    cache = mla.PagedKVCacheCollection.from_pages(pages, table, lengths).layer(0)
    workspace = torch.zeros(1 << 16, dtype=torch.uint8) if given else None

    def call() -> None:
        mla.flare_mla_prefill(
            output, q, kv[..., :128], kv[..., 128:], cache, mla.CausalMask(), offsets, offsets, 0.1, workspace=workspace
        )

    with torch.no_grad():
        first, second, third = (driver.of(call) for _ in range(3))
    assert first == second == third and driver.prepared == 2
    assert [name for name, _ in third] == ["prefill.clear", "prefill_hopper.prefill"]
    assert "new ones" in third[0][1] and "those of before" in third[1][1]
    assert workspace is None or driver.slots == workspace.data_ptr()


def test_tensor_maps_are_encoded_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, encoded = nvidia.make_tensordesc_arg, []
    monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda arg, of: [encoded.append(of), encode(arg, of)][1])
    given = Given(monkeypatch)
    with torch.no_grad():
        counts = []
        for _ in range(4):
            given.calls()["prefill"]()
            counts.append(len(encoded))
    maps = 5 if driver.arch == "sm_90a" else 0
    assert counts == [maps, 2 * maps, 2 * maps, 2 * maps]


def test_the_launcher_of_amd_has_its_own_order(driver: Driver) -> None:
    amd = pytest.importorskip("triton.backends.amd.driver")
    run, calls = object.__new__(amd.HIPLauncher), []
    run.launch, run.launch_cooperative_grid = functools.partial(lambda *arguments: calls.append(arguments)), False
    run.profile_scratch_size, run.profile_scratch_align = 0, 1
    run(3, 2, 1, driver.stream, "function", "fixed", 10, 20)
    launcher = take_apart(run, "function", "fixed")
    Launch(launcher, (3, 2), [10, 20], 0, None)()
    assert calls[0] == calls[1] and launcher.function is run.launch


class InTuple:
    """A launcher that hands arguments over in a tuple, as Triton 3.7's."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.launch = functools.partial(lambda *arguments: self.calls.append(arguments))

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments[:6], arguments[6:])


def test_a_launcher_made_otherwise_stays_whole(driver: Driver) -> None:
    calls: list[Any] = []
    Launch(take_apart(lambda *arguments: calls.append(arguments), 7, "fixed"), (3, 2), [10, 20], 0, 1)(30)
    assert calls == [(3, 2, 1, driver.stream, 7, "fixed", 10, 30)]
    run = InTuple()
    Launch(take_apart(run, 7, "fixed"), (3, 2), [10, 20], 0, 1)(30)
    assert run.calls == [(3, 2, 1, driver.stream, 7, "fixed", (10, 30))]
