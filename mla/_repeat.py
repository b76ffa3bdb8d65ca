"""Calls that were made before, launched again without another look at what they ask for.

What a launch does follows from shapes, strides, dtypes, addresses and numbers; what lies at the addresses is read by
the kernel. A call whose arguments equal an earlier call's in all of these is that launch again (`dispatch.Again`),
found by one look-up. Nothing keeps a tensor alive: memory that was given back and handed out anew is the same memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from mla._check import is_capturing
from mla._launch import Stream, stream_scope
from mla.dispatch import Memo
from mla.kv_cache import PagedKVCache
from mla.masks import Mask
from mla.problem import Again

_launches = Memo(limit=2048)


def repeating(function: Callable[..., Again | None]) -> Callable[..., None]:
    """Let a function that launches return what launches the same again, and call that next time.

    Parameters
    ----------
    function : callable
        Its first argument is a tensor or a layer of the cache on the device of the call. Takes `stream` by keyword, the
        current one when None. Returns None where an equal call may have to do something else: where values were looked
        at, or something was copied before the launch.
    """
    name = function.__qualname__

    @functools.wraps(function)
    def call(*args: Any, stream: Stream | None = None, **keywords: Any) -> None:
        if torch.compiler.is_compiling():
            function(*args, stream=stream, **keywords)
            return
        try:
            device = args[0].device
            key = name, device, tuple(keywords), looks((*args, *keywords.values()))
            again: Again | None = _launches.get(key)
        except (AttributeError, IndexError, RuntimeError, TypeError):  # not what is allowed: the function says so
            function(*args, stream=stream, **keywords)
            return
        if again is None:
            remember(key, device, function(*args, stream=stream, **keywords))
        elif stream is not None or torch._C._cuda_getDevice() != device.index:
            with stream_scope(device, stream):
                call(*args, **keywords)
        elif torch.cuda.is_current_stream_capturing():  # which refuses what a replay would not see
            function(*args, stream=stream, **keywords)
        else:
            again()

    return call


def find(key: Hashable) -> Again | None:
    """Return what was remembered under a key, unless a graph is being captured."""
    again: Again | None = _launches.get(key)
    return None if again is None or torch.cuda.is_current_stream_capturing() else again


def remember(key: Hashable, device: torch.device, again: Again | None) -> None:
    """Keep what launches again, unless a graph is being captured."""
    if again is not None and not is_capturing(device):
        _launches.remember(key, again)


def looks(values: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return all that a launch can depend on of some arguments but their device, hashable.

    Raises
    ------
    RuntimeError
        A tensor without strides or an address.
    """
    if torch.is_grad_enabled():  # where a tensor that wants a gradient is refused
        return True, *map(_look_beside_gradients, values)
    return tuple([
        (x.data_ptr(), x.shape, x.stride(), x.dtype) if type(x) is Tensor else x if x is None else _look(x)
        for x in values
    ])  # fmt: skip


def _look(value: Any) -> Hashable:
    kind = type(value)
    if kind is str or value is None:
        return value
    if kind is PagedKVCache:
        return value.place
    if kind is float or kind is int or kind is bool:
        return kind, value
    if kind is list or kind is tuple:
        return looks(value)
    if isinstance(value, Mask):
        has_data = value.program.captures or value.biases
        return (value.text, looks(value.captures), looks(value.biases)) if has_data else value.text
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    return kind, value


def _look_beside_gradients(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _look(value), value.requires_grad
    if isinstance(value, PagedKVCache):
        return value.place, value.latent.requires_grad, value.rope.requires_grad
    return _look(value)
