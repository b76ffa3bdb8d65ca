"""Tile sizes by architecture, and what they need of shared memory.

A table, not an autotuner: a call never times anything, and a row's bits depend on nothing but its own sequence. The first
tile of an architecture's list that fits into the shared memory the device reports is taken, so a part with less than
its class usually has gets a smaller one.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

KIB = 1024


@dataclass(frozen=True)
class Tile:
    """How one program of `prefill` is cut: query rows, keys of a step, warps (waves), stages of loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


#: Shared memory (LDS) that one block may have, where no device is here to say so.
SHARED_BYTES = {
    "sm_80": 163 * KIB,
    "sm_87": 163 * KIB,
    "sm_8?": 99 * KIB,
    "sm_9*": 227 * KIB,
    "sm_10*": 227 * KIB,
    "sm_12*": 99 * KIB,
    "gfx950": 160 * KIB,
    "gfx*": 64 * KIB,
}

# 16-bit inputs, by (architecture, q_depth): the most wanted tile first. Registers decide as much as shared memory does: the
# query tile lies in registers on sm_8x and AMD, in shared memory from sm_90 on; every entry for sm_80, sm_90, gfx90a,
# gfx942 and gfx950 compiles without spills (asserted by tests/kernels/test_triton_compile.py).
_SMALL = {192: (Tile(64, 32, 8, 2), Tile(64, 16, 8, 1)), 256: (Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(64, 16, 8, 1))}
_TILES: dict[str, dict[int, tuple[Tile, ...]]] = {
    "sm_8*": {192: (Tile(128, 64, 8, 2), *_SMALL[192]), 256: _SMALL[256]},
    "sm_9*": {192: (Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), *_SMALL[192]), 256: (Tile(128, 64, 8, 2), *_SMALL[256])},
    "sm_10*": {192: (Tile(128, 64, 8, 2), *_SMALL[192]), 256: (Tile(128, 64, 8, 2), *_SMALL[256])},
    "sm_12*": {192: (Tile(128, 64, 8, 2), *_SMALL[192]), 256: _SMALL[256]},
    "gfx950": {192: (Tile(128, 64, 4, 2),), 256: (Tile(64, 32, 4, 2),)},
    "gfx9*": {192: (Tile(128, 64, 4, 1),), 256: (Tile(64, 32, 4, 2),)},
    "gfx*": {192: (Tile(64, 32, 8, 1),), 256: (Tile(64, 32, 8, 1),)},
}
# float32 runs on the plain arithmetic units (TF32 is never used).
_FLOAT32 = (Tile(32, 32, 4, 1), Tile(32, 16, 4, 1))
#: Bytes of keys and values that one group of heads may keep in the L2 cache; H200: 60 MB in two halves.
L2_BYTES = 16 << 20


def shared_bytes(arch: str) -> int:
    """Return the usual shared memory of a block on an architecture (``sm_90a``, ``gfx942``)."""
    return next((size for pattern, size in SHARED_BYTES.items() if fnmatchcase(arch.rstrip("af"), pattern)), 48 * KIB)


def tiles(arch: str, q_depth: int, dtypes: str) -> tuple[Tile, ...]:
    """Return the tiles of an architecture for inputs of one dtype, the most wanted first."""
    if dtypes == "fp32":
        return _FLOAT32
    return next((table[q_depth] for pattern, table in _TILES.items() if fnmatchcase(arch.rstrip("af"), pattern)), ())


def tile_bytes(tile: Tile, arch: str, dims: tuple[int, int], itemsize: int) -> int:
    """Return a bound of the shared memory that `prefill` takes with a tile.

    Keys, rope and values of every stage; from sm_90 on the query tile too, elsewhere room for changes of layout.
    """
    q_depth, v_head_dim = dims
    stages = tile.num_stages * tile.block_n * (q_depth + v_head_dim) * itemsize
    if arch.startswith(("sm_9", "sm_10")):
        return tile.block_m * q_depth * itemsize + stages + 2 * KIB
    return stages + 16 * KIB


def choose(arch: str, dims: tuple[int, int], dtypes: str, limit: int) -> Tile | None:
    """Return the most wanted tile that fits into `limit` bytes of shared memory."""
    itemsize = 4 if dtypes == "fp32" else 2
    fitting = (tile for tile in tiles(arch, dims[0], dtypes) if tile_bytes(tile, arch, dims, itemsize) <= limit)
    return next(fitting, None)
