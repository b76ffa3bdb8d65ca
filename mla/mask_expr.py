"""The expression tree of a mask: integer arithmetic and comparisons over (b, h, q, k) and captured integer tensors.

Nodes are interned: equal expressions are one object, compared and hashed by identity, and an expression that is used
twice is printed and evaluated once. A mask function builds them (`mla.mask_trace`); the torch evaluation here, the
interval analysis (`mla.mask_interval`) and the printers (`mla.mask_code`) walk them.

Meaning: 32-bit integers. ``//`` and ``%`` round towards minus infinity, and both give 0 for a zero divisor. On a device
a result outside 32 bits is undefined, so constants have to fit and products of positions should be avoided.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mla.errors import ArgumentError

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
BOOLEAN_OPS = frozenset({"bool", "lt", "le", "eq", "ne", "and", "or", "xor"})

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Node] = weakref.WeakValueDictionary()
_interned_lock = threading.Lock()


class Node:
    """One operation.

    ``value`` is the constant of ``int`` and ``bool``, the name of ``var``, the slot of ``capture``.
    """

    __slots__ = ("__weakref__", "args", "op", "value")
    op: str
    args: tuple[Node, ...]
    value: int | str | None

    def __new__(cls, op: str, args: tuple[Node, ...] = (), value: int | str | None = None) -> Node:
        key = (op, args, value)
        with _interned_lock:
            node = _interned.get(key)
            if node is None:
                node = super().__new__(cls)
                node.op, node.args, node.value = op, args, value
                _interned[key] = node
        return node

    def __reduce__(self) -> tuple[Any, ...]:
        return Node, (self.op, self.args, self.value)

    def __repr__(self) -> str:
        if self.op == "capture":
            return f"capture[{self.value}]"
        return f"{self.op}({', '.join(map(repr, self.args))})" if self.args else str(self.value)

    @property
    def is_bool(self) -> bool:
        """Whether the value is a boolean."""
        return self.op in BOOLEAN_OPS

    @property
    def constant(self) -> int | None:
        """The value of a constant, None for anything else."""
        return self.value if self.op in ("int", "bool") else None  # type: ignore[return-value]


TRUE, FALSE = Node("bool", value=True), Node("bool", value=False)


def integer(value: int) -> Node:
    """Make an integer constant."""
    if not INT32_MIN <= value <= INT32_MAX:
        raise ArgumentError(f"a mask's integers are 32-bit: {value} is outside [{INT32_MIN}, {INT32_MAX}]")
    return Node("int", value=value)


def variable(name: str) -> Node:
    """Make a variable: ``b``, ``h``, ``q`` or ``k``, or a bound of q or k."""
    return Node("var", value=name)


def postorder(*roots: Node) -> Iterator[Node]:
    """Yield every node below ``roots`` once, operands before what uses them (no recursion: chains may be long)."""
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args) if arg not in seen)


# ---------------------------------------------------------------------------------------------------------------------
# Making nodes: constants fold, identities vanish, a negation is pushed down to the comparisons.


def make(op: str, *args: Node) -> Node:
    """Make the node ``op(args)``, or something simpler of the same value."""
    constants = [arg.constant for arg in args]
    if None not in constants:
        value = _APPLY[op](*constants)
        return Node("bool", value=bool(value)) if op in BOOLEAN_OPS else integer(value)
    simplify = _SIMPLIFY.get(op)
    simpler = simplify(*args) if simplify else None
    return Node(op, args) if simpler is None else simpler


def negate(node: Node) -> Node:
    """Make the opposite of a boolean node; the tree itself has no ``not``."""
    opposite: dict[Node, Node] = {}
    for n in postorder(node):
        if not n.is_bool:
            continue
        match n.op:
            case "bool":
                opposite[n] = FALSE if n.value else TRUE
            case "lt":
                opposite[n] = make("le", n.args[1], n.args[0])
            case "le":
                opposite[n] = make("lt", n.args[1], n.args[0])
            case "eq" | "ne":
                opposite[n] = make("ne" if n.op == "eq" else "eq", *n.args)
            case "and" | "or":
                opposite[n] = make("or" if n.op == "and" else "and", *(opposite[arg] for arg in n.args))
            case "xor":
                opposite[n] = make("xor", opposite[n.args[0]], n.args[1])
    return opposite[node]


ZERO, ONE = integer(0), integer(1)


def _simplify_add(x: Node, y: Node) -> Node | None:
    return y if x is ZERO else x if y is ZERO else None


def _simplify_sub(x: Node, y: Node) -> Node | None:
    if y is ZERO:
        return x
    if x is y:
        return ZERO
    if y.op == "mod" and y.args[0] is x and y.args[1].constant is not None:
        # x - x % c is exact under interval analysis only as x // c * c, where x occurs once.
        return make("mul", make("floordiv", x, y.args[1]), y.args[1])
    return None


def _simplify_mul(x: Node, y: Node) -> Node | None:
    if ZERO in (x, y):
        return ZERO
    return y if x is ONE else x if y is ONE else None


def _simplify_and(x: Node, y: Node) -> Node | None:
    if FALSE in (x, y):
        return FALSE
    return y if x is TRUE or x is y else x if y is TRUE else None


def _simplify_or(x: Node, y: Node) -> Node | None:
    if TRUE in (x, y):
        return TRUE
    return y if x is FALSE or x is y else x if y is FALSE else None


def _simplify_xor(x: Node, y: Node) -> Node | None:
    if x is y:
        return FALSE
    for one, other in ((x, y), (y, x)):
        if one.op == "bool":
            return negate(other) if one.value else other
    return None


def _simplify_where(condition: Node, x: Node, y: Node) -> Node | None:
    if condition.op == "bool":
        return x if condition.value else y
    return x if x is y else None


_SIMPLIFY: dict[str, Callable[..., Node | None]] = {
    "add": _simplify_add,
    "sub": _simplify_sub,
    "mul": _simplify_mul,
    "floordiv": lambda x, y: x if y is ONE else ZERO if y is ZERO or x is ZERO else None,
    "mod": lambda x, y: ZERO if y is ONE or y is ZERO or x is ZERO else None,
    "min": lambda x, y: x if x is y else None,
    "max": lambda x, y: x if x is y else None,
    "where": _simplify_where,
    "lt": lambda x, y: FALSE if x is y else None,
    "le": lambda x, y: TRUE if x is y else None,
    "eq": lambda x, y: TRUE if x is y else None,
    "ne": lambda x, y: FALSE if x is y else None,
    "and": _simplify_and,
    "or": _simplify_or,
    "xor": _simplify_xor,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, on Python integers and on torch tensors alike.


def _is_tensor(*values: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)


def _where(condition: Any, x: Any, y: Any) -> Any:
    return torch.where(condition, x, y) if _is_tensor(condition) else (x if condition else y)


def _floordiv(x: Any, y: Any) -> Any:
    if not _is_tensor(y):
        return x // y if y else x * 0
    return torch.where(y == 0, 0, torch.floor_divide(torch.as_tensor(x, device=y.device), torch.where(y == 0, 1, y)))


def _mod(x: Any, y: Any) -> Any:
    if not _is_tensor(y):
        return x % y if y else x * 0
    return torch.where(y == 0, 0, torch.remainder(torch.as_tensor(x, device=y.device), torch.where(y == 0, 1, y)))


def _minimum(x: Any, y: Any) -> Any:
    return _where(x < y, x, y)


def _maximum(x: Any, y: Any) -> Any:
    return _where(x < y, y, x)


_APPLY: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": _floordiv, "mod": _mod,
    "min": _minimum, "max": _maximum, "abs": abs, "where": _where,
    "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip


def evaluate(root: Node, variables: Mapping[str, Any], captures: Sequence[Any]) -> Any:
    """Compute ``root`` from the values of its variables and capture slots: Python integers or integer tensors."""
    values: dict[Node, Any] = {}
    for node in postorder(root):
        match node.op:
            case "int" | "bool":
                values[node] = node.value
            case "var":
                values[node] = variables[str(node.value)]
            case "capture":
                values[node] = captures[int(node.value)]  # type: ignore[arg-type]
            case op:
                values[node] = _APPLY[op](*(values[arg] for arg in node.args))
    return values[root]


def renumber_captures(root: Node, slots: Mapping[int, int]) -> Node:
    """Rebuild ``root`` with capture slot i turned into slot ``slots[i]``."""
    rebuilt: dict[Node, Node] = {}
    for node in postorder(root):
        if node.op == "capture":
            rebuilt[node] = Node("capture", value=slots[int(node.value)])  # type: ignore[arg-type]
        else:
            rebuilt[node] = Node(node.op, tuple(rebuilt[arg] for arg in node.args), node.value)
    return rebuilt[root]
