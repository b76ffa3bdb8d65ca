"""Checks that every public function makes before it touches a kernel.

Each helper raises a typed error of `mla.errors` that names the argument, what came and what is allowed. None of them
synchronises with a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mla.errors import ArgumentError, DeviceError, DTypeError, ShapeError

INT32_MAX = 2**31 - 1
INDEX_DTYPES = (torch.int32, torch.uint32, torch.int64)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

_SHORT_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e4m3fnuz: "fp8_fnuz",
    torch.int32: "int32",
    torch.uint32: "int32",
}


def short_dtype(dtype: torch.dtype) -> str:
    """Return the name that `Problem` and the registry have for a dtype, such as ``bf16`` or ``fp8_fnuz``."""
    try:
        return _SHORT_NAMES[dtype]
    except KeyError:
        raise DTypeError(f"{dtype} is not supported; allowed: {_join(_SHORT_NAMES)}") from None


def require_tensor(tensor: object, name: str, ndim: int | Sequence[int] | None = None) -> None:
    """Raise unless `tensor` is a tensor with `ndim` dimensions (one number, or several that are allowed)."""
    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ShapeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if ndim is None or tensor.ndim == ndim:
        return
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    if tensor.ndim not in allowed:
        ranks = " or ".join(f"{n}-D" for n in allowed)
        raise ShapeError(f"{name} must be {ranks}, got {tensor.ndim}-D of shape {tuple(tensor.shape)}")


def require_int(value: object, name: str) -> None:
    """Raise unless `value` is a Python int; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise DTypeError(f"{name} must be an int, got {type(value).__name__}")


def require_shape(tensor: torch.Tensor, name: str, shape: Sequence[int | None], why: str = "") -> None:
    """Raise unless `tensor` has `shape`, where None stands for any extent.

    Parameters
    ----------
    why : str
        Where the wanted numbers come from, for example ``"q has shape (5, 4, 192)"``; it ends the message.
    """
    if tensor.shape == shape:
        return
    if tensor.ndim != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = "(" + ", ".join("*" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"
        reason = f"; {why}" if why else ""
        raise ShapeError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}{reason}")


def require_dtype(tensor: torch.Tensor, name: str, allowed: Iterable[torch.dtype]) -> None:
    """Raise unless the dtype of `tensor` is one of `allowed`."""
    allowed = tuple(allowed)
    if tensor.dtype not in allowed:
        raise DTypeError(f"{name} must be {_join(allowed)}, got {tensor.dtype}")


