"""Devices, loaded kernels and their launch, through hip-python on torch's current stream.

hip-python finds libamdhip64 and libhiprtc at its first call. A torch built for ROCm carries its own; a second HIP
runtime in the process would not know torch's allocations, so the lookup is pointed at torch's folder first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import torch

from mla.backends.rocm import compiler
from mla.backends.rocm.compiler import KernelSpec
from mla.errors import DeviceError, MlaError
from mla.target import Availability, device_arch, install_hint

#: Architecture that kernels are compiled for on a device: ``gfx942``, without features.
arch_of = device_arch

#: Properties of a device by torch: compute units (multi_processor_count), memory, ...
properties = functools.cache(torch.cuda.get_device_properties)


def probe() -> Availability:
    """Tell whether kernels of this backend can be compiled and run here, and with which versions. Never raises."""
    versions: dict[str, str] = {"torch": torch.__version__}
    try:
        versions["hip-python"] = importlib.metadata.version("hip-python")
        prepare_lookup()
        from hip import hip
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return Availability(f"hip-python is not installed: {install_hint('rocm')}", versions=versions)
    try:
        result, count = hip.hipGetDeviceCount()
        versions["hiprtc"] = compiler.compiler_name().removeprefix("hiprtc ")
    except Exception as error:
        return Availability(
            f"ROCm's libraries cannot be loaded ({error}): install ROCm, or torch for ROCm", versions=versions
        )
    if torch.version.hip is None:
        return Availability("this torch is not built for AMD GPUs", versions=versions)
    if result != hip.hipError_t.hipSuccess or not count:
        return Availability(f"HIP sees no AMD GPU ({result.name})", versions=versions)
    try:
        archs = tuple(arch_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))
        versions["HIP runtime"] = str(check(hip.hipRuntimeGetVersion(), "hipRuntimeGetVersion"))
    except Exception as error:
        return Availability(f"the AMD driver does not answer: {error}", versions=versions)
    return Availability(None, archs, versions)


@functools.cache
def prepare_lookup() -> None:
    """Point hip-python at the HIP runtime that torch has loaded, when torch brings one."""
    folder = Path(torch.__file__).parent
    if torch.version.hip is not None and (folder / "lib" / "libamdhip64.so").exists():
        os.environ["ROCM_PATH"] = str(folder)


def check(result: tuple[Any, ...], what: str) -> object:
    """Return the value of a HIP call.

    Raises
    ------
    MlaError
        With HIP's name of the error.
    """
    status = result[0]
    if int(status):
        raise MlaError(f"{what}: {status.name} ({int(status)})")
    return result[1] if len(result) > 1 else None


class Kernel:
    """A kernel loaded for one device; made by `load`.

    Attributes
    ----------
    spec : KernelSpec
    arch : str
    report : mapping
        Registers, LDS and spills, as the code object's notes have them.
    """

    def __init__(self, spec: KernelSpec, device: torch.device) -> None:
        prepare_lookup()
        from hip import hip

        self.spec = spec
        self.arch = arch_of(device)
        self.device_index = device.index
        binary = compiler.build(spec, self.arch)
        self.report = binary.report
        kernel_id = spec.kernel_id(self.arch)
        with torch.cuda.device(device):
            self._module = check(hip.hipModuleLoadData(binary.code), f"loading {kernel_id}")
            self._function = check(
                hip.hipModuleGetFunction(self._module, spec.symbol.encode()), f"{kernel_id}: {spec.symbol}"
            )
        self._launch = hip.hipModuleLaunchKernel

    def launch(self, params: ctypes.Structure, grid_x: int, grid_y: int = 1, grid_z: int = 1) -> None:
        """Put the kernel on torch's current stream of its device, which has to be the current device.

        Parameters
        ----------
        params : ctypes.Structure
            An instance of ``spec.params``; may be reused or dropped as soon as this returns.
        grid_x, grid_y, grid_z : int
            Workgroups; an empty grid launches nothing.

        Raises
        ------
        MlaError
            HIP refuses the launch; names the kernel and the error.
        """
        if not (grid_x and grid_y and grid_z):
            return
        stream = torch.cuda.current_stream(self.device_index).cuda_stream
        threads = self.spec.threads
        (result,) = self._launch(self._function, grid_x, grid_y, grid_z, threads, 1, 1, 0, stream, None, (params,))
        if int(result):
            check((result,), f"launch of {self.spec.kernel_id(self.arch)}, grid ({grid_x}, {grid_y}, {grid_z})")


def load(spec: KernelSpec, device: torch.device) -> Kernel:
    """Compile (or find) and load a kernel for a device; a second call with an equal spec returns the same object.

    Raises
    ------
    DeviceError
        The device is no AMD device.
    CompileError
        See `mla.jit_cache.obtain`.
    MlaError
        HIP does not load it.
    """
    if device.type != "cuda":
        raise DeviceError(f"the rocm backend runs on AMD devices; got tensors on {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load(spec, index)


@functools.cache
def _load(spec: KernelSpec, index: int) -> Kernel:
    return Kernel(spec, torch.device("cuda", index))
