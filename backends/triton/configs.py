"""Tile sizes by architecture, and what they need of shared memory.

A table, not an autotuner: a call never times anything, and a row's bits depend on nothing but its own sequence. The
first tile of an architecture's list that fits into the shared memory the device reports is taken, so a part with less
than its class usually has gets a smaller one.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mla.problem import QK_ROPE_HEAD_DIM

if TYPE_CHECKING:
    from mla.problem import Problem

KIB = 1024
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
#: Triton's names of the 8-bit formats that an architecture's matrix units multiply; elsewhere kernels decode bytes.
FP8_TYPES = {"sm_89": "fp8e4nv", "sm_9*": "fp8e4nv", "sm_1*": "fp8e4nv", "gfx942": "fp8e4b8", "gfx950": "fp8e4nv"}


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

# 16-bit inputs, by (architecture, q_depth): the most wanted tile first. Registers decide as much as shared memory
# does: the query tile lies in registers on sm_8x and AMD, in shared memory from sm_90 on. What may spill is asserted by
# tests/kernels/test_triton_compile.py. gfx90a and gfx942 would hold 128 x 64 too, but that close to the last register
# LLVM copies one before a block restores its exec mask, and lanes that come back miss it.
_SMALL = {
    192: (Tile(64, 32, 8, 2), Tile(64, 16, 8, 1)),
    256: (Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(64, 16, 8, 1)),
}
_SMALL_AMD = (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1))
_TILES: dict[str, dict[int, tuple[Tile, ...]]] = {
    "sm_8*": {192: (Tile(128, 64, 8, 2), *_SMALL[192]), 256: _SMALL[256]},
    "sm_9*": {
        192: (Tile(128, 64, 8, 5), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), *_SMALL[192]),
        256: (Tile(128, 32, 8, 5), Tile(128, 32, 8, 3), *_SMALL[256]),
    },
    "sm_10*": {192: (Tile(128, 64, 8, 2), *_SMALL[192]), 256: (Tile(128, 64, 8, 2), *_SMALL[256])},
    "sm_12*": {192: (Tile(128, 64, 8, 2), *_SMALL[192]), 256: _SMALL[256]},
    "gfx950": {192: (Tile(128, 64, 4, 2), *_SMALL_AMD), 256: (Tile(64, 32, 4, 2), *_SMALL_AMD)},
    "gfx9*": {192: (Tile(128, 32, 4, 1), *_SMALL_AMD), 256: _SMALL_AMD},
    "gfx*": {192: (Tile(64, 32, 8, 1),), 256: (Tile(64, 32, 8, 1),)},
}
# 8-bit inputs: two products stand in registers until their scales have met, and where bytes are decoded every thread
# decodes what it multiplies. A product of fp8 has at least 32 terms, so no tile has fewer keys.
_FP8_TILES: dict[str, dict[int, tuple[Tile, ...]]] = {
    "sm_8*": {192: (Tile(64, 32, 8, 2),), 256: (Tile(32, 32, 8, 1),)},
    "sm_12*": {192: (Tile(64, 32, 8, 2),), 256: (Tile(32, 32, 8, 1),)},
    "sm_9*": {192: (Tile(128, 64, 8, 5), Tile(64, 32, 8, 2)), 256: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1))},
    "sm_10*": {192: (Tile(128, 64, 8, 1), Tile(64, 32, 8, 2)), 256: (Tile(64, 32, 8, 1), Tile(32, 32, 8, 1))},
    "gfx950": {192: (Tile(128, 64, 4, 1), *_SMALL_AMD), 256: (Tile(64, 32, 4, 1),)},
    "gfx90a": {192: (Tile(128, 32, 4, 1), *_SMALL_AMD), 256: (Tile(32, 32, 4, 1),)},
    "gfx9*": {192: (Tile(128, 32, 4, 1), *_SMALL_AMD), 256: _SMALL_AMD},
    "gfx*": {192: (Tile(64, 32, 8, 1),), 256: (Tile(64, 32, 8, 1),)},
}
#: The lowest query tile of all tables: what a workspace is sized for.
LEAST_BLOCK_M = 16
# float32 runs on the plain arithmetic units (TF32 is never used).
_FLOAT32 = (Tile(32, 16, 4, 1), Tile(16, 16, 4, 1))


@dataclass(frozen=True)
class HopperConfig:
    """How the warp-specialised kernel of sm_90 is cut: rows and keys, stages, registers of each role's threads.

    In fp8 keys and values share a ring: as many stages of one as of the other.
    """

    block_m: int
    block_n: int
    stages_k: int
    stages_v: int
    consumer_registers: int
    other_registers: int


#: Query rows of one of its consumers.
HOPPER_ROWS = 64
#: New tokens of a sequence, on the mean of a batch, from which its tall tiles pay.
HOPPER_TALL_TOKENS = 2048
#: For 16-bit inputs and for fp8 a low tile and a tall one.
_HOPPER = (HopperConfig(128, 128, 2, 2, 216, 72), HopperConfig(192, 128, 2, 1, 160, 32))
_HOPPER_FP8 = (HopperConfig(128, 128, 3, 3, 224, 56), HopperConfig(192, 128, 3, 3, 160, 32))
#: Bytes of keys and values that one group of heads may keep in the L2 cache; H200: 60 MB in two halves.
L2_BYTES = 16 << 20


def shared_bytes(arch: str) -> int:
    """Return the usual shared memory of a block on an architecture (``sm_90a``, ``gfx942``)."""
    arch = "sm_80" if arch == "cpu" else arch
    return next((size for pattern, size in SHARED_BYTES.items() if fnmatchcase(arch.rstrip("af"), pattern)), 48 * KIB)


def fp8_type(arch: str) -> str:
    """Return the element type that fp8 has in the prefill kernel of an architecture."""
    return next((kind for pattern, kind in FP8_TYPES.items() if fnmatchcase(arch, pattern)), "u8")


def fp8_element(arch: str, dtype: str) -> str:
    """Return Triton's type of fp8 data that is converted alone: what NVIDIA has an instruction for, else bytes."""
    return fp8_type(arch) if arch.startswith("sm_") and "fnuz" not in dtype else "u8"


