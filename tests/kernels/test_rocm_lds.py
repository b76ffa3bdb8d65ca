"""LDS of the prefill kernel: its reads meet no bank conflict, counted from the compiled code's addresses."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.support import problems
from tests.support.amdgcn.conflicts import extra_cycles
from tests.support.amdgcn.lds import Lds
from tests.support.hip import ARCHS, needs_clang
from tests.support.problems import Case, build
from tests.support.rocm import executed, through_public_functions


def test_count_of_conflicts() -> None:
    lane = np.arange(64)
    assert extra_cycles(lane * 16, 16) == extra_cycles(lane * 16, 16, interleaved=True) == 0
    assert extra_cycles(lane * 128, 16) == 8 * 7
    assert extra_cycles(lane * 4, 4) == 0
    assert extra_cycles(lane * 8, 4) == 2
    assert extra_cycles(lane * 0, 4) == 0
    assert extra_cycles(lane // 4 * 256 + lane % 4 * 16, 16, interleaved=True) == 8
    assert extra_cycles(lane % 32 // 16 * 256 + lane % 8 * 16, 16) == 0  # eight neighbours, eight chunks


DIMS = ((192, 128), (256, 256))
KERNELS = [
    *((arch, "bf16", dims) for arch in ARCHS for dims in DIMS),
    *(("gfx942", dtypes, dims) for dtypes in ("fp8", "fp8+bf16_rope") for dims in DIMS),
    ("gfx950", "fp8+bf16_rope", (256, 256)),
]


@needs_clang
@pytest.mark.parametrize(("arch", "dtypes", "dims"), KERNELS, ids=str)
def test_prefill(arch: str, dtypes: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    cycles: Counter[str] = Counter()
    plain = {name: getattr(Lds, name) for name in ("load", "store")}

    def load(self: Lds, offset: np.ndarray, size: int) -> np.ndarray:
        if size == 16:
            cycles["reads"] += 8
            cycles["read conflicts"] += extra_cycles(offset, size)
            cycles["read conflicts, interleaved"] += extra_cycles(offset, size, interleaved=True)
        return plain["load"](self, offset, size)

    def store(self: Lds, offset: np.ndarray, size: int, data: np.ndarray) -> None:
        kind = {16: "key writes", 8: "value writes"}[size]
        cycles[kind] += 64 * size // 128
        cycles[f"{kind}: conflicts"] += extra_cycles(offset, size)
        plain["store"](self, offset, size, data)

    monkeypatch.setattr(Lds, "load", load)
    monkeypatch.setattr(Lds, "store", store)
    through_public_functions(monkeypatch, executed(monkeypatch, arch, seed=seed))
    if arch == "gfx942":
        monkeypatch.setattr(problems, "fp8_dtype", lambda device: torch.float8_e4m3fnuz)
    case = Case(lengths=((96, 40),), heads=1, dims=dims, dtypes=dtypes, mask="none")
    build(case, torch.device("cpu"), seed).run("rocm")
    assert cycles["reads"] > 0 and cycles["key writes"] > 0 and cycles["value writes"] > 0
    assert cycles["read conflicts"] == cycles["read conflicts, interleaved"] == 0
    # Rows of 12 and 4 chunks (fp8, 256 columns): eight lanes write parts of two rows, which meet in half of the banks.
    shared = cycles["key writes"] if (dtypes, dims) == ("fp8", (256, 256)) else 0
    assert cycles["key writes: conflicts"] == shared / 2
    assert cycles["value writes: conflicts"] == cycles["value writes"]  # two lanes of 16 meet in a bank
