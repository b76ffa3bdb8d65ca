"""The CUDA run time without a GPU: the probe, and the driver structures that are laid out by hand."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from mla.backends.cuda import compiler, runtime
from mla.backends.cuda.plan import Plan
from mla.errors import DeviceError, MlaError
from mla.problem import Problem


@pytest.mark.parametrize("missing", ["cuda.core", "cuda.bindings"])
def test_probe_names_what_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compiler_name.cache_clear()
    for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    reason = runtime.probe().reason
    assert reason is not None
    assert "pip install" in reason


def test_probe_survives_a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core")

    def broken() -> bool:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(torch.version, "hip", None)
    availability = runtime.probe()
    assert availability.reason is not None
    assert "no such device" in availability.reason
    assert availability.versions["nvrtc"]


def test_another_device_is_refused() -> None:
    (spec,) = Plan.specs(Problem("plan", "int32", "int32"), "sm_90a")
    with pytest.raises(DeviceError, match="got tensors on cpu"):
        runtime.load(spec, torch.device("cpu"))


def test_launch_structures_are_the_drivers() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    ours = runtime._LaunchAttribute(id=runtime._LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    size = ctypes.sizeof(ours)
    theirs = bytearray(ctypes.string_at(attribute.getPtr(), size))
    theirs[4:8] = bytes(4)  # padding
    assert size == 72
    assert bytes(ours) == bytes(theirs)

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 1, 2, 3
    config.blockDimX, config.blockDimY, config.blockDimZ = 4, 5, 6
    config.sharedMemBytes, config.hStream = 7, driver.CUstream(8)
    packed = runtime._LAUNCH_CONFIG.pack(1, 2, 3, 4, 5, 6, 7, 8, 0, 0)
    assert len(packed) == 56
    assert packed == ctypes.string_at(config.getPtr(), 56)

    shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert int(shared) == runtime._KERNEL_MAX_DYNAMIC_SHARED_BYTES
    assert int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT) == runtime._ERROR_INVALID_CONTEXT


def test_driver_errors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        @staticmethod
        def cuGetErrorName(result: int, name: ctypes.c_char_p) -> int:
            ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_INVALID_VALUE"
            return 0

    monkeypatch.setattr(runtime, "driver", Driver)
    runtime.check(0, "nothing")
    with pytest.raises(MlaError, match=r"launch of x: CUDA_ERROR_INVALID_VALUE \(1\)"):
        runtime.check(1, "launch of x")
