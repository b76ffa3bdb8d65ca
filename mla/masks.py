"""Masks: which key position a query position sees, written once for every backend.

A mask is a condition over the integers (b, h, q, k): sequence of the batch, query head, global position of the query
and of the key. True is visible. The built-in masks and a user's own function take the same road: the function is called
once with expressions, and each backend turns the expression it returns into code of its own (`mla.mask_code`).

MAX's masks of the same names combine the other way round (its OrMask hides where either hides). Here the words are
plain: ``a & b`` is visible where both are, ``a | b`` where either is.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from mla import mask_interval
from mla.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from mla.mask_expr import TRUE, Node, evaluate, make, postorder, renumber_captures, variable
from mla.mask_interval import TILE_HIDDEN, TILE_PARTIAL, TILE_VISIBLE
from mla.mask_trace import BoolExpr, Capture, CaptureIndex, IntExpr, Tracing, as_bool, maximum, minimum, where

__all__ = [
    "BIASES_MAX",
    "CAPTURES_MAX",
    "TILE_HIDDEN",
    "TILE_PARTIAL",
    "TILE_VISIBLE",
    "CausalMask",
    "CausalPaddingMask",
    "ChunkedCausalMask",
    "ChunkedMask",
    "FunctionMask",
    "Mask",
    "MaskFunction",
    "MaskProgram",
    "MaterializedMask",
    "NullMask",
    "SlidingWindowCausalMask",
    "SlidingWindowNonCausalMask",
    "as_mask",
    "maximum",
    "minimum",
    "where",
]

CAPTURES_MAX = 4
BIASES_MAX = 2
NODES_MAX = 512

BiasDtype = Literal["fp32", "bf16", "fp16"]
_BIAS_DTYPES: dict[torch.dtype, BiasDtype] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

MaskFunction = Callable[[IntExpr, IntExpr, IntExpr, IntExpr], "BoolExpr | bool"]


@dataclass(frozen=True)
class MaskProgram:
    """A mask as code: equal for masks that differ only in the data of captured tensors and biases.

    Two masks of different names may print the same text (`key`), which a cache of binaries then shares.

    Attributes
    ----------
    name : str
        The mask's class, or the classes of a combination, for people and for the registry's ``masks``.
    expression : Node
        The condition over b, h, q, k and the capture slots.
    captures : tuple of str
        For each slot the variable that indexes it, ``b`` or ``h``.
    biases : tuple of str
        For each additive bias its dtype: ``fp32``, ``bf16`` or ``fp16``.
    """

    name: str
    expression: Node
    captures: tuple[CaptureIndex, ...] = ()
    biases: tuple[BiasDtype, ...] = ()

    @property
    def has_bias(self) -> bool:
        """Whether something is added to the scores."""
        return bool(self.biases)

    @property
    def always(self) -> bool:
        """Whether every key is visible to every query."""
        return self.expression is TRUE and not self.biases

    @cached_property
    def tile_class(self) -> Node:
        """The class of a tile over b, h, q_lo, q_hi, k_lo, k_hi; see `mla.mask_interval`."""
        return mask_interval.tile_class(self.expression, self.has_bias)

    @cached_property
    def key(self) -> str:
        """A name for files and logs, the same in every process and for every mask of the same code."""
        return hashlib.sha256(repr((_listing(self.expression), self.captures, self.biases)).encode()).hexdigest()[:16]

    @property
    def text(self) -> str:
        """The program in one line, complete: the same in every process; `from_text` reads it."""
        return _text_of(self)

    @staticmethod
    @functools.lru_cache(maxsize=512)
    def from_text(text: str) -> MaskProgram:
        """Return the program that `text` stands for; equal to the one it was written from."""
        try:
            name, listing, captures, biases = json.loads(text)
            nodes: list[Node] = []
            for op, value, args in listing:
                nodes.append(Node(op, tuple(nodes[i] for i in args), value))
            return MaskProgram(name, nodes[-1], tuple(captures), tuple(biases))
        except (ValueError, TypeError, IndexError) as error:
            raise ArgumentError(f"mask must be the text of a mask, mask.text, got {text!r}") from error

    def __str__(self) -> str:
        return self.name


def _listing(expression: Node) -> list[tuple[str, int | str | None, list[int]]]:
    """List the nodes of an expression, operands first and named by their places."""
    index: dict[Node, int] = {}
    for node in postorder(expression):
        index[node] = len(index)
    return [(node.op, node.value, [index[arg] for arg in node.args]) for node in index]


@functools.lru_cache(maxsize=512)
def _text_of(program: MaskProgram) -> str:
    parts = (program.name, _listing(program.expression), program.captures, program.biases)
    return json.dumps(parts, separators=(",", ":"))


class Mask:
    """A condition of visibility, to be given wherever a mask is expected.

    Masks are immutable. ``a & b`` is visible where both are, ``a | b`` where either is.

    Attributes
    ----------
    program : MaskProgram
    biases : tuple of torch.Tensor
        [B, 1 or H, Sq, Sk] each, added to the scaled score.
    text : str
        `MaskProgram.text`.
    """

    def __init__(self, function: MaskFunction) -> None:
        if torch.compiler.is_compiling():
            raise ArgumentError("a mask cannot be made inside torch.compile: make it once, outside, and pass it in")
        tracing = Tracing()
        with tracing:
            result = function(*(IntExpr(variable(name)) for name in "bhqk"))
        try:
            expression = as_bool(result)
        except DTypeError:
            raise DTypeError(
                f"a mask function must return a condition such as k <= q, got {type(result).__name__} {result!r}"
            ) from None
        captures = [Capture(tensor, index) for tensor, index in tracing.tensors]
        self._settle(type(self).__name__, expression, captures, ())

    def _settle(self, name: str, expression: Node, captures: list[Capture], biases: tuple[torch.Tensor, ...]) -> None:
        """Number the captures by first use, so that equal conditions have equal programs, and check the limits."""
        nodes = list(postorder(expression))
        used = list(dict.fromkeys(int(node.value) for node in nodes if node.op == "capture"))  # type: ignore[arg-type]
        for count, limit, what in (
            (len(nodes), NODES_MAX, "operations"),
            (len(used), CAPTURES_MAX, "captured tensors"),
            (len(biases), BIASES_MAX, "biases"),
        ):
            if count > limit:
                raise ArgumentError(f"the mask {name} has {count} {what}; allowed: at most {limit}")
        self._captures = tuple(captures[slot] for slot in used)
        self.biases = biases
        self.program = MaskProgram(
            name=name,
            expression=renumber_captures(expression, {slot: i for i, slot in enumerate(used)}),
            captures=tuple(capture.index for capture in self._captures),
            biases=tuple(_BIAS_DTYPES[bias.dtype] for bias in biases),
        )
        self.text = self.program.text

    @staticmethod
    def from_text(text: str, captures: Sequence[torch.Tensor] = (), biases: Sequence[torch.Tensor] = ()) -> Mask:
        """Return the mask of a program's text and its data, in slot order.

        Raises
        ------
        ArgumentError
            Other than as many captures and biases as the program has.
        DTypeError, ShapeError
            A capture that is no 1-D integer tensor.
        """
        if not captures and not biases and (known := _without_data.get(text)):
            return known
        mask = Mask.__new__(Mask)
        mask.text, mask.program, mask.biases = text, MaskProgram.from_text(text), tuple(biases)
        dtypes = tuple(_BIAS_DTYPES.get(bias.dtype) for bias in biases)
        if len(captures) != len(mask.program.captures) or dtypes != mask.program.biases:
            raise ArgumentError(
                f"the mask {mask.program.name} has captures {mask.program.captures} and biases {mask.program.biases}, "
                f"got {len(captures)} captures and biases {dtypes}"
            )
        mask._captures = tuple(
            Capture(tensor, index) for tensor, index in zip(captures, mask.program.captures, strict=True)
        )
        if not captures and not biases and len(_without_data) < 512:
            _without_data[text] = mask
        return mask

    @staticmethod
    def from_function(function: MaskFunction) -> Mask:
        """Make a mask from a function of (b, h, q, k) that returns whether the key is visible.

        Parameters
        ----------
        function : callable
            Called once, now, with four integer expressions: sequence of the batch, query head, global position of the
            query and of the key (positions may be negative). It may use ``+ - * // % abs``, comparisons, ``& | ^ ~``,
            `minimum`, `maximum`, `where`, integer constants, and integer tensors of shape [B] indexed by ``b`` or [H]
            indexed by ``h``. ``//`` and ``%`` floor, and give 0 for a zero divisor. Intermediate results must fit
            in 32 bits.

        Returns
        -------
        Mask

        Raises
        ------
        DTypeError
            `function` cannot be called; a condition is used in ``if``, ``and``, ``or``, ``not`` or a chained
            comparison; the result is no condition; a captured tensor is not int32, int64 or uint32, or is indexed by
            something else than b or h.
        ArgumentError
            More than 4 captured tensors, or a constant outside 32 bits.

        Notes
        -----
        An int32 or uint32 contiguous tensor is read at each call, where it lies. Anything else is copied to int32 now;
        a CPU tensor is copied to the device at the first call there. Nothing synchronises.

        Examples
        --------
        >>> Mask.from_function(lambda b, h, q, k: (k <= q) & ((q - k < 4096) | (k < 64)))
        FunctionMask
        """
        if not callable(function):
            raise DTypeError(f"function must be a callable of (b, h, q, k), got {type(function).__name__}")
        return FunctionMask(function)

    @property
    def captures(self) -> tuple[torch.Tensor, ...]:
        """Captured tensors in slot order, int32, contiguous, [B] or [H], where they were given."""
        return tuple(capture.on(capture.source.device) for capture in self._captures)

    @property
    def operands(self) -> tuple[Any, ...]:
        """What `from_text` takes: the mask as operators of ``torch.ops.mla`` take it."""
        return self.text, [capture.source for capture in self._captures], list(self.biases)

    def captures_on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Captured tensors in slot order on the device of a call; CPU tensors are copied there once.

        Raises
        ------
        DeviceError
            A captured tensor is on another GPU, or on a GPU while the call is on the CPU.
        """
        return tuple(capture.on(device) for capture in self._captures)

    def check_capturable(self) -> None:
        """Raise if a graph that is being captured would not see new values of a captured tensor.

        Raises
        ------
        DeviceError
            A captured tensor was copied, because it is on the CPU, not int32 or uint32, or not contiguous.
        """
        for capture in self._captures:
            if not capture.in_place:
                raise DeviceError(
                    f"a tensor captured by {self.program.name} is {capture.source.dtype} on {capture.source.device} "
                    "and a graph is being captured: a replay would not see its new values. Make it a contiguous int32 "
                    "tensor on the device of the call"
                )

    def check(self, batch_size: int, num_heads: int, device: torch.device) -> None:
        """Check captured tensors and biases against the extents and the device of a call.

        Raises
        ------
        ShapeError
            A captured tensor is not [batch_size] or [num_heads], or a bias not [batch_size, 1 or num_heads, Sq, Sk].
        DeviceError
            One of them is on a device where the call cannot read it.
        """
        for capture, tensor in zip(self._captures, self.captures_on(device), strict=True):
            extent = batch_size if capture.index == "b" else num_heads
            if tensor.shape[0] != extent:
                what = "sequences" if capture.index == "b" else "heads"
                raise ShapeError(
                    f"a tensor captured by {self.program.name} and indexed by {capture.index} has "
                    f"{tensor.shape[0]} elements; the call has {extent} {what}"
                )
        for bias in self.biases:
            if bias.shape[0] != batch_size or bias.shape[1] not in (1, num_heads):
                raise ShapeError(
                    f"the bias of {self.program.name} has shape {list(bias.shape)}; allowed: "
                    f"[{batch_size}, 1 or {num_heads}, Sq, Sk] for {batch_size} sequences and {num_heads} heads"
                )
            if bias.device != device:
                raise DeviceError(f"the bias of {self.program.name} is on {bias.device}, the call is on {device}")

    def __and__(self, other: Mask) -> Mask:
        return _CombinedMask("and", self, as_mask(other, "the right side of &"))

    def __or__(self, other: Mask) -> Mask:
        other = as_mask(other, "the right side of |")
        for side in (self, other):
            if side.biases:
                raise DTypeError(f"{side.program.name} adds a bias to the scores and cannot be a side of |; use &")
        return _CombinedMask("or", self, other)

    def __repr__(self) -> str:
        return self.program.name

    def visible(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        """Evaluate the condition in torch, biases left aside.

        Parameters
        ----------
        b, h, q, k : torch.Tensor or int
            Integer tensors that broadcast against each other, on one device.

        Returns
        -------
        torch.Tensor
            bool, of the common shape.
        """
        tensors = [x for x in (b, h, q, k) if isinstance(x, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        result = self._evaluate(self.program.expression, device, b=b, h=h, q=q, k=k)
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))
        return torch.as_tensor(result, device=device).expand(shape)

    def bias(self, b: Any, h: Any, row: Any, col: Any) -> torch.Tensor:
        """Read the sum of the biases in torch.

        Parameters
        ----------
        b, h, row, col : torch.Tensor or int
            Integers that broadcast; row is the query's position minus ``start[b]``, col the position of the key.

        Returns
        -------
        torch.Tensor
            float32, natural-log units, to be added to the scaled score. -inf outside the extent of a bias: a key whose
            bias is -inf is hidden.
        """
        device = next((x.device for x in (b, h, row, col) if isinstance(x, torch.Tensor)), torch.device("cpu"))
        b, h, row, col = (torch.as_tensor(x, device=device) for x in (b, h, row, col))
        total: Any = 0.0
        for bias in self.biases:
            _, heads, rows, cols = bias.shape
            inside = (row >= 0) & (row < rows) & (col >= 0) & (col < cols)
            if rows == 0 or cols == 0:
                value = torch.full((), float("-inf"), dtype=torch.float32, device=device)
            else:
                value = bias[b, h if heads > 1 else 0, row.clamp(0, rows - 1), col.clamp(0, cols - 1)].float()
            total = total + torch.where(inside, value, float("-inf"))
        return torch.as_tensor(total, dtype=torch.float32, device=device)

    def tile_class(self, b: Any, h: Any, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> Any:
        """Classify tiles of positions, bounds inclusive, by interval analysis of the condition.

        Parameters
        ----------
        b, h, q_lo, q_hi, k_lo, k_hi : int or torch.Tensor
            All Python integers, or integer tensors (and integers) that broadcast.

        Returns
        -------
        int or torch.Tensor
            `TILE_HIDDEN` (0): no key visible. `TILE_VISIBLE` (2): every key visible, never where there is a bias.
            `TILE_PARTIAL` (1): anything. Of integers an int (an element of a captured tensor is read: that synchronises
            if it is on a GPU); of tensors an int8 tensor.
        """
        bounds = {"b": b, "h": h, "q_lo": q_lo, "q_hi": q_hi, "k_lo": k_lo, "k_hi": k_hi}
        tensors = [x for x in bounds.values() if isinstance(x, torch.Tensor)]
        device = tensors[0].device if tensors else None
        result = self._evaluate(self.program.tile_class, device, **bounds)
        if device is None:
            return int(result)
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))
        return torch.as_tensor(result, device=device).to(torch.int8).expand(shape)

    def _evaluate(self, node: Node, device: torch.device | None, **variables: Any) -> Any:
        """Evaluate on Python integers where ``device`` is None, else on tensors."""
        values: list[Any] = []
        for i, capture in enumerate(self._captures):
            index = variables[self.program.captures[i]]
            if device is None:
                values.append(int(capture.on(capture.source.device)[index]))
            else:
                values.append(capture.on(device)[index].long())
        return evaluate(node, variables, values)