def is_fnuz(arch: str) -> bool:
    """Tell whether fp8 data of an architecture is e4m3fnuz."""
    return arch.startswith("gfx94")


def tiles(arch: str, problem: Problem) -> tuple[Tile, ...]:
    """Return the tiles of an architecture for a problem, the most wanted first."""
    if problem.dtypes.startswith("fp32"):
        return _FLOAT32
    arch = "sm_80" if arch == "cpu" else arch.rstrip("af")
    tables = _FP8_TILES if "fp8" in problem.dtypes else _TILES
    return next((table[problem.dims[0]] for pattern, table in tables.items() if fnmatchcase(arch, pattern)), ())


def tile_bytes(tile: Tile, arch: str, problem: Problem) -> int:
    """Return a bound of the shared memory that `prefill` takes with a tile.

    Keys, rope, values and biases of every stage in flight; from sm_90 on, and in float32, the query tile too; elsewhere
    room for changes of layout. AMD keeps one stage of several in registers; behind page ids NVIDIA has half of three
    or more stages. What comes in fp8 and is multiplied in 16 bits lies there in both.
    """
    data, _, rope = problem.dtypes.partition("+")
    decoded = data == "fp8" and fp8_type(arch) == "u8"
    itemsize = 2 if decoded else ITEMSIZE[data]
    query_row = problem.qk_nope_head_dim * itemsize + QK_ROPE_HEAD_DIM * (2 if rope == "bf16_rope" else itemsize)
    biases = 0 if problem.mask is None else sum(ITEMSIZE[bias] for bias in problem.mask.biases)
    stage = tile.block_n * (query_row + problem.v_head_dim * itemsize + tile.block_m * biases)
    widened = tile.block_n * (problem.v_head_dim + QK_ROPE_HEAD_DIM) * 2 if "fp8" in problem.dtypes else 0
    if arch.startswith("gfx"):
        return max(tile.num_stages - 1, 1) * stage + widened + 16 * KIB
    paged = problem.rope == "paged" and tile.num_stages > 2
    stages = (tile.num_stages + 1) // 2 if paged else tile.num_stages
    query = tile.block_m * query_row
    if arch.startswith(("sm_9", "sm_10")):
        return query + stages * stage + widened + 2 * KIB
    return (query if data == "fp32" else 0) + stages * stage + widened + 16 * KIB


def choose(arch: str, problem: Problem, limit: int) -> Tile | None:
    """Return the most wanted tile that fits into `limit` bytes of shared memory."""
    fitting = (tile for tile in tiles(arch, problem) if tile_bytes(tile, arch, problem) <= limit)
    return next(fitting, None)


def hopper(problem: Problem) -> tuple[HopperConfig, ...]:
    """Return the configurations of the warp-specialised kernel for a problem, the lowest query tile first."""
    return _HOPPER_FP8 if problem.dtypes.startswith("fp8") else _HOPPER
