"""Host side of the ROCm prefill: tiles, refusals that data cannot state, factors of the scores."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla import registry
from mla.backends.rocm import prefill
from mla.errors import ArgumentError
from mla.problem import Problem

#: Keys of a tile, and bytes of a key and its value in LDS.
TILES = {
    ("gfx942", "bf16", (192, 128)): (32, 640),
    ("gfx942", "bf16", (256, 256)): (32, 1024),
    ("gfx90a", "bf16+fp8_rope", (256, 256)): (32, 1024),
    ("gfx942", "fp8", (192, 128)): (64, 320),
    ("gfx950", "fp8", (256, 256)): (64, 512),
    ("gfx942", "fp8+bf16_rope", (192, 128)): (64, 384),
    ("gfx942", "fp8+bf16_rope", (256, 256)): (32, 576),
    ("gfx950", "fp8+bf16_rope", (256, 256)): (64, 576),
}


@pytest.mark.parametrize(("arch", "dtypes", "dims"), TILES, ids=str)
def test_tiles_fit(arch: str, dtypes: str, dims: tuple[int, int]) -> None:
    problem = Problem("prefill", dtypes, "bf16", dims)
    assert prefill.Prefill.check(problem, arch) is None
    tile, (keys, row) = prefill.tile_of(problem, arch), TILES[arch, dtypes, dims]
    assert tile.lds_bytes == 2 * keys * row <= prefill.LDS_BYTES[arch]


@pytest.mark.parametrize("dtypes", ["fp8", "fp8+bf16_rope"])
def test_fp8_without_its_matrix_unit_is_refused(dtypes: str) -> None:
    refusal = prefill.Prefill.check(Problem("prefill", dtypes, "bf16"), "gfx90a")
    assert refusal == "gfx90a multiplies no fp8 matrices; gfx942 and gfx950 do"


def test_pages_of_too_many_tokens_are_refused() -> None:
    problem = Problem("prefill", "bf16", "bf16", page_size=1 << 24)
    assert prefill.Prefill.check(problem, "gfx942") == "pages have 16777216 tokens, less than 16777216 are taken"


def test_too_little_lds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prefill.LDS_BYTES, "gfx942", 32 << 10)
    problem = Problem("prefill", "bf16", "bf16", (192, 128))
    assert prefill.Prefill.check(problem, "gfx942") == "needs 40960 bytes of LDS, gfx942 has 32768"


@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_factors_of_the_scores(softcap: float) -> None:
    factors, raw = prefill.score_scale(0.25, softcap), 7.5
    if softcap:
        logit = factors.softcap_logit * (1 - 2 / (1 + 2 ** (raw * factors.softcap_scale)))
        wanted = softcap * math.tanh(0.25 * raw / softcap)
    else:
        logit, wanted = raw * factors.logit, 0.25 * raw
    assert logit * math.log(2) == pytest.approx(wanted, rel=1e-6)


def arguments(**changed: Any) -> Any:
    """Prefill arguments as far as the refusals read them."""
    rows = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    given = {"k": rows, "v": rows, "rope": rows[:, 0], "cache": None, "rope_kind": "ragged", "rope_scales": None}
    return SimpleNamespace(**{**given, "rope_scale_base": 0, "k_scales": None, "v_scale": None, **changed})


def far_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("name", ["k", "v", "rope", "k_scales", "v_scale"])
def test_rows_far_apart_are_refused(name: str) -> None:
    far = far_apart((2, 1, 64), (1 << 23, 64, 1)) if name in "kv" else far_apart((2, 64), (1 << 23, 1))
    prefill._check_strides(arguments(), False)
    prefill._check_strides(arguments(**{name: far[:1]}), False)
    with pytest.raises(ArgumentError, match=r"rows lie 16777216 bytes apart; .* less than 16777216"):
        prefill._check_strides(arguments(**{name: far}), False)


def test_columns_and_pages_far_apart_are_refused() -> None:
    transposed = arguments(v=far_apart((2, 1, 64), (1, 64, 1 << 23)))
    prefill._check_strides(transposed, False)
    with pytest.raises(ArgumentError, match="v: columns lie 16777216 bytes apart"):
        prefill._check_strides(transposed, True)
    cache = SimpleNamespace(rope=far_apart((2, 16, 64), (1 << 31, 64, 1)), scales=None)
    with pytest.raises(ArgumentError, match=r"k_rope: pages lie 4294967296 bytes apart; .* less than 4294967296"):
        prefill._check_strides(arguments(cache=cache), False)


def test_scale_of_the_ropes_block() -> None:
    scales = torch.ones(2, 9)
    _, rows, _ = prefill._rope_rows(arguments(rope_scales=scales, rope_scale_base=512), 64)
    assert rows.data == scales.data_ptr() + 8 * 4


def test_a_rope_in_two_blocks_is_refused() -> None:
    (entry,) = (one for one in registry.default() if (one.backend, one.op) == ("rocm", "prefill"))
    problem = Problem("prefill", "bf16+fp8_rope", "bf16", granularity=64, features=frozenset({"split_rope_scales"}))
    assert entry.requires.compare(problem, "gfx942")[1] == ["does not do split_rope_scales"]
