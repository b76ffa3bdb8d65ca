"""Devices, loaded kernels and their launch.

A call goes straight to the launcher of the compiled kernel: Triton's own call path derives types, divisibility and
cache keys from the arguments each time, which costs several times the launch. `KernelSpec` has settled all of that.
What Triton's launcher does in Python is done once for each launch (`launch.py`), which can then be made again.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from typing import TYPE_CHECKING, Any

import torch

from mla.backends.triton import compiler, configs
from mla.backends.triton.compiler import KernelSpec
from mla.backends.triton.launch import Launch, take_apart
from mla.target import Availability, device_arch, install_hint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: ``sm_90a``, ``gfx942``, ``cpu``.
arch_of = device_arch


def interpreted() -> bool:
    """Return whether kernels run under Triton's interpreter; it is fixed when a kernel's module is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def probe() -> Availability:
    """Tell whether kernels of this backend can be compiled and run here, and with which versions. Never raises."""
    versions: dict[str, str] = {"torch": torch.__version__}
    try:
        versions["triton"] = importlib.metadata.version("triton")
        import triton  # noqa: F401  (loads what a call will load)
    except Exception as error:
        return Availability(f"triton cannot be imported ({error}): {install_hint('triton')}", versions=versions)
    if interpreted():
        return Availability(None, ("cpu",), versions)
    try:
        if not torch.cuda.is_available():
            return Availability("torch sees no GPU; with TRITON_INTERPRET=1 CPU tensors are taken", versions=versions)
        archs = tuple(arch_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))
    except Exception as error:
        return Availability(f"the GPU driver does not answer: {error}", versions=versions)
    return Availability(None, archs, versions)


def shared_bytes(device: torch.device) -> int:
    """Return the shared memory (LDS) that one block may have on a device."""
    if device.type == "cpu":
        return configs.shared_bytes("cpu")
    properties = torch.cuda.get_device_properties(device)
    reported = getattr(properties, "shared_memory_per_block_optin", 0) or getattr(
        properties, "shared_memory_per_block", 0
    )
    return reported or configs.shared_bytes(arch_of(device))


class TensorMap:
    """What the copy engine reads, as Triton's launcher takes it of a tensor descriptor; no view of torch is made."""

    __slots__ = ("address", "base", "padding", "shape", "strides")

    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.address, self.shape, self.strides = address, shape, strides
        self.base = self  # which the launcher asks for the address
        self.padding = "zero"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMap:
        """Return the map of a tensor."""
        return cls(tensor.data_ptr(), tensor.shape, tensor.stride())

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self.address


class Kernel:
    """A kernel loaded for one device; made by `load`."""

    def __init__(self, spec: KernelSpec, device: torch.device) -> None:
        self.spec, self._types = spec, dict(spec.types)
        self.device_index = device.index
        function, fixed = compiler.function(spec), compiler.constants(spec)
        names = function.arg_names
        assert [name for name, _ in spec.types] == names[: len(spec.types)], f"parameters of {spec.name}"
        # The argument list of a call: compile-time parameters have places too, which nobody reads.
        self._pointers = [(i, name) for i, (name, kind) in enumerate(spec.types) if kind and kind.startswith("*")]
        self._numbers = [(i, name) for i, (name, kind) in enumerate(spec.types) if kind and not kind.startswith("*")]
        self._arguments: list[Any] = [fixed.get(name) for name in names]
        self._slots = names.index("slots") if self._types.get("slots") else None
        self._interpreted = function if device.type == "cpu" else None
        if self._interpreted is None:
            self.compiled = compiler.build(spec, arch_of(device))
            with torch.cuda.device(device):
                run = self.compiled.run  # loads the binary for the current device
            self._launcher = take_apart(run, self.compiled.function, self.compiled.packed_metadata, None, None, None)

    def launch(self, values: Mapping[str, Any], grid_x: int, grid_y: int = 1) -> Launch | None:
        """Put the kernel on torch's current stream of its device, which has to be the current device.

        Parameters
        ----------
        values : mapping
            A value for each name of ``spec.types`` that has a type: a tensor for a pointer (None where the kernel does
            not look at it), a `TensorMap`, a number. Further names are ignored.
        grid_x, grid_y : int
            Programs; an empty grid launches nothing.

        Returns
        -------
        Launch or None
            Launches the same again, and keeps no tensor alive; None for an empty grid and on the CPU.
        """
        if not (grid_x and grid_y):
            return None
        arguments = self._arguments.copy()
        for place, name in self._numbers:
            arguments[place] = values[name]
        if self._interpreted is not None:
            for place, name in self._pointers:
                tensor = values[name]
                bytewise = tensor is not None and self._types[name] == "*u8"
                arguments[place] = tensor.view(torch.uint8) if bytewise else tensor
            self._interpreted[grid_x, grid_y](*arguments)
            return None
        for place, name in self._pointers:
            tensor = values[name]
            arguments[place] = 0 if tensor is None else tensor.data_ptr()
        launch = Launch(self._launcher, (grid_x, grid_y), arguments, self.device_index, self._slots)
        launch()
        return launch


def load(spec: KernelSpec, device: torch.device) -> Kernel:
    """Compile (or find) and load a kernel for a device; a second call with an equal spec returns the same object.

    Raises
    ------
    CompileError
        See `compiler.build`.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _load(spec, device)


@functools.cache
def _load(spec: KernelSpec, device: torch.device) -> Kernel:
    return Kernel(spec, device)
