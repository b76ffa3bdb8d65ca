"""The cases of the cross-backend matrix: a short list that changes one thing at a time, and their product."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from tests.support.paged import LAYOUTS
from tests.support.problems import MASKS, Case

EDGES = ((0, 0), (0, 1), (63, 1), (0, 64), (64, 1), (0, 0), (127, 129), (500, 3))

#: Prefill, one thing changed at a time.
PREFILLS: list[Case] = [
    Case(),
    Case(dtypes="fp16"),
    Case(dtypes="fp32"),
    Case(out_dtype="fp32"),
    Case(dims=(256, 256)),
    Case(lengths=EDGES),
    Case(lengths=((700, 600),), heads=2),
    Case(lengths=((5, 300), (0, 1), (260, 2)), heads=1, mask="none"),
    Case(heads=20),
    *(Case(mask=mask) for mask in MASKS if mask != "causal"),
    Case(sinks=True, lengths=EDGES),
    Case(softcap=15.0),
    Case(softcap=5.0, sinks=True, mask="causal_bias", dtypes="fp16"),
    Case(lse_layout="HT"),
    Case(strided=False, spare_rows=(0, 0)),
    Case(chunk=(64, 64)),
    Case(chunk=(128, 256), mask="sliding"),
    Case(chunk=(100, 40), page_size=16),
    *(Case(page_size=page_size) for page_size in (1, 16, 32, 128, 256)),
    Case(csr=True),
    Case(csr=True, page_size=1),
    *(Case(layout=layout) for layout in LAYOUTS if layout != "pages"),
    Case(rope="batched"),
    Case(rope="batched", overrides=False, lengths=((37, 70), (100, 7)), rope_width=576),
    Case(rope="batched", chunk=(64, 64)),
    Case(rope="ragged"),
    Case(rope="ragged", overrides=False),
    Case(rope="ragged", chunk=(64, 64)),
    *(Case(dtypes=f"{dtype}+fp8_rope") for dtype in ("bf16", "fp16", "fp32")),
    Case(dtypes="bf16+fp8_rope", granularity=576, page_size=16),
    Case(dtypes="fp16+fp8_rope", rope="batched", rope_width=576, granularity=64),
    Case(dtypes="fp16+fp8_rope", rope="batched", rope_width=100, granularity=64),
    Case(dtypes="bf16+fp8_rope", rope="ragged"),
    Case(dtypes="bf16+fp8_rope", dims=(256, 256), lengths=EDGES, page_size=1),
    Case(dtypes="fp8"),
    Case(dtypes="fp8", v_transposed=True, v_scale="number"),
    Case(dtypes="fp8", v_transposed=True, v_scale="row", page_size=1, heads=3),
    Case(dtypes="fp8", v_transposed=True, rope="ragged", overrides=False, lengths=((37, 70), (100, 1), (0, 48))),
    Case(dtypes="fp8", scale=-0.05),
    Case(dtypes="fp8", rope="batched", rope_width=576, v_scale="row"),
    Case(dtypes="fp8", rope="ragged", granularity=64, lengths=EDGES),
    Case(dtypes="fp8", dims=(256, 256), granularity=576),
    Case(dtypes="fp8", softcap=5.0, sinks=True, mask="causal_bias", out_dtype="fp32"),
    Case(dtypes="fp8", lengths=((5, 300), (700, 600)), heads=2, mask="sink_window", page_size=1, v_scale="row"),
    Case(dtypes="fp8+bf16_rope"),
    Case(dtypes="fp8+bf16_rope", prescaled=False, v_scale=""),
    Case(dtypes="fp8+bf16_rope", layout="fused", heads=2),
    Case(dtypes="fp8+bf16_rope", rope="ragged", v_transposed=True, v_scale=""),
    Case(dtypes="fp8+bf16_rope", rope="batched", prescaled=False, v_scale="row"),
    Case(dtypes="fp8+bf16_rope", dims=(256, 256), mask="none", v_transposed=True, lengths=EDGES),
]

#: Values with a mean: what accumulators of few bits lose on long rows shows here, and not on values around zero.
LONG_ROWS: list[Case] = [
    Case(dtypes=dtypes, lengths=((32_768 - 16, 16),), heads=1, v_mean=1.0, v_scale=v_scale)
    for dtypes, v_scale in (("bf16", ""), ("bf16+fp8_rope", ""), ("fp8", "row"), ("fp8", "head"), ("fp8+bf16_rope", ""))
]

#: Their product, as far as the axes are independent. What is not compiled in comes first, so that neighbours, which run
#: side by side, are of different kernels and none is compiled for twice.
PREFILLS_FULL: list[Case] = [
    Case(dtypes=dtypes, dims=dims, rope=rope, page_size=page_size, mask=mask, heads=heads, lengths=lengths, chunk=chunk)
    for lengths, heads, chunk, dtypes, dims, rope, page_size, mask in itertools.product(
        (EDGES, ((0, 700), (1500, 130))),
        (1, 12, 16),
        (None, (64, 300)),
        ("bf16", "fp16", "fp32", "bf16+fp8_rope", "fp8", "fp8+bf16_rope"),
        ((192, 128), (256, 256)),
        ("paged", "batched", "ragged"),
        (1, 16, 64, 256),
        ("none", "causal", "sliding", "checkered", "causal_bias"),
    )
    if rope == "paged" or page_size == 64
]


@dataclass(frozen=True)
class PlanCase:
    """A plan's inputs: page size P, buffer rows N and table rows C."""

    name: str
    cached: tuple[int, ...]
    new: tuple[int, ...]
    P: int
    N: int
    C: int

    def __str__(self) -> str:
        return self.name


