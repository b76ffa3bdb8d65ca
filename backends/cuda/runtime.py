"""Devices, loaded kernels and their launch.

A launch is one foreign call of the driver on torch's current stream. Parameter block and launch configuration are only
read once made, so that threads may share them; the driver copies both before it returns.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import struct
import sys
from typing import TYPE_CHECKING

import torch

from mla.backends.cuda import compiler
from mla.errors import DeviceError, MlaError
from mla.target import Availability, device_arch, install_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla.backends.cuda.compiler import KernelSpec

#: Architecture that kernels are compiled for on a device: ``sm_90a`` on capability 9.0, else ``sm_{major}{minor}``.
arch_of = device_arch

#: Properties of a device by torch: multiprocessors, shared memory of a block, ...
properties = functools.cache(torch.cuda.get_device_properties)

_ERROR_INVALID_CONTEXT = 201
_KERNEL_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

_StructurePointer = ctypes.c_void_p * 1
_BytesPointer = ctypes.c_char_p * 1


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id padded to 8 bytes and a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


#: CUlaunchConfig: grid, block, shared bytes; stream; attributes and their count.
_LAUNCH_CONFIG = struct.Struct("7IPPI4x")


def probe() -> Availability:
    """Tell whether kernels of this backend can be compiled and run here, and with which versions. Never raises."""
    versions: dict[str, str] = {"torch": torch.__version__}
    for package in ("cuda-core", "cuda-bindings"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return Availability(f"{package} is not installed: {install_hint('cuda')}", versions=versions)
    try:
        compiler.cuda_core()
        versions["nvrtc"] = compiler.compiler_name().removeprefix("nvrtc ")
    except Exception as error:
        return Availability(f"NVRTC cannot be loaded ({error}): {install_hint('cuda')}", versions=versions)
    if torch.version.hip is not None:
        return Availability("this torch is built for AMD GPUs", versions=versions)
    try:
        if not torch.cuda.is_available():
            return Availability("torch sees no NVIDIA GPU", versions=versions)
        archs = tuple(arch_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))
        version = ctypes.c_int()
        check(driver().cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
        versions["driver API"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    except Exception as error:
        return Availability(f"the NVIDIA driver does not answer: {error}", versions=versions)
    return Availability(None, archs, versions)


@functools.cache
def driver() -> ctypes.CDLL:
    """Return the driver library, with the argument types of the calls this backend makes."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    pointer = ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = [ctypes.c_char_p, pointer, pointer, pointer]
    library.cuKernelSetAttribute.argtypes = [ctypes.c_int, ctypes.c_int, pointer, ctypes.c_int]
    library.cuDriverGetVersion.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def check(result: int, what: str) -> None:
    """Raise `MlaError` with the driver's name of an error, when there is one."""
    if result:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(result, ctypes.byref(name))
        raise MlaError(f"{what}: {(name.value or b'unknown error').decode()} ({result})")


class Kernel:
    """A kernel loaded for one device; made by `load`.

    Attributes
    ----------
    spec : KernelSpec
    arch : str
    report : mapping
        Registers, static shared memory and spills, as the compiler reported them.
    """

    def __init__(self, spec: KernelSpec, device: torch.device) -> None:
        self.spec = spec
        self.arch = arch_of(device)
        self.device_index = device.index
        self._library, self.report = _library(spec, self.arch)  # the library keeps the kernel loaded
        try:
            self._handle = int(self._library.get_kernel(spec.symbol).handle)
        except Exception as error:
            raise MlaError(f"the driver does not load {spec.kernel_id(self.arch)}: {error}") from error
        self._attributes = (_LaunchAttribute * spec.programmatic)()
        for attribute in self._attributes:
            attribute.id, attribute.value = _LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION, 1
        self._block = (spec.threads, 1, 1, spec.shared_bytes)
        self._attribute_list = (ctypes.addressof(self._attributes), len(self._attributes))
        self._launch_kernel = driver().cuLaunchKernelEx
        if spec.shared_bytes > 48 * 1024:
            check(
                driver().cuKernelSetAttribute(
                    _KERNEL_MAX_DYNAMIC_SHARED_BYTES, spec.shared_bytes, self._handle, self.device_index
                ),
                f"{spec.kernel_id(self.arch)}: {spec.shared_bytes} bytes of shared memory",
            )

    def launch(self, params: ctypes.Structure | bytes, grid_x: int, grid_y: int = 1, grid_z: int = 1) -> Launch | None:
        """Put the kernel on torch's current stream of its device, which has to be the current device.

        Parameters
        ----------
        params : ctypes.Structure or bytes
            An instance of ``spec.params``, or its bytes (`params.packer`); not to be changed while the result is used.
        grid_x, grid_y, grid_z : int
            Blocks; an empty grid launches nothing.

        Returns
        -------
        Launch or None
            Launches the same again; None for an empty grid.

        Raises
        ------
        MlaError
            The driver refuses the launch; names the kernel and the driver's error.
        """
        if not (grid_x and grid_y and grid_z):
            return None
        launch = Launch(self, params, (grid_x, grid_y, grid_z))
        launch()
        return launch


