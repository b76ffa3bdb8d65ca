"""The device and the stream that a call runs on, and Python numbers there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mla._check import is_capturing
from mla.errors import ArgumentError, DTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla.problem import Again
    from mla.target import Target

Stream = torch.cuda.Stream | int

_HERE: AbstractContextManager[Any] = nullcontext()
_NUMBERS_MAX = 4096


class _Number(NamedTuple):
    tensor: torch.Tensor
    streams: set[int]  # raw streams that have written it


_numbers: dict[tuple[float, torch.device], _Number] = {}


def stream_scope(device: torch.device, stream: Stream | None) -> AbstractContextManager[Any]:
    """Return a context in which `device` and `stream` are torch's current ones; free to enter when they are already.

    Parameters
    ----------
    device : torch.device
        The device of the call.
    stream : torch.cuda.Stream or int, optional
        A stream of that device, or its handle as an int; torch's current stream when None.

    Raises
    ------
    ArgumentError
        A stream for a call on the CPU, or a stream of another device.
    DTypeError
        Something that is no stream.
    """
    if device.type != "cuda":
        if stream is not None:
            raise ArgumentError(f"stream {stream!r} was given, but the call runs on {device}, which has no streams")
        return _HERE
    if stream is None and torch.cuda.current_device() == device.index:
        return _HERE
    if stream is None:
        return torch.cuda.device(device)
    if isinstance(stream, bool) or not isinstance(stream, (int, torch.Stream)):
        raise DTypeError(f"stream must be a torch.cuda.Stream or its handle as an int, got {type(stream).__name__}")
    if isinstance(stream, int):
        stream = torch.cuda.ExternalStream(stream, device=device)
    elif stream.device != device:
        raise ArgumentError(f"stream belongs to {stream.device}, but the call runs on {device}")
    return torch.cuda.stream(stream)


def traced_target(target: str | Target, stream: Stream | None) -> str:
    """Return the target of a call that `torch.compile` traces, as its operator takes it.

    Raises
    ------
    ArgumentError
        A stream was given: the compiled code chooses its own.
    """
    if stream is not None:
        raise ArgumentError("stream cannot be given inside torch.compile: enter torch.cuda.stream outside of it")
    return str(target)


def number_on(value: float, device: torch.device) -> torch.Tensor:
    """Return a number as f32 [1], written before whatever comes next on the current stream.

    Kept for good and for every stream, each of which writes the same bytes before it first reads them; unless there
    are many, it would live in the memory of a captured graph, or it is a fake.
    """
    stream, kept = _raw_stream(device), _numbers.get((value, device))
    if kept is None or (stream not in kept.streams and is_capturing(device)):
        with torch.inference_mode(False):  # another stream may write it outside of that
            tensor = torch.full((1,), value, dtype=torch.float32, device=device)
        if type(tensor) is not torch.Tensor or is_capturing(device) or len(_numbers) >= _NUMBERS_MAX:
            return tensor
        kept = _numbers.setdefault((value, device), _Number(tensor, set()))
        if kept.tensor is tensor:
            kept.streams.add(stream)
    if stream not in kept.streams:
        kept.tensor.fill_(value)
        kept.streams.add(stream)
    return kept.tensor


def behind_numbers(again: Again, values: Sequence[float], device: torch.device) -> Again | None:
    """Return what launches again behind numbers that the launch reads; None where one of them was not kept."""
    if any((value, device) not in _numbers for value in values):
        return None
    streams = {_raw_stream(device)}

    def repeat() -> None:
        stream = _raw_stream(device)
        if stream not in streams:
            for value in values:
                number_on(value, device)
            streams.add(stream)
        again()

    return repeat


def _raw_stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
