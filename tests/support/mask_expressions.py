"""Random mask functions, with a plain-Python meaning of their own to hold the library's against.

A function is drawn as a nested tuple. `build` hands it to the library as a mask; `meaning` computes it on Python
integers without any of the library's code. Constants and depth keep every intermediate result well inside 32 bits.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from hypothesis import strategies as st

from mla.masks import FunctionMask, Mask, maximum, minimum, where

BATCH, HEADS = 3, 2
BY_SEQUENCE = torch.tensor([-7, 0, 5], dtype=torch.int64)
BY_HEAD = torch.tensor([3, -4], dtype=torch.int32)

_INT_OPS = {"+": operator.add, "-": operator.sub, "//": operator.floordiv, "%": operator.mod}
_COMPARISONS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_BOOL_OPS = {"&": operator.and_, "|": operator.or_, "^": operator.xor}

_constants = st.integers(-9, 9)
_leaves = st.one_of(
    st.sampled_from(["q", "k", "q", "k", "b", "h", "by_sequence", "by_head"]).map(lambda name: (name,)),
    _constants.map(lambda value: ("constant", value)),
)


def _integers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(st.sampled_from([*_INT_OPS, "min", "max"]), inner, inner),
        st.tuples(st.just("*"), inner, _constants.map(lambda value: ("constant", value))),
        st.tuples(st.sampled_from(["abs", "neg"]), inner),
        st.tuples(st.just("where"), st.tuples(st.sampled_from(list(_COMPARISONS)), inner, inner), inner, inner),
    )


integers = st.recursive(_leaves, _integers, max_leaves=5)
conditions = st.recursive(
    st.tuples(st.sampled_from(list(_COMPARISONS)), integers, integers),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(list(_BOOL_OPS)), inner, inner), st.tuples(st.just("not"), inner)
    ),
    max_leaves=4,
)


def build(tree: Any) -> Mask:
    """Make the library's mask of a drawn function."""
    functions = {"min": minimum, "max": maximum, "where": where, "abs": abs, "neg": operator.neg}
    functions |= {"not": operator.invert, "*": operator.mul, **_INT_OPS, **_COMPARISONS, **_BOOL_OPS}

    def walk(node: Any, names: dict[str, Any]) -> Any:
        op, *rest = node
        if op == "constant":
            return rest[0]
        if not rest:
            return names[op]
        args = [walk(arg, names) for arg in rest]
        if all(isinstance(arg, int) for arg in args):  # constants alone never reach the library
            return _apply(op, args)
        return functions[op](*args)

    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        return walk(tree, {"b": b, "h": h, "q": q, "k": k, "by_sequence": BY_SEQUENCE[b], "by_head": BY_HEAD[h]})

    return FunctionMask(function)


def _apply(op: str, args: list[Any]) -> Any:
    if op in ("//", "%") and args[1] == 0:
        return 0
    functions = {"min": min, "max": max, "where": lambda c, x, y: x if c else y, "abs": abs, "neg": operator.neg}
    functions |= {"not": operator.not_, "*": operator.mul, **_INT_OPS, **_COMPARISONS, **_BOOL_OPS}
    return functions[op](*args)


def meaning(tree: Any, b: int, h: int, q: int, k: int) -> Any:
    """Compute a drawn function on Python integers."""
    op, *rest = tree
    if op == "constant":
        return rest[0]
    if not rest:
        return {"b": b, "h": h, "q": q, "k": k, "by_sequence": int(BY_SEQUENCE[b]), "by_head": int(BY_HEAD[h])}[op]
    return _apply(op, [meaning(arg, b, h, q, k) for arg in rest])