_without_data: dict[str, Mask] = {}  # masks that are their text alone


class FunctionMask(Mask):
    """A mask from a user's function; made by `Mask.from_function`."""


class _CombinedMask(Mask):
    def __init__(self, op: Literal["and", "or"], left: Mask, right: Mask) -> None:
        captures = list(left._captures)
        slots: dict[int, int] = {}
        for i, capture in enumerate(right._captures):
            slots[i] = next((j for j, known in enumerate(captures) if known.same_as(capture)), len(captures))
            if slots[i] == len(captures):
                captures.append(capture)
        expression = make(op, left.program.expression, renumber_captures(right.program.expression, slots))
        name = f"({left.program.name} {'&' if op == 'and' else '|'} {right.program.name})"
        self._settle(name, expression, captures, left.biases + right.biases)


def _window(value: object, name: str) -> int:
    try:
        size = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        size = None
    if size is None or isinstance(value, bool | torch.Tensor):
        raise DTypeError(f"{name} takes a size in tokens, a Python int >= 1, got {type(value).__name__} {value!r}")
    if not 1 <= size < 2**31:
        raise ArgumentError(f"{name} takes a size in tokens from 1 to 2147483647, got {size}")
    return size


class NullMask(Mask):
    """Every key is visible."""

    def __init__(self) -> None:
        super().__init__(lambda b, h, q, k: True)


