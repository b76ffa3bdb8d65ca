"""A mask of the whole problem as a rank sees it that has some of the heads and some of the keys.

Kernels number heads and keys from 0. Where the mask's expression says k, the local one says the position of local key
k; where it says h, the head's number in the whole model. For keys dealt out in blocks of b over w ranks

    k  ->  first[b] + k // b * (b * w) + k % b

and for a stretch of keys ``first[b] + k``. That is an expression like any other: interval analysis goes on to skip
tiles, its bounds exact but for at most b - 1 positions at either end of a tile. ``first`` is a captured tensor, so that
all ranks compile the same program.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from mla.distributed.key_shards import KeyShard
from mla.errors import ArgumentError, ShapeError
from mla.mask_expr import Node, integer, make, postorder, variable
from mla.mask_trace import CaptureIndex
from mla.masks import CAPTURES_MAX, Mask, MaskProgram

#: What `_rewrite` knows of the keys: "whole" where all are here, None for a stretch, else `InterleavedKeys.strides`.
_Keys = tuple[int, int] | None | str


def local_mask(
    mask: Mask, heads: range, num_heads: int, keys: KeyShard | None, batch_size: int, device: torch.device
) -> Mask:
    """Return what `mask` hides from the heads in `heads`, out of `num_heads`, among the keys of a shard.

    Parameters
    ----------
    mask : Mask
        Of the whole problem: its h in [0, num_heads), its k a position.
    keys : KeyShard or None
        None where all keys are here.

    Raises
    ------
    ArgumentError
        A mask of so many captured tensors that the position of a key, or the number of a head, is one too many.
    ShapeError
        A captured tensor indexed by h, or a bias, of another number of heads.
    """
    uses_k, uses_h = (_uses(mask.program, name) for name in "kh")
    captures = list(mask.captures_on(device))
    for i, index in enumerate(mask.program.captures):
        if index == "h":
            _require_heads(captures[i].shape[0], num_heads, "a captured tensor", mask)
            captures[i] = captures[i][heads.start : heads.stop]
    strides: _Keys = "whole"
    if keys is not None and uses_k:
        strides = keys.strides
        captures.append(keys.first_positions(batch_size, device))
    uses_h = uses_h and heads != range(num_heads)
    if uses_h:
        captures.append(torch.arange(heads.start, heads.stop, dtype=torch.int32, device=device))
    if len(captures) > CAPTURES_MAX:
        extra = len(captures) - len(mask.program.captures)
        raise ArgumentError(
            f"the mask {mask} captures {len(mask.program.captures)} tensors, and on several ranks {extra} more are "
            f"needed for positions and heads; allowed: {CAPTURES_MAX} in all"
        )
    biases = []
    for bias in mask.biases:
        if bias.shape[1] > 1:
            _require_heads(bias.shape[1], num_heads, "the bias", mask)
            bias = bias[:, heads.start : heads.stop]
        biases.append(bias if keys is None else _own_columns(bias, keys))
    return Mask.from_text(_rewrite(mask.program, strides, uses_h).text, captures, biases)


def depends_on_heads(mask: Mask) -> bool:
    """Return whether a mask hides other keys from one head than from another."""
    program = mask.program
    return _uses(program, "h") or "h" in program.captures or any(bias.shape[1] > 1 for bias in mask.biases)


@functools.lru_cache(maxsize=512)
def _uses(program: MaskProgram, name: str) -> bool:
    return variable(name) in postorder(program.expression)


@functools.lru_cache(maxsize=512)
def _rewrite(program: MaskProgram, strides: _Keys, uses_h: bool) -> MaskProgram:
    """Return the program with positions and head numbers in place of k and h, captured behind its own tensors."""
    captures: list[CaptureIndex] = list(program.captures)
    values: dict[str, Node] = {}
    if strides != "whole":
        k = variable("k")
        if strides is not None:
            block, cycle = (integer(int(stride)) for stride in strides)
            k = make("add", make("mul", make("floordiv", k, block), cycle), make("mod", k, block))
        values["k"] = make("add", Node("capture", value=len(captures)), k)
        captures.append("b")
    if uses_h:
        values["h"] = Node("capture", value=len(captures))
        captures.append("h")
    if not values:
        return program
    return MaskProgram(
        f"{program.name} of a shard", _substitute(program.expression, values), tuple(captures), program.biases
    )


def _substitute(root: Node, values: Mapping[str, Node]) -> Node:
    """Rebuild an expression with other nodes in place of some variables."""
    rebuilt: dict[Node, Node] = {}
    for node in postorder(root):
        if node.op == "var":
            rebuilt[node] = values.get(str(node.value), node)
        else:
            rebuilt[node] = make(node.op, *(rebuilt[arg] for arg in node.args)) if node.args else node
    return rebuilt[root]


def _own_columns(bias: torch.Tensor, keys: KeyShard) -> torch.Tensor:
    """Return the columns of own keys, -inf where the bias has none: a copy."""
    columns = bias.shape[-1]
    if columns == 0:
        return bias
    positions = keys.positions(torch.arange(columns, device=bias.device))
    index = positions.clamp(max=columns - 1)[:, None, None].expand(*bias.shape[:3], -1)
    return bias.gather(-1, index).masked_fill_(positions[:, None, None] >= columns, float("-inf"))


def _require_heads(count: int, num_heads: int, what: str, mask: Mask) -> None:
    if count != num_heads:
        raise ShapeError(f"{what} of {mask} has {count} heads; the heads of all ranks together are {num_heads}")
