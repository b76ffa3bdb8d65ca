"""Calls that were made before, launched again without another look at what they ask for.

What a launch does follows from addresses and numbers, and from shapes, strides and dtypes; what lies at the addresses
is read by the kernel. A call that equals an earlier one in all of these is that launch again (`mla.problem.Again`).
It is found by addresses and numbers, and the rest is compared. Nothing keeps a tensor alive: memory that was given back
and handed out anew is the same memory. A call is kept when its addresses come for the second time, so that calls that
never come again cost little more than a look-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from mla._launch import Stream, stream_scope
from mla.dispatch import Memo
from mla.errors import ArgumentError
from mla.kv_cache import PagedKVCache
from mla.masks import Mask
from mla.problem import Again

_Known = tuple[list[tuple[Any, ...]] | None, Again | None]  # forms of the tensors, and what launches again
_launches = Memo(limit=4096)
#: Stands where addresses have been seen once, with whatever forms.
_SEEN: _Known = None, None


def repeating(function: Callable[..., Again | None]) -> Callable[..., None]:
    """Let a function that launches return what launches the same again, and call that when the call comes again.

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
        values = (*args, *keywords.values())
        try:
            device = args[0].device
            key = name, device, tuple(keywords), places(values)
            known: _Known | None = _launches.get(key)
            again = known[1] if known is not None and known[0] == _forms(values) else None
        except (AttributeError, IndexError, RuntimeError, TypeError):  # not what is allowed: the function says so
            function(*args, stream=stream, **keywords)
            return
        if again is None:
            remember(key, known, device, values, function(*args, stream=stream, **keywords))
        elif stream is not None or torch._C._cuda_getDevice() != device.index:
            with stream_scope(device, stream):
                call(*args, **keywords)
        elif torch.cuda.is_current_stream_capturing():  # which refuses what a replay would not see
            function(*args, stream=stream, **keywords)
        else:
            again()

    return call


def find(key: Hashable, values: Iterable[Any]) -> tuple[_Known | None, Again | None]:
    """Return what is known under a key from `places`, and what launches again unless a graph is being captured."""
    known: _Known | None = _launches.get(key)
    again = known[1] if known is not None and known[0] == _forms(values) else None
    return known, None if again is None or torch.cuda.is_current_stream_capturing() else again


def remember(
    key: Hashable, known: _Known | None, device: torch.device, values: Iterable[Any], again: Again | None
) -> None:
    """Keep what launches again where its key has been seen once."""
    if callable(again) and _can_repeat(device):  # a user's implementation may return anything
        _launches.remember(key, (_forms(values), again) if known is _SEEN else _SEEN)


def _can_repeat(device: torch.device) -> bool:
    """Return whether launches on a device are made again: on a GPU, unless a graph is being captured."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def places(values: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return addresses, numbers and whatever else of some arguments is no form of a tensor, hashable.

    Raises
    ------
    RuntimeError
        A tensor without an address.
    ArgumentError
        A tensor of a class of its own that has no memory.
    """
    return tuple([x.data_ptr() if type(x) is Tensor else x if x is None else _look(x) for x in values])


def _forms(values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return shapes, strides and dtypes of tensors, and whether they want a gradient, which is refused."""
    if torch.is_grad_enabled():
        return [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in values if type(x) is Tensor]
    return [(x.shape, x.stride(), x.dtype) for x in values if type(x) is Tensor]


def _look(value: Any) -> Hashable:
    kind = type(value)
    if kind is str:
        return value
    if kind is float or kind is int or kind is bool:
        return kind, value
    if kind is PagedKVCache:
        wanted = torch.is_grad_enabled() and (value.latent.requires_grad or value.rope.requires_grad)
        return _place(value), wanted
    if kind is list or kind is tuple:
        return tuple(map(_look, value))
    if isinstance(value, Mask):
        has_data = value.program.captures or value.biases
        return (Mask, value.text, _look(value.captures), _look(value.biases)) if has_data else (Mask, value.text)
    if isinstance(value, Tensor):  # in a list, or of a class of its own
        wanted = torch.is_grad_enabled() and value.requires_grad
        if kind is not Tensor and not value.data_ptr() and value.numel():  # a fake, a DTensor, ...
            raise ArgumentError(f"a {kind.__name__} of shape {tuple(value.shape)} has no memory for a kernel to use")
        return value.data_ptr(), value.shape, value.stride(), value.dtype, wanted
    return kind, value


def _place(cache: PagedKVCache) -> Hashable:
    """Return what a launch depends on of a layer, whose memory may have moved since it was made."""
    indptr, scales = cache.page_indptr, cache.scales
    return (
        cache.form or _look(cache.operands),
        cache.latent.data_ptr(),
        cache.rope.data_ptr(),
        cache.page_table.data_ptr(),
        cache.lengths.data_ptr(),
        None if indptr is None else indptr.data_ptr(),
        None if scales is None else scales.data_ptr(),
    )
