"""Cycles that executed instructions take on each unit of a compute unit, by the vendor's published rates.

A static estimate, no measurement: every unit is taken as always fed. Sources: the CDNA2, CDNA3 and CDNA4 instruction
set manuals (passes of MFMA) and white papers (LDS: 128 bytes a cycle, CDNA4 reads 256; a wave instruction on 16 lanes a
SIMD, 4 cycles; transcendentals and 32-bit integer multiplication a quarter of that rate, transcendentals of CDNA4 a
half).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_MFMA = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_?(\w+)")
#: Multiply-adds of 16-bit elements a SIMD does in a cycle; of 8-bit ones it does twice as many.
_MATRIX_RATE = {"gfx90a": 128, "gfx942": 256, "gfx950": 512}
_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
_QUARTER = re.compile(r"v_(mul_lo_u32|mul_hi_|mad_[ui]64)")
_LDS_BYTES = re.compile(r"ds_(?:read|write)(2?)(?:st64)?_b(\d+)")
_LANES = 64


@dataclass(frozen=True, slots=True)
class Budget:
    """Cycles of each unit: of one SIMD (mfma, valu) and of the compute unit (lds), and the units' share of MFMA."""

    mfma: float
    valu: float
    lds: float

    @property
    def bound(self) -> str:
        """The unit that is busy longest."""
        return max(("mfma", "valu", "lds"), key=lambda unit: getattr(self, unit))

    @property
    def mfma_share(self) -> float:
        """Share of the MFMA peak when the busiest unit never waits."""
        return self.mfma / max(self.mfma, self.valu, self.lds)


def cycles(mix: Counter[str], arch: str, simds: int = 4) -> Budget:
    """Cycles of the counted wave-instructions, spread evenly over the SIMDs of one compute unit."""
    mfma = valu = lds = 0.0
    for name, count in mix.items():
        if match := _MFMA.match(name):
            m, n, k = map(int, match.groups()[:3])
            mfma += count * m * n * k / _MATRIX_RATE[arch] / (2 if match[4] in ("fp8_fp8", "f8f6f4") else 1)
        elif name.startswith("v_"):
            if _TRANSCENDENTAL.match(name):
                valu += count * (8 if arch == "gfx950" else 16)
            else:
                valu += count * (16 if _QUARTER.match(name) else 4)
        elif match := _LDS_BYTES.match(name):
            size = (2 if match[1] else 1) * int(match[2]) // 8 * _LANES
            lds += count * size / (256 if arch == "gfx950" and "read" in name else 128)
        elif name.startswith("ds_"):
            lds += count * 4 * _LANES / 128
    return Budget(mfma / simds, valu / simds, lds)
