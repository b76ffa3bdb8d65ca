"""Static budget of the prefill loop: MFMA is the unit that bounds it, by the counts of what the compiled code executes.

An estimate from published rates, not a measurement; docs/rocm.md says what it leaves out.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mla import dispatch
from tests.support.amdgcn.budget import cycles
from tests.support.hip import needs_clang
from tests.support.problems import Case, build
from tests.support.rocm import executed, through_public_functions

#: (arch, dims) -> VALU and LDS cycles for each MFMA cycle, at most; docs/rocm.md has the figures.
LIMITS = {
    ("gfx90a", (192, 128)): (0.35, 0.35),
    ("gfx942", (192, 128)): (0.65, 0.60),
    ("gfx950", (192, 128)): (0.95, 0.65),
    ("gfx942", (256, 256)): (0.50, 0.65),
    ("gfx950", (256, 256)): (0.82, 0.78),
}


def loop_mix(arch: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What 128 more keys cost: instructions of the loop alone, for a full workgroup and whole, unmasked tiles."""
    mixes = []
    executor = executed(monkeypatch, arch)
    through_public_functions(monkeypatch, executor)
    for cached in (0, 128):
        case = Case(lengths=((cached, 256),), heads=1, dims=dims, mask="none", spare_rows=(0, 0), strided=False)
        dispatch.forget()
        build(case, torch.device("cpu"), 1).run("rocm")
        mixes.append(executor.stats[-1].mix())
    return Counter({name: mixes[1][name] - mixes[0][name] for name in mixes[1]})


@needs_clang
@pytest.mark.parametrize(("arch", "dims"), LIMITS, ids=str)
def test_prefill_loop(arch: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    mix = loop_mix(arch, dims, monkeypatch)
    budget = cycles(mix, arch)
    expected = 256 * 128 * sum(dims) / {"gfx90a": 128, "gfx942": 256, "gfx950": 512}[arch] / 4
    assert budget.mfma == expected, "MFMA does more, or less, than the products"
    valu, lds = LIMITS[arch, dims]
    assert budget.bound == "mfma"
    assert budget.valu <= valu * budget.mfma
    assert budget.lds <= lds * budget.mfma
    share = sum(count for name, count in mix.items() if name.startswith("v_mfma")) / sum(mix.values())
    print(f"{arch} {dims}: {budget}, MFMA {share:.1%} of the instructions")