def require_device(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    """Raise unless `tensor` lies on `device`."""
    if tensor.device != device:
        raise DeviceError(f"{name} is on {tensor.device}, but the call runs on {device}; the library moves no tensors")


def require_last_dim_contiguous(tensor: torch.Tensor, name: str) -> None:
    """Raise unless neighbours in the last dimension are neighbours in memory."""
    if tensor.ndim == 0 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        raise ShapeError(
            f"{name} must be contiguous in its last dimension, got strides {tensor.stride()} "
            f"for shape {tuple(tensor.shape)}"
        )


def require_no_overlap(tensor: torch.Tensor, name: str) -> None:
    """Raise if elements of a tensor that is written share their memory, as after ``expand``."""
    strides = tensor.stride()
    if 0 in strides and any(extent > 1 and stride == 0 for extent, stride in zip(tensor.shape, strides, strict=True)):
        raise ShapeError(
            f"{name} is written, but its elements share memory: strides {tensor.stride()} "
            f"for shape {tuple(tensor.shape)}"
        )


def require_no_grad(**tensors: torch.Tensor | None) -> None:
    """Raise if a tensor requires a gradient while grad mode is on: there is no backward pass."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise ArgumentError(
                    f"{name} requires a gradient and there is no backward pass; call under torch.no_grad() "
                    "or torch.inference_mode(), or pass a detached tensor"
                )


def as_index(tensor: torch.Tensor, name: str, length: int | None, device: torch.device) -> torch.Tensor:
    """Return a 1-D index tensor in the canonical form: contiguous int32 on `device`.

    A tensor that has that form already is returned as it is. uint32 is viewed as int32, int64 is converted on its own
    device. A CPU tensor for another device is copied without waiting, which a CUDA graph could not replay and
    is therefore refused under capture.

    Parameters
    ----------
    tensor : torch.Tensor
        [length], int32, uint32 or int64, any stride, on `device` or on the CPU.
    length : int or None
        The extent it must have; None allows any.

    Raises
    ------
    DTypeError, ShapeError, DeviceError
        Naming the argument. A CPU tensor with a value that int32 does not hold is an ArgumentError.
    """
    _require_index(tensor, name, device)
    if tensor.ndim != 1:
        raise ShapeError(f"{name} must be 1-D, got shape {tuple(tensor.shape)}")
    if length is not None and tensor.shape[0] != length:
        raise ShapeError(f"{name} must have length {length}, got {tensor.shape[0]}")
    if tensor.dtype == torch.int32 and tensor.device == device:
        return tensor.contiguous()
    if readable(tensor) and tensor.dtype != torch.int32:
        require_int32_range(tensor, name)
    return _as_int32(tensor, device).contiguous()


def as_page_ids(tensor: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    """Return page ids, 1-D or 2-D, as int32 on `device` with the last dimension contiguous and any row stride.

    Entries that lie behind a sequence may be garbage, so that values are not checked here.
    """
    _require_index(tensor, name, device)
    if tensor.dtype == torch.int64:  # an id that int32 does not hold must not wrap round to another page's
        tensor = tensor.clamp(-INT32_MAX - 1, INT32_MAX)
    result = _as_int32(tensor, device)
    return result if result.shape[-1] <= 1 or result.stride(-1) == 1 else result.contiguous()


def check_offsets(offsets: torch.Tensor, name: str, rows: int | None = None, rows_name: str = "") -> None:
    """Raise unless cumulative offsets start at zero or more, never fall and end within `rows`; CPU values only.

    Parameters
    ----------
    offsets : torch.Tensor
        [B+1] on the CPU, or anything on another device, which is left unread.
    rows : int, optional
        Extent of the tensor named `rows_name` that the offsets index.
    """
    if not readable(offsets) or offsets.shape[0] == 0:
        return
    if offsets.dtype == torch.uint32:
        offsets = offsets.to(torch.int64)
    if int(offsets[0]) < 0 or (offsets.shape[0] > 1 and bool((offsets[1:] < offsets[:-1]).any())):
        raise ArgumentError(f"{name} must be non-negative and must never fall, got {_preview(offsets)}")
    if rows is not None and int(offsets[-1]) > rows:
        raise ShapeError(f"{name} ends at {int(offsets[-1])}, but {rows_name} has {rows} rows")


def check_non_negative(values: torch.Tensor, name: str) -> None:
    """Raise if a CPU tensor holds a negative number; tensors on other devices are left unread."""
    if readable(values) and values.numel() and int(values.to(torch.int64).min()) < 0:
        raise ArgumentError(f"{name} must not be negative, got {_preview(values)}")


def alignment(*tensors: torch.Tensor | None) -> int:
    """Return the largest power of two up to 16 that divides every base address and outer stride, in bytes."""
    bits = 16
    for tensor in tensors:
        if tensor is not None:
            size = tensor.element_size()
            bits |= tensor.data_ptr()
            for extent, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
                if extent > 1:
                    bits |= stride * size
    return bits & -bits


def signature(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """Return what a check of these tensors can depend on besides values, hashable: dtypes, shapes, strides, devices."""
    return tuple([(t.dtype, t.shape, t.stride(), t.device) if isinstance(t, torch.Tensor) else None for t in tensors])


def readable(tensor: torch.Tensor) -> bool:
    """Return whether looking at a tensor's values is free: it is on the CPU, and the call is not being traced."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def is_capturing(device: torch.device) -> bool:
    """Return whether work on `device` is being recorded into a CUDA (or HIP) graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _require_index(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    require_tensor(tensor, name)
    if tensor.dtype not in INDEX_DTYPES:
        raise DTypeError(f"{name} must be {_join(INDEX_DTYPES)}, got {tensor.dtype}")
    if tensor.device == device:
        return
    if tensor.device.type != "cpu":
        raise DeviceError(f"{name} is on {tensor.device}; it must be on {device} or on the CPU")
    if is_capturing(device):
        raise DeviceError(
            f"{name} is on the CPU and a graph is being captured: a replay would not see its new values. "
            f"Keep it on {device}"
        )


def _as_int32(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.dtype == torch.uint32:
        tensor = tensor.view(torch.int32)
    elif tensor.dtype != torch.int32:
        tensor = tensor.to(torch.int32)
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def require_int32_range(tensor: torch.Tensor, name: str) -> None:
    """Raise if a tensor, whose values are looked at, holds one that int32 does not."""
    wide = tensor.to(torch.int64)
    if wide.numel() and (int(wide.max()) > INT32_MAX or int(wide.min()) < -INT32_MAX - 1):
        raise ArgumentError(f"{name} holds a value that int32 does not, got {_preview(wide)}")


def _preview(values: torch.Tensor, count: int = 8) -> str:
    head = ", ".join(str(v) for v in values[:count].tolist())
    return f"[{head}{', ...' if values.numel() > count else ''}]"


def _join(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
