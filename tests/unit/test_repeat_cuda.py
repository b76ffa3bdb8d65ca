"""Kernels of the CUDA backend that are launched again get, byte for byte, what a call made anew would give them."""

from __future__ import annotations

import ctypes
import hashlib
import random
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mla import dispatch
from mla.backends.cuda import prefill_fp8_sm90_block, prefill_sm90_block, runtime
from tests.support import repeated_launches
from tests.support.repeated_launches import CHANGES, PAIRS, Given, check, check_nothing_is_kept_alive

ARCH = "sm_90a"


class Driver(repeated_launches.Driver):
    """What stands for the driver of CUDA: a launch is a kernel's name, its configuration and parameter bytes."""

    def load(self, spec: Any, device: torch.device) -> runtime.Kernel:
        kernel = object.__new__(runtime.Kernel)
        kernel.spec, kernel.arch, kernel.device_index = spec, ARCH, 0

        def launch(config: bytes, handle: int, pointer: Any, _: None) -> int:
            address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[0]
            self.launches.append((spec.name, config, ctypes.string_at(address, ctypes.sizeof(spec.params))))
            return 0

        kernel._handle, kernel._launch_kernel = 0, launch
        kernel._block, kernel._attribute_list = (spec.threads, 1, 1, spec.shared_bytes), (0, 0)
        return kernel


def tensor_map(*arguments: Any) -> runtime.TensorMap:
    """Return bytes that stand for a descriptor's arguments."""
    text = repr(arguments).encode()
    return runtime.TensorMap.from_buffer_copy(hashlib.sha512(text).digest() * 2)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    double = Driver(f"cuda:{ARCH}")
    double.take_over(monkeypatch)
    monkeypatch.setattr(runtime, "load", double.load)
    monkeypatch.setattr(runtime, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(runtime, "properties", lambda device: types.SimpleNamespace(multi_processor_count=132))
    for block in (prefill_sm90_block, prefill_fp8_sm90_block):
        monkeypatch.setattr(block, "tensor_map", tensor_map)
    monkeypatch.setattr(
        "mla.backends.cuda.prefill_sm90_launch.counters_of_stream",
        lambda device: types.SimpleNamespace(data_ptr=lambda: 4096 * double.stream),
    )
    dispatch.forget()
    yield double
    dispatch.forget()


@pytest.mark.parametrize("gradients", [False, True])
def test_any_change_is_seen(driver: Driver, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.set_grad_enabled(gradients):
        for changes in (*((name,) for name in CHANGES), *PAIRS):
            given = Given(monkeypatch)
            assert check(driver, given, "nothing") >= len(given.calls()) - 2, "the second of each, of jobs in part"
            for name in changes:
                check(driver, given.changed(name), changes)


def test_any_row_of_changes_is_seen(driver: Driver, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(5):
        given, done = Given(monkeypatch), []
        for _ in range(20):
            driver.stream = chosen.choice([1, 1, 1, 2])
            done.append(chosen.choice(list(CHANGES)))
            with torch.set_grad_enabled(chosen.random() < 0.3):
                check(driver, given.changed(done[-1]), done)


def test_nothing_is_kept_alive(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    check_nothing_is_kept_alive(driver, monkeypatch)
