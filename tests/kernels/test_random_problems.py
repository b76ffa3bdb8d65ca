"""Random ragged paged problems against the oracle, and repetitions that must give the same bits.

``--problems N`` sets how many each GPU target gets, 200 when it is not given, and the CPU a tenth of them; a failure
names the problem and its seed. What is compiled in is varied by a list of kinds, so that few kernels are compiled; all
else is drawn: sequences, heads, chunks, rows that belong to nobody, scale, poison.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from mla.errors import UnsupportedError
from tests.support.problems import Case, build, fetch
from tests.support.tolerance import assert_lse, assert_output, precision_of

GPU_TARGETS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cuda", "triton")]
#: Of one test, so that all processes of a run of many problems have work until its end.
MOST_PROBLEMS = 84

#: What is compiled in. A chunk stands for one that is drawn: it begins on a page, or anywhere where pages are short.
KINDS = [
    Case(),
    Case(page_size=1),
    Case(page_size=16, chunk=(0, 0)),
    Case(page_size=32, mask="chunked_causal"),
    Case(page_size=64, chunk=(0, 0)),
    Case(page_size=128, dtypes="fp16"),
    Case(page_size=256, mask="none", out_dtype="fp32"),
    Case(dims=(256, 256)),
    Case(csr=True, mask="sliding"),
    Case(strided=False, mask="sliding_both"),
    Case(mask="sink_window", sinks=True),
    Case(mask="documents", chunk=(0, 0)),
    Case(mask="padding", lse_layout="HT"),
    Case(mask="windows_of_heads", page_size=16),
    Case(mask="checkered", index_dtype=torch.int64),
    Case(mask="either", layout="layers"),
    Case(mask="causal_bias"),
    Case(softcap=15.0, sinks=True, dtypes="fp16"),
    Case(rope="ragged", chunk=(0, 0)),
    Case(rope="batched", rope_width=576),
    Case(dtypes="bf16+fp8_rope", page_size=16),
    Case(dtypes="fp8", v_transposed=True),
    Case(dtypes="fp8", mask="sliding", chunk=(0, 0)),
    Case(dtypes="fp8+bf16_rope", prescaled=False),
    Case(dtypes="fp8+bf16_rope", k_scale="one", v_transposed=True, page_size=16),
    Case(dtypes="fp8+bf16_rope", k_scale="runs", v_scale="row"),
]


def draw(kind: Case, choose: random.Random) -> Case:
    """Return a problem of a kind. Lengths lie on the borders of pages and tiles more often than by chance."""
    longest = 250 if "bias" in kind.mask else 1500
    heads = choose.choice((1, 1, 2, 3, 4, 5, 8, 16))
    borders = (kind.page_size, 64, 128, 192)

    def length() -> int:
        how = choose.random()
        if how < 0.1:
            return choose.randrange(2)
        if how < 0.4:
            return min(longest, max(0, choose.choice(borders) * choose.randrange(1, 5) + choose.randrange(-1, 2)))
        return int(math.exp(choose.uniform(0.0, math.log(longest))))

    rows_left = choose.choice((2_000, 4_000, 8_000, 16_000)) // heads  # of keys: what the host fills with numbers
    scores_left = 250 * rows_left  # what the oracle takes its time for
    lengths = []
    for _ in range(choose.choice((1, 1, 2, 3, 5, 8, 40))):
        cached, new = choose.choice(((0, length()), (length(), length()), (length(), length() // 8)))
        if longest > 250 and choose.random() < 0.05:  # long enough for keys in several parts
            cached, new = choose.randrange(12_000), length() // 8
        rows = cached + new
        if rows <= rows_left and new * rows <= scores_left:
            lengths.append((cached, new))
            rows_left -= rows
            scores_left -= new * rows
    chunk = kind.chunk
    if chunk is not None:
        step = kind.page_size if kind.page_size > 16 else 1
        chunk = choose.randrange(8) * choose.choice((step, 128)), choose.choice((1, 60, 128, 300, 1000))
    return replace(
        kind, lengths=tuple(lengths or [(0, 1)]), heads=heads, chunk=chunk, poison=choose.choice((math.nan, math.inf)),
        spare_rows=(choose.randrange(3), choose.randrange(70)), scale=192**-0.5 * choose.uniform(0.2, 2.0),
        order=choose.choice(("scattered", "scattered", "identity", "reversed")),
    )  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cut the problems of each kind into tests; neighbours are of different kinds, so none is compiled for twice."""
    if metafunc.function is not test_problems:
        return
    wanted = metafunc.config.getoption("problems")
    params = []
    for target, total in (("cpu", wanted // 10), ("cuda", wanted), ("triton", wanted)):
        of_kind = -(-total // len(KINDS))
        parts = -(-of_kind // MOST_PROBLEMS)
        params += [
            pytest.param(
                target, kind, -(-of_kind // parts), id=f"{target}-{kind}" + f"-{part}" * (parts > 1),
                marks=[] if target == "cpu" else getattr(pytest.mark, target),
            )
            for part in range(parts)
            for kind in KINDS
        ]  # fmt: skip
    metafunc.parametrize(("target", "kind", "count"), params)


def test_problems(target: str, kind: Case, count: int, seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(count):
        case, own_seed = draw(kind, choose), choose.randrange(2**31)
        here = build(case, "cpu", own_seed)
        problem = here if target == "cpu" else here.to(torch.device("cuda"))
        try:
            results = *problem.run(target), *problem.run(target)
        except UnsupportedError as refusal:
            pytest.skip(f"refused: {refusal}")
        try:
            # On the CPU, while the GPU, for which many processes wait, comes to this one.
            expected, expected_lse = here.expect()
            output, lse, again, again_lse = fetch(*results)
            assert_output(output, expected, precision_of(case.dtypes))
            assert_lse(lse, expected_lse, precision_of(case.dtypes))
            assert same_bits(output, again) and same_bits(lse, again_lse), "a repetition gave other bits"
        except AssertionError as error:
            raise AssertionError(f"build(Case({case}), seed={own_seed}): {error}") from error


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=((0, 4096), (700, 129), (0, 2048), (3000, 1), (0, 64), (0, 0), (63, 777), (0, 1)), heads=16),
        Case(lengths=((6000, 40),), heads=2, mask="none"),
        Case(lengths=((3000, 2048), (500, 100)), heads=16),
        Case(lengths=((100, 700), (0, 1500)), heads=4, page_size=1, mask="sink_window", sinks=True),
        Case(lengths=((500, 300),) * 40, heads=1, page_size=16, chunk=(77, 600)),
        Case(lengths=((100, 300), (0, 90)), heads=3, mask="causal_bias"),
    ],
    ids=["ragged", "few rows over many keys", "more than a wave", "pages of a token", "chunks inside pages", "bias"],
)
@pytest.mark.parametrize("target", GPU_TARGETS)
def test_a_hundred_runs_give_the_same_bits(target: str, case: Case, seed: int) -> None:
    problem = build(case, "cuda", seed)
    output, lse = problem.run(target)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        again, again_lse = problem.run(target)
        differ += (bits(again) != bits(output)).sum() + (bits(again_lse) != bits(lse)).sum()
    assert int(differ) == 0


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(bits(first), bits(second))
