"""The mma.sync prefill kernel run on the host, block by block, and compared with the oracle; its faults are found.

Not a run on NVIDIA hardware: see tests/support/cuda_execution.hpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mla import dispatch
from mla.backends.cuda.prefill_sm80 import PrefillSm80
from tests.kernels.test_cuda_prefill_sm80 import shifted
from tests.support.cuda_execution import Executor, HostFault, Mutation, executed, needs_compiler
from tests.support.matrix_cases import EDGES
from tests.support.problems import Case, build
from tests.support.tolerance import assert_lse, assert_output

pytestmark = needs_compiler
Run = Callable[..., Executor]

#: Architectures whose shared memory gives each tile.
ARCHS = ("sm_80", "sm_89", "sm_90a")
CASES = [
    Case(scale=1.0, lengths=((90, 70), (40, 3)), heads=1),
    Case(lengths=((100, 400), (0, 0), (3, 140)), heads=2, mask="sink_window", page_size=1),
    Case(out_dtype="fp32", lengths=EDGES, sinks=True, heads=1),
    Case(dims=(256, 256), lengths=((40, 30), (0, 140)), heads=1),
    Case(rope="batched", chunk=(64, 64), softcap=5.0, mask="causal_bias"),
    Case(rope="ragged", mask="windows_of_heads", dtypes="fp16", scale=-0.1),
    Case(csr=True, page_size=16, mask="documents", lse_layout="HT"),
    Case(heads=18, lengths=((0, 65), (5, 1)), mask="none"),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> Iterator[Run]:
    """Return what lets the public functions run the kernel of an architecture here."""

    def run(arch: str, mutate: Mutation | None = None) -> Executor:
        return executed(monkeypatch, arch, PrefillSm80, folder, mutate, seed)

    yield run
    dispatch.forget()


def check(case: Case, seed: int, elements: int = 0) -> None:
    problem = build(case, "cpu", seed)
    if elements:
        for name in ("q", "k", "v"):
            problem.operands[name] = shifted(problem.operands[name], elements)
    output, lse = problem.run("cuda")
    expected, expected_lse = problem.expect()
    assert_output(output, expected, case.dtypes)
    assert_lse(lse, expected_lse, case.dtypes)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill(arch: str, case: Case, on_host: Run, seed: int) -> None:
    executor = on_host(arch)
    check(case, seed)
    assert len(executor.launched) == 1


@pytest.mark.parametrize("elements", [1, 2, 4])
def test_rows_that_are_not_aligned(elements: int, on_host: Run, seed: int) -> None:
    executor = on_host("sm_80")
    check(Case(lengths=((90, 70), (40, 3)), heads=2, strided=False, poison=math.inf), seed, elements)
    assert f"a{2 * elements}m" in executor.launched[0]


def test_tall_and_short_tiles_give_the_same_bits(on_host: Run, seed: int) -> None:
    """Few items take short tiles; the same sequence among others takes tall ones."""
    executor = on_host("sm_90a")
    few = build(Case(lengths=((70, 80),), heads=1, rope="ragged", spare_rows=(0, 0), scale=1.0), "cpu", seed)
    output, lse = few.run("cuda")
    again = {**few.operands, **{name: few.operands[name].repeat(4, 1, 1) for name in ("q", "k", "v", "k_rope")}}
    for name in ("valid_length", "cache_row_offsets"):
        again[name] = few.operands[name][1] * torch.arange(5, dtype=torch.int32)
    few.operands = again
    few.keywords = {
        name: value.repeat(4) if isinstance(value, torch.Tensor) else value for name, value in few.keywords.items()
    }
    many, many_lse = few.run("cuda")
    assert ["m64n" in name for name in executor.launched] == [True, False]
    for b in range(4):
        rows = slice(b * len(output), (b + 1) * len(output))
        assert torch.equal(many[rows], output) and torch.equal(many_lse[rows], lse)


def test_a_large_batch(on_host: Run, seed: int) -> None:
    """More sequences than a search step of one warp tells apart, most of them empty."""
    lengths = tuple((b % 7, 1 if b % 97 == 5 else 0) for b in range(1100))
    on_host("sm_89")
    check(Case(lengths=lengths, heads=1, page_size=16), seed)


FAULTS = {
    "diagonal_shifted": ("int ahead = item.q_position", "int ahead = 1 + item.q_position"),
    "scale_wrong": ("kScaleScores ? 1.0f : p.logit_scale", "1.02f * p.logit_scale"),
    "page_index_wrong": ("/ kPageSize])", "/ kPageSize ^ 1])"),
    "last_key_ignored": ("bool visible = column_step(j, e) < limit", "bool visible = true"),
    "values_past_the_last_key": ("cp_async_cg_16(to, from, counts ? 16 : 0)", "cp_async_cg_16(to, from, 16)"),
    "rescale_dropped": ("if (__any_sync(~0u, moved))", "if (false)"),
    "swizzle_of_reads_only": ("(at ^ (step % 4 << 5))", "(at + (step % 4 << 5))"),
    "first_barrier_dropped": ("__syncthreads();  // barrier 1", ""),
    "second_barrier_dropped": ("__syncthreads();  // barrier 2", ""),
    "wait_for_values_dropped": ("cp_async_wait_group<1>()", "cp_async_wait_group<2>()"),
    "stages_swapped": ("k_at + (stage ^ 1) * kKBytes", "k_at + stage * kKBytes"),
    "slots_counted_short": ("/ kBlockM + b;", "/ kBlockM + b / 2;"),
}


@pytest.mark.parametrize(("old", "new"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(old: str, new: str, on_host: Run, seed: int) -> None:
    on_host("sm_89", lambda text: text.replace(old, new))
    found = False
    for mask, scale in (("causal", 1.0), ("none", 0.05)):
        try:
            check(Case(lengths=((60, 80), (40, 3), (5, 1)), heads=1, page_size=16, scale=scale, mask=mask), seed)
        except (AssertionError, HostFault):
            found = True
    assert found, "the fault was not seen"
