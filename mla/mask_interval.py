"""Interval analysis of a mask: is any key of a tile visible, are all of them?

`tile_class` turns the expression of a mask over (b, h, q, k) into an expression over the inclusive bounds of a tile,
(b, h, q_lo, q_hi, k_lo, k_hi), in the same language, so one evaluation and one printer serve both. Every node becomes a
pair (lo, hi): an integer lies in [lo, hi]; for a condition lo says "holds everywhere in the tile" and hi "may hold
somewhere", which is the interval of 0 and 1. The pair is always sound; it is tight where each variable occurs once
below a comparison, which is so in every built-in mask.
"""

from __future__ import annotations

from functools import lru_cache

from mla.mask_expr import ONE, ZERO, Node, integer, make, negate, postorder, variable

TILE_HIDDEN, TILE_PARTIAL, TILE_VISIBLE = 0, 1, 2

Interval = tuple[Node, Node]


def _spread(op: str, x: Interval, y: Interval) -> Interval:
    """Bounds of an operation that is monotonic in each operand, the direction unknown: the extremes of its corners."""
    corners = dict.fromkeys(make(op, a, b) for a in dict.fromkeys(x) for b in dict.fromkeys(y))
    lo, *rest = corners
    hi = lo
    for corner in rest:
        lo, hi = make("min", lo, corner), make("max", hi, corner)
    return lo, hi


def _ordered(op: str, x: Interval, c: int) -> Interval:
    """Bounds of ``x op c`` for a constant c, where the operation falls in x exactly when c is negative."""
    bounds = make(op, x[0], integer(c)), make(op, x[1], integer(c))
    return bounds if c >= 0 else (bounds[1], bounds[0])


def _mul(x: Interval, y: Interval) -> Interval:
    for one, other in ((x, y), (y, x)):
        c = other[0].constant
        if other[0] is other[1] and c is not None:
            return _ordered("mul", one, c)
    return _spread("mul", x, y)


def _floordiv(x: Interval, y: Interval) -> Interval:
    lo, hi = y
    c = lo.constant if lo is hi else None
    if c is not None:
        return _ordered("floordiv", x, c)
    one_sign = make("or", make("or", make("lt", ZERO, lo), make("lt", hi, ZERO)), make("eq", lo, hi))
    largest = make("max", make("abs", x[0]), make("abs", x[1]))
    least, most = _spread("floordiv", x, y)
    return make("where", one_sign, least, make("sub", ZERO, largest)), make("where", one_sign, most, largest)


def _mod(x: Interval, y: Interval) -> Interval:
    lo, hi = y
    c = lo.constant if lo is hi else None
    if c is None:
        least, most = make("min", make("add", lo, ONE), ZERO), make("max", make("sub", hi, ONE), ZERO)
    else:
        least, most = (ZERO, integer(c - 1)) if c > 0 else (integer(c + 1), ZERO)
    one_period = make("and", make("eq", lo, hi), make("eq", make("floordiv", x[0], lo), make("floordiv", x[1], lo)))
    rests = make("mod", x[0], lo), make("mod", x[1], lo)
    return make("where", one_period, rests[0], least), make("where", one_period, rests[1], most)


def _where(condition: Interval, x: Interval, y: Interval) -> Interval:
    always, maybe = condition
    return (
        make("where", always, x[0], make("where", maybe, make("min", x[0], y[0]), y[0])),
        make("where", always, x[1], make("where", maybe, make("max", x[1], y[1]), y[1])),
    )


def _xor(x: Interval, y: Interval) -> Interval:
    differ = make("or", make("and", x[0], negate(y[1])), make("and", negate(x[1]), y[0]))
    agree = make("or", make("and", x[0], y[0]), make("and", negate(x[1]), negate(y[1])))
    return differ, negate(agree)


def _bounds(node: Node, args: list[Interval]) -> Interval:
    if all(lo is hi for lo, hi in args):
        same = make(node.op, *(lo for lo, _ in args))
        return same, same
    (xl, xh), (yl, yh) = args[0], args[1] if len(args) > 1 else args[0]
    match node.op:
        case "add" | "min" | "max" | "and" | "or":
            return make(node.op, xl, yl), make(node.op, xh, yh)
        case "sub":
            return make("sub", xl, yh), make("sub", xh, yl)
        case "mul":
            return _mul(*args)
        case "floordiv":
            return _floordiv(*args)
        case "mod":
            return _mod(*args)
        case "abs":
            below = make("sub", ZERO, xh)
            return make("max", make("max", xl, below), ZERO), make("max", xh, make("sub", ZERO, xl))
        case "where":
            return _where(*args)
        case "lt" | "le":
            return make(node.op, xh, yl), make(node.op, xl, yh)
        case "eq" | "ne":
            same = make("and", make("le", xh, yl), make("le", yh, xl))
            meet = make("and", make("le", xl, yh), make("le", yl, xh))
            return (same, meet) if node.op == "eq" else (negate(meet), negate(same))
        case "xor":
            return _xor(*args)
    raise AssertionError(f"no interval rule for {node.op}")


_VARIABLES = {
    "b": (variable("b"), variable("b")),
    "h": (variable("h"), variable("h")),
    "q": (variable("q_lo"), variable("q_hi")),
    "k": (variable("k_lo"), variable("k_hi")),
}


@lru_cache(maxsize=256)
def tile_class(expression: Node, biased: bool) -> Node:
    """Return the expression of a tile's class: `TILE_HIDDEN`, `TILE_PARTIAL` or `TILE_VISIBLE`.

    With a bias a tile is never visible as a whole: the bias has to be read, and may hide.
    """
    intervals: dict[Node, Interval] = {}
    for node in postorder(expression):
        if node.op == "var":
            intervals[node] = _VARIABLES[str(node.value)]
        elif not node.args:
            intervals[node] = node, node
        else:
            intervals[node] = _bounds(node, [intervals[arg] for arg in node.args])
    always, maybe = intervals[expression]
    visible, partial, hidden = integer(TILE_VISIBLE), integer(TILE_PARTIAL), integer(TILE_HIDDEN)
    if biased:
        return make("where", maybe, partial, hidden)
    if always is maybe:
        return make("where", always, visible, hidden)
    return make("where", always, visible, make("where", maybe, partial, hidden))
