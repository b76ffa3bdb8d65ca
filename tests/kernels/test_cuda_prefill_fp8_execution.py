"""The Hopper prefill in fp8 run on the host, block by block, and compared with the oracle; its faults are found.

Not a run on NVIDIA hardware: see tests/support/cuda_execution.hpp and cuda_execution_sm90.cuh. What the tensor cores
truncate is not seen here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import mla
from mla import dispatch
from mla.backends.cuda.prefill_fp8_sm90 import PrefillFp8Sm90
from tests.support.cuda_execution import Executor, HostFault, Mutation, executed, needs_compiler
from tests.support.problems import Case, PrefillProblem, build
from tests.support.tolerance import assert_lse, assert_output

pytestmark = needs_compiler
Run = Callable[..., Executor]

FP8 = Case(dtypes="fp8", lengths=((200, 130), (0, 1)), heads=2)
#: Keys of V^T begin at any row, of some sequences at one that TMA can read from.
ANYWHERE = dataclasses.replace(
    FP8, rope="ragged", overrides=False, mask="none", v_transposed=True,
    lengths=((0, 256), (0, 129), (0, 33), (0, 300), (0, 1), (0, 97)),
)  # fmt: skip
FULL = pytest.mark.full_matrix
#: The first few stand for the others, of which each takes as long as its kernel takes to compile.
CASES = [
    dataclasses.replace(FP8, v_scale="row", mask="none", page_size=1),
    ANYWHERE,
    dataclasses.replace(FP8, dtypes="fp8+bf16_rope", chunk=(100, 200), page_size=16, out_dtype="fp32", heads=1),
]
CASES_FULL = [
    FP8,
    dataclasses.replace(FP8, v_transposed=True, v_scale="number"),
    dataclasses.replace(FP8, dtypes="fp8+bf16_rope"),
    dataclasses.replace(FP8, dtypes="fp8+bf16_rope", prescaled=False, v_scale="", v_transposed=True),
    dataclasses.replace(FP8, rope="batched", rope_width=576, granularity=64, mask="sliding"),
    dataclasses.replace(FP8, rope="ragged", sinks=True, heads=1),
    dataclasses.replace(FP8, softcap=5.0, mask="causal_bias", heads=1, scale=-0.1),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> Iterator[Run]:
    """Return what lets the public functions run the kernel here."""

    def run(mutate: Mutation | None = None) -> Executor:
        return executed(monkeypatch, "sm_90a", PrefillFp8Sm90, folder, mutate, seed)

    yield run
    dispatch.forget()


def check(problem: PrefillProblem) -> None:
    output, lse = problem.run("cuda")
    expected, expected_lse = problem.expect()
    assert_output(output, expected, "fp8", 0.6)  # 3e-2
    assert_lse(lse, expected_lse, "fp8")


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=FULL) for case in CASES_FULL)], ids=str)
def test_prefill(case: Case, on_host: Run, seed: int) -> None:
    executor = on_host()
    check(build(case, "cpu", seed))
    assert len(executor.launched) == 1


def with_one_scale(case: Case, seed: int) -> PrefillProblem:
    """Return a problem all of whose keys have one scale, and all of whose queries."""
    problem = build(case, "cpu", seed)
    problem.keywords["q_scale"].fill_(0.75)
    return problem.with_one_key_scale()


@pytest.mark.parametrize("dtypes", ["fp8", pytest.param("fp8+bf16_rope", marks=FULL)])
@pytest.mark.parametrize("lse", [False, pytest.param(True, marks=FULL)])
def test_one_scale_for_all_keys(dtypes: str, lse: bool, on_host: Run, seed: int) -> None:
    """Without an LSE the tensor cores add up the rows of P."""
    on_host()
    problem = with_one_scale(dataclasses.replace(FP8, dtypes=dtypes, v_transposed=lse, mask="none"), seed)
    expected, expected_lse = problem.expect()
    outputs = problem.outputs()
    if not lse:
        outputs["lse"] = None
    mla.prefill(**problem.operands, **problem.keywords, **outputs, target="cuda")
    assert_output(outputs["output"], expected, "fp8", 0.6)
    if lse:
        assert_lse(outputs["lse"], expected_lse, "fp8")


def test_tiles_of_one_scale_among_others(on_host: Run, seed: int) -> None:
    on_host()
    case = dataclasses.replace(FP8, v_transposed=False, mask="none", lengths=((500, 100), (300, 1)))
    problem = with_one_scale(case, seed)
    problem.keywords["k_scales"][130:300] = 0.8
    problem.keywords["k_scales"][500] = 1.5
    expected, _ = problem.expect()
    outputs = {**problem.outputs(), "lse": None}
    mla.prefill(**problem.operands, **problem.keywords, **outputs, target="cuda")
    assert_output(outputs["output"], expected, "fp8", 0.6)


@pytest.mark.parametrize(
    ("old", "new", "one"),
    [
        pytest.param("", "", True, id="one"),
        pytest.param(
            "if (known.k_row != k_row) return", "if (known.k_row < 0) return", True, id="misplaced", marks=FULL
        ),
        pytest.param("", "", False, id="each"),
        pytest.param("p.k_scales + job.k_row, sc", "p.k_scales + job.k_row + 4, sc", False, id="shifted", marks=FULL),
    ],
)
def test_scales_of_tiles_are_remembered(old: str, new: str, one: bool, on_host: Run, seed: int) -> None:
    """The second head and later rows find what the first found; two sequences share a place of the table."""
    on_host((lambda text: text.replace(old, new)) if old else None)
    case = dataclasses.replace(ANYWHERE, dtypes="fp8+bf16_rope", lengths=((0, 600), (0, 300), (0, 60)))
    problem = with_one_scale(case, seed) if one else build(case, "cpu", seed)
    if one:
        problem.keywords["k_scales"][600:900] = 0.5
    if not old:
        check(problem)
    else:
        with pytest.raises((AssertionError, HostFault)):
            check(problem)


def test_remembered_scales_are_negative_zero_or_no_numbers(on_host: Run, seed: int) -> None:
    """All tiles share two places of the table, of five sequences one has no keys."""
    on_host(lambda text: text.replace("/ kBlockN % kKnownTiles", "/ kBlockN % 2"))
    lengths = ((0, 304), (0, 0), (0, 260), (0, 60), (0, 144))
    problem = build(dataclasses.replace(ANYWHERE, dtypes="fp8+bf16_rope", lengths=lengths), "cpu", seed)
    scales = problem.keywords["k_scales"]
    for first, scale in ((0, 0.5), (128, -0.75), (304, 0.0), (564, -1.5)):  # tiles that begin there; others differ
        scales[first : first + 128] = scale
    check(problem)
    scales[128:256] = math.nan
    (output, lse), (expected, _) = problem.run("cuda"), problem.expect()
    new = problem.operands["valid_length"][1]
    assert output[:new].isnan().all() and lse[:new].isnan().all()
    assert_output(output[new:], expected[new:], "fp8", 0.6)


@pytest.mark.parametrize("lse", [True, pytest.param(False, marks=FULL)])
def test_a_row_does_not_depend_on_its_neighbours(lse: bool, on_host: Run, seed: int) -> None:
    """Rows whose logits grow begin a tile anew; the others of their warp come out the same, to the bit."""

    def run() -> list[torch.Tensor]:
        outputs = problem.outputs()
        if not lse:  # P itself tells where a row has to begin anew, not its sum
            outputs["lse"] = None
        mla.prefill(**problem.operands, **problem.keywords, **outputs, target="cuda")
        return [outputs[name][2:66:2] for name in ("output", "lse") if outputs[name] is not None]

    on_host()
    case = Case(dtypes="fp8+bf16_rope", lengths=((320, 64),), heads=1, mask="none", v_transposed=True)
    problem = with_one_scale(case, seed)
    keys = problem.operands["k"].float()
    keys[:128] *= 6  # of the last tile that is worked on
    problem.operands["k"] = keys.to(torch.float8_e4m3fn)
    results = run()
    problem.operands["q"] = problem.operands["q"].clone()
    problem.operands["q"][2 + 1 : 2 + 64 : 2] = 0.0
    assert all(torch.equal(a, b) for a, b in zip(results, run(), strict=True))
    check(problem)


def test_a_scale_that_is_no_number(on_host: Run, seed: int) -> None:
    """Consumers compare the scales of tiles, and NaN is unlike itself."""
    on_host()
    problem = build(dataclasses.replace(CASES[2], lengths=((300, 100),)), "cpu", seed)
    problem.keywords["k_scales"] = torch.full((1, 1), math.nan).expand(len(problem.operands["k"]), 1)
    output, lse = problem.run("cuda")
    rows = slice(*problem.operands["valid_length"].tolist())
    assert output[rows].isnan().all() and lse[rows].isnan().all()


@FULL
def test_a_large_batch(on_host: Run, seed: int) -> None:
    """More sequences than a warp sorts; a kernel of its own orders them."""
    executor = on_host()
    lengths = tuple((b % 7 * 30, 1 + b % 3 if b % 4 else 0) for b in range(40))
    check(build(dataclasses.replace(FP8, lengths=lengths, heads=1, page_size=16), "cpu", seed))
    assert len(executor.launched) == 2


#: Rows of V, which warps transpose, and V^T, by TMA and by copies: items of one tile and of several.
LATE = [
    dataclasses.replace(CASES[2], lengths=((0, 164), (300, 70), (40, 0))),
    dataclasses.replace(ANYWHERE, heads=1, lengths=((0, 160), (0, 33), (0, 15))),
]


@pytest.mark.parametrize("case", LATE, ids=str)
def test_any_role_may_be_late(case: Case, on_host: Run, seed: int) -> None:
    executor, problem = on_host(), build(case, "cpu", seed)
    for _ in executor.each_late(threads=512):
        check(problem)


FAULTS = {
    "diagonal_shifted": ("int ahead = item.q_position", "int ahead = 1 + item.q_position"),
    "keys_in_their_own_order": ("key / kKeyBlock * kKeyBlock + key % 2 * 32 + key % kKeyBlock / 2", "key"),
    "scales_of_masked_tiles_left_out": ("if (alike && job.scales == kOfEachOrAll) return;", "return;"),
    "warps_issue_other_products": (
        "if (!kRopePlain && common != 0)",
        "if (!kRopePlain && (common != 0 || tid_x() % 128 < 32))",
    ),
}
FAULTS_FULL = {
    "row_scales_wrong": ("p.q_scale[(item->q_row + at)", "p.q_scale[(item->q_row + (at ^ 1))"),
    "slot_of_scales_wrong": ("uint32_t(token) % kPageSize)", "uint32_t(token) % kPageSize ^ 1)"),
    "values_past_the_last_key": ("if (keys >= kBlockN) return;", "return;"),
    "columns_swapped": ("lane < 16 ? 0x6240 : 0x7351", "lane < 16 ? 0x7351 : 0x6240"),
    "sums_not_moved": ("sums.l[r] *= alpha;", ""),
    "values_never_given_back": ("release_values(lead, at);", ""),
    "probabilities_out_of_place": ("words[word - 1] =", "words[(word - 1) ^ 2] ="),
    "second_half_from_the_first": ("row + block + half, full", "row + half, full"),
}
FAULTS_LATE = {
    "end_told_too_early": (LATE[0], "stage < kStagesRaw; stage++, v.advance()", "stage < 1; stage++"),
    "copied_too_early": (LATE[1], "mbarrier_wait_parity(shared.v_free(v.stage()), v.phase());", ""),
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(pytest.param(*fault, id=name) for name, fault in FAULTS.items()),
        *(pytest.param(*fault, id=name, marks=FULL) for name, fault in FAULTS_FULL.items()),
    ],
)
def test_a_fault_is_caught(old: str, new: str, on_host: Run, seed: int) -> None:
    on_host(lambda text: text.replace(old, new))
    with pytest.raises((AssertionError, HostFault)):
        check(build(dataclasses.replace(FP8, scale=0.15), "cpu", seed))


@pytest.mark.parametrize("fault", ["end_told_too_early", pytest.param("copied_too_early", marks=FULL)])
def test_a_fault_is_caught_where_someone_is_late(fault: str, on_host: Run, seed: int) -> None:
    case, old, new = FAULTS_LATE[fault]
    executor, problem = on_host(lambda text: text.replace(old, new)), build(case, "cpu", seed)
    with pytest.raises((AssertionError, HostFault)):
        for _ in executor.each_late(threads=512):
            check(problem)