PLANS: list[PlanCase] = [
    PlanCase("two", (0, 0), (160, 200), 128, 256, 16),
    PlanCase("one_chunk", (500,), (9,), 128, 512, 1),
    PlanCase("ragged", (0, 130, 0, 640), (5, 7, 128, 1), 128, 512, 4),
    PlanCase("all_empty", (0, 0, 0), (0, 0, 0), 64, 64, 3),
    PlanCase("unaligned_buffer", (0,), (160,), 128, 200, 3),
    PlanCase("token_pages", (0, 0), (10, 30), 1, 32, 3),
    PlanCase("overflow", (500, 500), (9, 9), 128, 128, 1),
    PlanCase("many", tuple(range(300)), tuple(i * 7 % 5 for i in range(300)), 16, 999, 60),
]

#: Options of the paged cache; `out` is the buffer's dtype, `size` its rows.
GATHERS: list[Any] = [
    {},
    {"size": 100},
    *({"page_size": page_size} for page_size in (1, 16, 128, 256)),
    *({"layout": layout} for layout in LAYOUTS if layout != "pages"),
    {"csr": True},
    {"seq_lens": True},
    *({"fp8": True, "granularity": granularity} for granularity in (64, 128, 576)),
    {"fp8": True, "out": "fp16"},
]
GATHERS = [tuple({"page_size": 64, **options}.items()) for options in GATHERS]

STORES: list[Any] = [
    tuple({"page_size": 64, **options}.items())
    for options in (
        {},
        {"page_size": 1},
        {"page_size": 16, "csr": True},
        {"seq_lens": True},
        *({"layout": layout} for layout in LAYOUTS if layout != "pages"),
        *({"fp8": True, "granularity": granularity} for granularity in (64, 128, 576)),
        {"fp8": True, "rows": "fp16"},
    )
]

#: rows, columns, elements between rows, scales
PROJECTIONS: list[Any] = [(1, 448, 0, 1), (700, 4096, 0, 1), (200, 24, 64, 1), (384, 272, 0, 3)]

#: dtype, output dtype, dv, LSE layout, which input the output is (-1: neither)
MERGES: list[Any] = [
    ("bf16", "bf16", 128, "TH", -1),
    ("fp16", "fp16", 128, "HT", -1),
    ("fp32", "fp32", 128, "TH", -1),
    ("fp32", "bf16", 128, "HT", -1),
    ("fp32", "fp16", 256, "TH", -1),
    ("bf16", "bf16", 128, "TH", 0),
    ("bf16", "bf16", 256, "HT", 1),
    ("fp32", "fp32", 128, "TH", 0),
]

#: Input dtype, what shares a scale (a granularity, or a name), [T, H, D], elements by which the input is misaligned.
QUANTIZATIONS: list[Any] = [
    ("bf16", "token", (37, 3, 192), 0),
    ("fp16", "token", (3, 70, 192), 0),
    ("fp32", "token", (9, 1, 2048), 0),
    ("bf16", "token", (5, 1, 512), 0),
    ("bf16", "token", (4, 5, 136), 1),
    ("bf16", 64, (37, 3, 576), 0),
    ("bf16", 128, (37, 1, 576), 0),
    ("fp16", 128, (11, 3, 256), 3),
    ("fp32", 576, (33, 1, 576), 0),
    ("bf16", 576, (7, 2, 648), 0),
    ("bf16", "head", (19, 5, 128), 0),
    ("fp16", "tensor", (19, 5, 128), 4),
    ("fp32", "given", (19, 5, 128), 0),
]
