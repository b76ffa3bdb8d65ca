"""Which tile `prefill` should take first, by measurement: what ``mla bench --tune`` asks.

The table of `configs` stays a table: a call never measures. What is decided here is its next version.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from mla.backends.triton import configs
from mla.backends.triton.configs import Tile
from mla.problem import Problem

#: What a tile has to win, as a share of the time, to take the first place: less is the noise of a run.
MARGIN = 0.02
#: 32-bit registers of a thread that scores and output may take: with more, every tile spills.
_REGISTERS = 192


def candidates(arch: str, problem: Problem, limit: int) -> tuple[Tile, ...]:
    """Return the tiles worth measuring for a problem where a block may have `limit` bytes of shared memory."""
    lanes = 64 if arch.startswith("gfx9") else 32
    sizes = itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 5))
    tiles = (Tile(*size) for size in sizes if size[0] * (size[1] + problem.v_head_dim) <= _REGISTERS * size[2] * lanes)
    fitting = (tile for tile in tiles if configs.tile_bytes(tile, arch, problem) <= limit)
    return tuple(dict.fromkeys((*configs.tiles(arch, problem)[:1], *fitting)))


def fastest(times: Mapping[Tile, Sequence[float]], current: Tile | None) -> Tile:
    """Return the tile of the least geometric mean; the `current` one where none is `MARGIN` below it.

    Parameters
    ----------
    times : mapping
        Milliseconds of each tile on the same shapes, in the same order.
    """
    means = {tile: math.fsum(map(math.log, measured)) / len(measured) for tile, measured in times.items()}
    best = min(means, key=means.__getitem__)
    if current in means and means[best] > means[current] + math.log1p(-MARGIN):
        return current
    return best


def new_row(arch: str, problem: Problem, best: Tile) -> tuple[Tile, ...]:
    """Return the row of the table with a tile in the first place; behind it what needs less shared memory."""
    need = configs.tile_bytes(best, arch, problem)
    smaller = (tile for tile in configs.tiles(arch, problem) if configs.tile_bytes(tile, arch, problem) < need)
    return (best, *smaller)