class CausalMask(Mask):
    """Visible where k <= q."""

    def __init__(self) -> None:
        super().__init__(lambda b, h, q, k: k <= q)


class ChunkedMask(Mask):
    """Visible within a chunk of W tokens: q // W == k // W."""

    def __init__(self, chunk_size: int) -> None:
        size = _window(chunk_size, type(self).__name__)
        super().__init__(lambda b, h, q, k: q // size == k // size)


class ChunkedCausalMask(Mask):
    """Visible where k <= q within a chunk of W tokens."""

    def __init__(self, chunk_size: int) -> None:
        size = _window(chunk_size, type(self).__name__)
        super().__init__(lambda b, h, q, k: (k <= q) & (q // size == k // size))


class SlidingWindowCausalMask(Mask):
    """Visible where q - W < k <= q: the query's own token and the W - 1 before it."""

    def __init__(self, window_size: int) -> None:
        size = _window(window_size, type(self).__name__)
        super().__init__(lambda b, h, q, k: (k <= q) & (q - k < size))


class SlidingWindowNonCausalMask(Mask):
    """Visible where k > q - W: everything later, and the W - 1 tokens before."""

    def __init__(self, window_size: int) -> None:
        size = _window(window_size, type(self).__name__)
        super().__init__(lambda b, h, q, k: q - k < size)


class CausalPaddingMask(Mask):
    """Visible where k <= q and k < valid_lengths[b].

    Parameters
    ----------
    valid_lengths : torch.Tensor
        [B] int32, int64 or uint32: key positions of each sequence that hold real tokens.
    """

    def __init__(self, valid_lengths: torch.Tensor) -> None:
        if not isinstance(valid_lengths, torch.Tensor):
            raise DTypeError(f"valid_lengths must be an integer tensor [B], got {type(valid_lengths).__name__}")
        super().__init__(lambda b, h, q, k: (k <= q) & (k < valid_lengths[b]))


class MaterializedMask(Mask):
    """A bias added to the scaled scores, after softcap, in natural-log units; -inf hides.

    Parameters
    ----------
    bias : torch.Tensor
        [B, Sq, Sk] or [B, 1 or H, Sq, Sk], float32, bfloat16 or float16, last dim contiguous, on the call's device.
        Row i belongs to the i-th query of the call, column j to key position j; outside it nothing is visible.
    """

    def __init__(self, bias: torch.Tensor) -> None:
        if not isinstance(bias, torch.Tensor) or bias.dtype not in _BIAS_DTYPES:
            got = bias.dtype if isinstance(bias, torch.Tensor) else type(bias).__name__
            hint = "; write torch.where(visible, 0.0, -torch.inf)" if got == torch.bool else ""
            raise DTypeError(f"bias must be a float32, bfloat16 or float16 tensor, got {got}{hint}")
        if bias.ndim not in (3, 4):
            raise ShapeError(f"bias has shape {list(bias.shape)}; allowed: [B, Sq, Sk] or [B, H, Sq, Sk]")
        if bias.shape[-1] > 1 and bias.stride(-1) != 1:
            raise ShapeError(f"the last dim of bias must be contiguous, its strides are {bias.stride()}")
        self._settle(type(self).__name__, TRUE, [], (bias.unsqueeze(1) if bias.ndim == 3 else bias,))


_BUILT_IN = {
    "NullMask": "NullMask()",
    "CausalMask": "CausalMask()",
    "ChunkedMask": "ChunkedMask(chunk_size)",
    "ChunkedCausalMask": "ChunkedCausalMask(chunk_size)",
    "SlidingWindowCausalMask": "SlidingWindowCausalMask(window_size)",
    "SlidingWindowNonCausalMask": "SlidingWindowNonCausalMask(window_size)",
    "CausalPaddingMask": "CausalPaddingMask(valid_lengths)",
    "MaterializedMask": "MaterializedMask(bias)",
}


def as_mask(value: object, name: str) -> Mask:
    """Return ``value`` if it is a mask.

    Raises
    ------
    DTypeError
        It is not; the message names the argument and what to write instead.
    """
    if isinstance(value, Mask):
        return value
    advice = "pass one of mla's mask objects, " + ", ".join(_BUILT_IN.values())
    if isinstance(value, str):
        by_word = {"".join(c for c in known.removesuffix("Mask").lower()): known for known in _BUILT_IN}
        word = "".join(c for c in value.lower().removesuffix("mask") if c.isalnum())
        near = difflib.get_close_matches({"none": "null", "full": "null"}.get(word, word), by_word, n=1, cutoff=0.5)
        advice = f"pass mla.{_BUILT_IN[by_word[near[0]]]}" if near else advice
    elif value is None:
        advice = "pass mla.NullMask() where every key is visible"
    elif inspect.isclass(value) and issubclass(value, Mask):
        advice = f"make an object of it: mla.{_BUILT_IN.get(value.__name__, value.__name__)}"
    elif isinstance(value, torch.Tensor):
        advice = "pass mla.MaterializedMask(bias)"
    elif callable(value):
        advice = "pass mla.Mask.from_function(...)"
    shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
    raise DTypeError(f"{name} must be a mask object, got {shown}; {advice}")
