"""Host side of the ROCm prefill: tiles, refusals that data cannot state, factors of the scores."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla.backends.rocm import prefill
from mla.errors import ArgumentError
from mla.problem import SUPPORTED_DIMS, Problem


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("dims", SUPPORTED_DIMS)
def test_tiles_fit(arch: str, dims: tuple[int, int]) -> None:
    assert prefill.Prefill.check(Problem("prefill", "bf16", "bf16", dims), arch) is None
    assert prefill.tile_of(dims).lds_bytes(dims) == 2 * 32 * sum(dims) * 2 <= prefill.LDS_BYTES[arch]


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
    return SimpleNamespace(**{**given, "rope_scale_base": 0, **changed})


@pytest.mark.parametrize("name", ["k", "v", "rope"])
def test_rows_far_apart_are_refused(name: str) -> None:
    far = torch.empty(0, dtype=torch.bfloat16, device="meta").new_empty(2, 1 << 24)[:, None, :64]
    prefill._check_strides(arguments())
    with pytest.raises(ArgumentError, match=r"rows lie 33554432 bytes apart; .* less than 33554432"):
        prefill._check_strides(arguments(**{name: far if name != "rope" else far[:, 0]}))


def test_rope_in_two_blocks_is_refused() -> None:
    scales = torch.ones(2, 9)
    given = arguments(rope_scales=scales, rope_scale_base=512)
    _, rows, _ = prefill._rope_rows(given, 64)
    assert rows.data == scales.data_ptr() + 8 * 4
    with pytest.raises(ArgumentError, match="from 36 of the scaled row on, lie in two blocks of 64"):
        prefill._rope_rows(arguments(rope_scales=scales, rope_scale_base=36), 64)