class Launch:
    """A launch of a kernel with its parameters, to be made on torch's current stream any number of times."""

    __slots__ = ("_configs", "_grid", "_kernel", "_params", "_pointer")

    def __init__(self, kernel: Kernel, params: ctypes.Structure | bytes, grid: tuple[int, int, int]) -> None:
        self._kernel, self._params, self._grid = kernel, params, grid
        self._pointer = (
            _BytesPointer(params) if isinstance(params, bytes) else _StructurePointer(ctypes.addressof(params))
        )
        self._configs: dict[int, bytes] = {}  # by stream

    def __call__(self) -> None:
        """Launch; raises as `Kernel.launch`."""
        kernel = self._kernel
        stream = torch._C._cuda_getCurrentRawStream(kernel.device_index)
        config = self._configs.get(stream)
        if config is None:
            config = _LAUNCH_CONFIG.pack(*self._grid, *kernel._block, stream, *kernel._attribute_list)
            self._configs[stream] = config
        result = kernel._launch_kernel(config, kernel._handle, self._pointer, None)
        if result == _ERROR_INVALID_CONTEXT:
            # A thread that has made no CUDA call yet has no current context; torch's is the device's primary one.
            compiler.cuda_core().Device(kernel.device_index).set_current()
            result = kernel._launch_kernel(config, kernel._handle, self._pointer, None)
        if result:
            check(result, f"launch of {kernel.spec.kernel_id(kernel.arch)}, grid {self._grid}")


def load(spec: KernelSpec, device: torch.device) -> Kernel:
    """Compile (or find) and load a kernel for a device; a second call with an equal spec returns the same object.

    Raises
    ------
    DeviceError
        The device is no CUDA device.
    CompileError
        See `mla.jit_cache.obtain`.
    MlaError
        The driver does not load it.
    """
    if device.type != "cuda":
        raise DeviceError(f"the cuda backend runs on NVIDIA devices; got tensors on {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load(spec, index)


@functools.cache
def _load(spec: KernelSpec, index: int) -> Kernel:
    return Kernel(spec, torch.device("cuda", index))


@functools.cache
def _library(spec: KernelSpec, arch: str):  # type: ignore[no-untyped-def]  # cuda.core is imported lazily
    torch.cuda.init()
    binary = compiler.build(spec, arch)
    return compiler.cuda_core().ObjectCode.from_cubin(binary.code, name=spec.kernel_id(arch)), binary.report


class TensorMap(ctypes.Structure):
    """A TMA descriptor as a field of a parameter struct.

    The C side is ``struct alignas(64) TensorMap { uint8_t bytes[128]; }`` (``include/ptx_sm90.cuh``). Descriptors come
    first in a struct, and `with_tail` ends it, so that both sides place them at multiples of 64 bytes.
    """

    _fields_ = [("bytes", ctypes.c_ubyte * 128)]


def with_tail(fields: Sequence[tuple[str, type]]) -> list[tuple[str, type]]:
    """Return ``_fields_`` of a struct that begins with tensor maps, padded to C's size: a multiple of 64 bytes."""

    class Unpadded(ctypes.Structure):
        _fields_ = list(fields)

    tail = -ctypes.sizeof(Unpadded) % 64
    return [*fields, ("_tail", ctypes.c_ubyte * tail)] if tail else list(fields)
