"""What a mask function computes with: integers and conditions that record themselves, and captured tensors.

The function runs once, with `IntExpr` objects for b, h, q and k. ``lengths[b]`` inside it becomes a slot that a kernel
reads at each call.
"""

from __future__ import annotations

import operator
from typing import Any, Literal, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from mla._check import readable, require_int32_range
from mla.errors import DeviceError, DTypeError, ShapeError
from mla.mask_expr import FALSE, TRUE, ZERO, Node, integer, make, negate

CaptureIndex = Literal["b", "h"]


def _as_int(value: object) -> Node:
    if isinstance(value, IntExpr):
        return value.node
    if isinstance(value, BoolExpr | bool):
        raise DTypeError("a mask function uses a condition as a number; write where(condition, 1, 0)")
    if isinstance(value, torch.Tensor):
        raise DTypeError("a mask function may use a captured tensor only indexed by b or h, as in lengths[b]")
    try:
        return integer(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise DTypeError(f"a mask function computes with integers, got {type(value).__name__} {value!r}") from None


def as_bool(value: object) -> Node:
    """Return the node of a condition (a `BoolExpr` or a bool)."""
    if isinstance(value, BoolExpr):
        return value.node
    if isinstance(value, bool):
        return TRUE if value else FALSE
    raise DTypeError(
        f"expected a condition, got {type(value).__name__}; &, | and ~ bind tighter than comparisons: "
        "put each comparison in parentheses, as in (k <= q) & (q - k < 4096)"
    )


class _Expr:
    __slots__ = ("node",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, node: Node) -> None:
        self.node = node

    def __bool__(self) -> NoReturn:
        raise DTypeError(
            "a mask expression has no truth value while it is being built: use &, |, ~ for and, or, not; "
            "where(c, x, y) for if; minimum and maximum for min and max; (a <= b) & (b <= c) for a <= b <= c"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.node!r})"


def _int_op(op: str, reverse: bool = False) -> Any:
    def method(self: IntExpr, other: object) -> IntExpr:
        x, y = self.node, _as_int(other)
        return IntExpr(make(op, y, x) if reverse else make(op, x, y))

    return method


def _comparison(op: str, reverse: bool = False) -> Any:
    def method(self: IntExpr, other: object) -> BoolExpr:
        x, y = self.node, _as_int(other)
        return BoolExpr(make(op, y, x) if reverse else make(op, x, y))

    return method


def _bool_op(op: str) -> Any:
    def method(self: BoolExpr, other: object) -> BoolExpr:
        return BoolExpr(make(op, self.node, as_bool(other)))

    return method


class IntExpr(_Expr):
    """An integer inside a mask function: + - * // % abs, comparisons."""

    __slots__ = ()
    __add__, __radd__ = _int_op("add"), _int_op("add", reverse=True)
    __sub__, __rsub__ = _int_op("sub"), _int_op("sub", reverse=True)
    __mul__, __rmul__ = _int_op("mul"), _int_op("mul", reverse=True)
    __floordiv__, __rfloordiv__ = _int_op("floordiv"), _int_op("floordiv", reverse=True)
    __mod__, __rmod__ = _int_op("mod"), _int_op("mod", reverse=True)
    __lt__, __gt__ = _comparison("lt"), _comparison("lt", reverse=True)
    __le__, __ge__ = _comparison("le"), _comparison("le", reverse=True)
    __eq__, __ne__ = _comparison("eq"), _comparison("ne")

    def __neg__(self) -> IntExpr:
        return IntExpr(make("sub", ZERO, self.node))

    def __pos__(self) -> IntExpr:
        return self

    def __abs__(self) -> IntExpr:
        return IntExpr(make("abs", self.node))

    def _not_a_condition(self, other: object = None) -> NoReturn:
        as_bool(self)
        raise AssertionError

    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _not_a_condition

    def __truediv__(self, other: object) -> NoReturn:
        raise DTypeError("a mask function computes with integers: use // instead of /")

    __rtruediv__ = __truediv__

    def __index__(self) -> NoReturn:
        raise DTypeError("only a torch tensor of integers can be indexed by b or h inside a mask function")


