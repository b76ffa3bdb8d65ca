"""A launch that can be made again: what Triton's launcher does in Python each time is done once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch

_GRID_X, _GRID_Y, _STREAM = object(), object(), object()


class Launcher(NamedTuple):
    """What launches a compiled kernel.

    Attributes
    ----------
    function : callable
        Launches; takes `own` and the kernel's arguments.
    own : list
        Arguments of Triton's, in which the places of grid and stream are open.
    encode : callable or None
        Makes of all arguments those in which tensor maps are encoded, where the kernel takes some.
    """

    function: Callable[..., None]
    own: list[Any]
    encode: Callable[..., list[Any]] | None


def take_apart(run: Any, handle: Any, *fixed: Any) -> Launcher:
    """Take apart the launcher of a compiled kernel, `run`: it takes the grid, the stream, `handle`, `fixed` and more.

    `run` puts arguments of its own before these (in another order on AMD) and hands all of them to ``run.launch``.
    Where a Triton is made otherwise (3.7 hands them over in a tuple), `run` stays whole.
    """
    own = [_GRID_X, _GRID_Y, 1, _STREAM, handle, *fixed]
    scratch = any(getattr(run, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
    found = None if scratch else _behind_maps(getattr(run, "launch", None))
    if found is None:  # or a launch needs memory of its own, which no kernel here asks for
        return Launcher(run, own, None)
    recorder, recorded = copy.copy(run), list[Any]()
    recorder.launch = lambda *arguments: recorded.extend(arguments)
    recorder(*own)
    if tuple(recorded[-len(fixed) :]) != fixed:
        return Launcher(run, own, None)
    return Launcher(found[0], recorded, found[1])


def _behind_maps(launch: Any) -> tuple[Callable[..., None], Callable[..., list[Any]] | None] | None:
    """Return the function in C that launches, and what encodes tensor maps before it, several microseconds each.

    Of a kernel with maps ``launch`` is a function in Python that ends in the one in C, its free variable ``launcher``.
    """
    if launch is None or not isinstance(launch, FunctionType):
        return None if launch is None else (launch, None)
    free = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
    if "launcher" not in free:
        return None
    ends_in_list = {**free, "launcher": CellType(lambda *arguments: list(arguments))}
    encode = FunctionType(launch.__code__, launch.__globals__, closure=tuple(ends_in_list.values()))
    return free["launcher"].cell_contents, encode


class Launch:
    """A launch of a kernel with its arguments, to be made on torch's current stream any number of times."""

    __slots__ = ("_arguments", "_device_index", "_function", "_slots", "_stream")

    def __init__(
        self, launcher: Launcher, grid: tuple[int, int], arguments: list[Any], device_index: int, slots: int | None
    ) -> None:
        self._function, self._device_index = launcher.function, device_index
        self._stream = launcher.own.index(_STREAM)
        finished = [*launcher.own, *arguments]
        finished[finished.index(_GRID_X)], finished[finished.index(_GRID_Y)] = grid
        self._arguments = finished if launcher.encode is None else launcher.encode(*finished)
        # Of the kernel's argument number `slots`: all that is put in, extents and strides of maps too, stands before.
        self._slots = None if slots is None else slots + len(self._arguments) - len(arguments)

    def __call__(self, slots: int | None = None) -> None:
        """Launch, with another address of ``slots`` where one is given; the device has to be the current one."""
        arguments = self._arguments.copy()
        arguments[self._stream] = torch._C._cuda_getCurrentRawStream(self._device_index)
        if slots is not None and self._slots is not None:
            arguments[self._slots] = slots
        self._function(*arguments)
