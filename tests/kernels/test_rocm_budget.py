"""Static budget of the prefill loop: which unit bounds it, and how far, by the counts of what the compiled code runs.

An estimate from published rates, not a measurement; docs/rocm.md says what it leaves out.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mla import dispatch
from mla.problem import QK_ROPE_HEAD_DIM
from tests.support import problems
from tests.support.amdgcn.budget import cycles
from tests.support.hip import needs_clang
from tests.support.problems import Case, build
from tests.support.rocm import executed, through_public_functions

#: (arch, dtypes, dims) -> VALU and LDS cycles for each MFMA cycle, at most; docs/rocm.md has the figures.
LIMITS = {
    ("gfx90a", "bf16", (192, 128)): (0.32, 0.35),
    ("gfx942", "bf16", (192, 128)): (0.60, 0.60),
    ("gfx950", "bf16", (192, 128)): (0.92, 0.65),
    ("gfx942", "bf16", (256, 256)): (0.48, 0.65),
    ("gfx950", "bf16", (256, 256)): (0.80, 0.78),
    ("gfx942", "bf16+fp8_rope", (192, 128)): (0.75, 0.60),
    ("gfx942", "fp8", (192, 128)): (1.40, 0.60),
    ("gfx950", "fp8", (192, 128)): (2.45, 0.65),
    ("gfx942", "fp8+bf16_rope", (192, 128)): (1.00, 0.60),
}


def loop_mix(arch: str, dtypes: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What 128 more keys cost: instructions of the loop alone, for a full workgroup and whole, unmasked tiles."""
    mixes = []
    executor = executed(monkeypatch, arch)
    through_public_functions(monkeypatch, executor)
    if arch == "gfx942":
        monkeypatch.setattr(problems, "fp8_dtype", lambda device: torch.float8_e4m3fnuz)
    for cached in (0, 128):
        case = Case(
            lengths=((cached, 256),), heads=1, dtypes=dtypes, dims=dims, mask="none", spare_rows=(0, 0), strided=False
        )
        dispatch.forget()
        build(case, torch.device("cpu"), 1).run("rocm")
        mixes.append(executor.stats[-1].mix())
    return Counter({name: mixes[1][name] - mixes[0][name] for name in mixes[1]})


@needs_clang
@pytest.mark.parametrize(("arch", "dtypes", "dims"), LIMITS, ids=str)
def test_prefill_loop(arch: str, dtypes: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    mix = loop_mix(arch, dtypes, dims, monkeypatch)
    budget = cycles(mix, arch)
    narrow = {"fp8": sum(dims), "fp8+bf16_rope": sum(dims) - QK_ROPE_HEAD_DIM}.get(dtypes, 0)  # twice as fast
    expected = 256 * 128 * (sum(dims) - narrow / 2) / {"gfx90a": 128, "gfx942": 256, "gfx950": 512}[arch] / 4
    assert budget.mfma == expected, "MFMA does more, or less, than the products"
    valu, lds = LIMITS[arch, dtypes, dims]
    assert budget.bound == ("mfma" if valu <= 1 else "valu")
    assert budget.valu <= valu * budget.mfma
    assert budget.lds <= lds * budget.mfma
    share = sum(count for name, count in mix.items() if name.startswith("v_mfma")) / sum(mix.values())
    print(f"{arch} {dtypes} {dims}: {budget}, MFMA {share:.1%} of the instructions")
