"""A rank's mask hides from local heads and keys what the whole mask hides from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla import ArgumentError, Mask, ShapeError, masks
from mla.distributed import ContiguousKeys, InterleavedKeys, KeyShard
from mla.distributed.local_mask import local_mask
from mla.masks import TILE_HIDDEN, TILE_VISIBLE
from tests.distributed.shards import MASKS

BATCH, HEADS, KEYS = 3, 6, 40
CPU = torch.device("cpu")
SHARDS: dict[str, KeyShard | None] = {
    "all": None,
    "blocks of 8": InterleavedKeys(8, 2, 3),
    "blocks of 1": InterleavedKeys(1, 1, 4),
    "one rank": InterleavedKeys(8, 0, 1),
    "stretch": ContiguousKeys(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 33, 70], [30, 70, 90]))),
}


def grid(keys: KeyShard | None, heads: range) -> tuple[Any, Any]:
    """Return (b, h, q, k) of local and of whole numbering, [B, h, Sq, n]."""
    b, q = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(-3, 130).view(-1, 1)
    h, k = torch.arange(len(heads)).view(-1, 1, 1), torch.arange(KEYS)
    positions = k if keys is None else keys.positions(k)[:, None, None]
    return (b, h, q, k), (b, h + heads.start, q, positions)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", MASKS)
def test_visible_and_tile_class(name: str, shard: str) -> None:
    mask, keys, heads = MASKS[name](BATCH, HEADS), SHARDS[shard], range(2, 4)
    local = local_mask(mask, heads, HEADS, keys, BATCH, CPU)
    (b, h, q, k), whole = grid(keys, heads)
    visible = local.visible(b, h, q, k)
    assert torch.equal(visible, mask.visible(*whole).expand_as(visible))
    # Tiles of 16 queries by 10 keys.
    lows, highs = q[:128:16], q[15:128:16]
    classes = local.tile_class(b, h, lows, highs, k[::10], k[9::10])
    tiles = visible[:, :, :128].unflatten(3, (4, 10)).unflatten(2, (8, 16))
    assert not tiles.any(-1).any(-2)[classes == TILE_HIDDEN].any()
    assert tiles.all(-1).all(-2)[classes == TILE_VISIBLE].all()


def test_a_bias_is_read_at_the_positions() -> None:
    bias = torch.randn(BATCH, HEADS, 5, 50)
    whole_mask = masks.MaterializedMask(bias)
    for keys in (SHARDS["blocks of 8"], SHARDS["stretch"]):
        local = local_mask(whole_mask, range(2, 4), HEADS, keys, BATCH, CPU)
        (b, h, _, k), (_, whole_h, _, positions) = grid(keys, range(2, 4))
        row = torch.arange(-1, 6).view(-1, 1)
        assert torch.equal(local.bias(b, h, row, k), whole_mask.bias(b, whole_h, row, positions))


@pytest.mark.parametrize("shard", ["blocks of 8", "stretch"])
def test_causal_tiles_of_whole_blocks_are_never_partial_in_vain(shard: str) -> None:
    local = local_mask(masks.CausalMask(), range(1), 1, SHARDS[shard], BATCH, CPU)
    (b, h, q, k), _ = grid(SHARDS[shard], range(1))
    visible = local.visible(b, h, q, k)[:, 0, :128].unflatten(2, (5, 8)).unflatten(1, (8, 16))
    some, every = visible.any(-1).any(-2), visible.all(-1).all(-2)
    classes = local.tile_class(b[:, 0], 0, q[:128:16], q[15:128:16], k[::8], k[7::8])
    assert torch.equal(classes == TILE_HIDDEN, ~some) and torch.equal(classes == TILE_VISIBLE, every)


def test_all_ranks_have_one_program_and_what_needs_no_change_keeps_its_own() -> None:
    def program(mask: Mask, keys: KeyShard | None, heads: range = range(2)) -> Any:
        return local_mask(mask, heads, 4, keys, BATCH, CPU).program

    user = MASKS["heads"](BATCH, 4)
    for mask in (masks.CausalMask(), user):
        first, second = (program(mask, InterleavedKeys(8, r, 2), range(2 * r, 2 * r + 2)) for r in (0, 1))
        assert first == second and first != mask.program
    assert program(masks.NullMask(), InterleavedKeys(8, 1, 2)) == masks.NullMask().program
    assert program(masks.CausalMask(), None) == masks.CausalMask().program


def test_refusals() -> None:
    a, b, c, d = (torch.arange(BATCH, dtype=torch.int32) + i for i in range(4))
    full = Mask.from_function(lambda s, h, q, k: (k < a[s]) | (k < b[s]) | (k < c[s]) | (k < d[s]))
    with pytest.raises(ArgumentError, match="captures 4 tensors"):
        local_mask(full, range(2), 4, InterleavedKeys(8, 0, 2), BATCH, CPU)
    window = torch.arange(3, dtype=torch.int32)
    with pytest.raises(ShapeError, match="has 3 heads; the heads of all ranks together are 4"):
        local_mask(Mask.from_function(lambda b, h, q, k: q - k < window[h]), range(2), 4, None, BATCH, CPU)