class BoolExpr(_Expr):
    """A condition inside a mask function: & | ^ ~."""

    __slots__ = ()
    __and__ = __rand__ = _bool_op("and")
    __or__ = __ror__ = _bool_op("or")
    __xor__ = __rxor__ = __ne__ = _bool_op("xor")

    def __invert__(self) -> BoolExpr:
        return BoolExpr(negate(self.node))

    def __eq__(self, other: object) -> BoolExpr:  # type: ignore[override]
        return BoolExpr(negate(make("xor", self.node, as_bool(other))))


def minimum(x: IntExpr | int, y: IntExpr | int) -> IntExpr:
    """Return the smaller of two integers, inside a mask function."""
    return IntExpr(make("min", _as_int(x), _as_int(y)))


def maximum(x: IntExpr | int, y: IntExpr | int) -> IntExpr:
    """Return the larger of two integers, inside a mask function."""
    return IntExpr(make("max", _as_int(x), _as_int(y)))


def where(condition: BoolExpr | bool, x: IntExpr | int, y: IntExpr | int) -> IntExpr:
    """Return x where the condition holds and y elsewhere, inside a mask function."""
    return IntExpr(make("where", as_bool(condition), _as_int(x), _as_int(y)))


class Tracing(TorchFunctionMode):
    """While a mask function runs, ``tensor[b]`` and ``tensor[h]`` become capture slots."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[torch.Tensor, CaptureIndex]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], IntExpr):
            return IntExpr(Node("capture", value=self.slot(args[0], args[1].node)))
        return func(*args, **(kwargs or {}))

    def slot(self, tensor: torch.Tensor, index: Node) -> int:
        """Return the slot of a tensor and its index variable, the same for the same pair."""
        if index.op != "var" or index.value not in ("b", "h"):
            raise DTypeError("a captured tensor may be indexed by b or by h only, inside a mask function")
        kind: CaptureIndex = "b" if index.value == "b" else "h"
        for i, (known, known_kind) in enumerate(self.tensors):
            if known is tensor and known_kind == kind:
                return i
        self.tensors.append((tensor, kind))
        return len(self.tensors) - 1


class Capture:
    """A captured tensor: as it was given, and as int32 on each device where it has been needed."""

    def __init__(self, source: torch.Tensor, index: CaptureIndex) -> None:
        if source.dtype not in (torch.int32, torch.int64, torch.uint32):
            raise DTypeError(f"a tensor captured by a mask has dtype {source.dtype}; allowed: int32, int64, uint32")
        if source.ndim != 1:
            raise ShapeError(
                f"a tensor captured by a mask and indexed by {index} has shape {list(source.shape)}; "
                f"allowed: one dimension, [{'B' if index == 'b' else 'H'}]"
            )
        if source.dtype != torch.int32 and readable(source):
            require_int32_range(source, f"a tensor captured by a mask and indexed by {index}")
        self.source = source
        self.index = index
        # int32 and uint32 stay the caller's memory, so that a captured graph replays with the values of the day.
        data = source.view(torch.int32) if source.dtype == torch.uint32 else source.to(torch.int32)
        self._home = data.contiguous()
        self._copies: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the int32 tensor on a device, copied there once if it was given on the CPU."""
        if self._home.device == device:
            return self._home
        if self._home.device.type != "cpu":
            raise DeviceError(f"a tensor captured by the mask is on {self._home.device}, the call is on {device}")
        if device not in self._copies:
            self._copies[device] = self._home.to(device, non_blocking=True)
        return self._copies[device]

    @property
    def in_place(self) -> bool:
        """Whether kernels read the caller's own memory, so that they see what is written there later."""
        return self.source.device.type != "cpu" and self._home.data_ptr() == self.source.data_ptr()

    def same_as(self, other: Capture) -> bool:
        """Whether both stand for the same tensor under the same index."""
        return self.source is other.source and self.index == other.index
