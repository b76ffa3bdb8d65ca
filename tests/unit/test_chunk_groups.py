"""Groups of rows of a plan that the host knows: each row where it has keys, merged only where it has them twice."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla
from mla import masks
from mla._chunk_buffer import Extents
from mla._chunk_groups import Group, split
from mla.chunked import _Kernels
from mla.plan import prefill_plan
from mla.problem import MergeArgs
from tests.support.paged import offsets_of
from tests.support.tolerance import assert_lse, assert_output
from tests.unit.test_chunked import HEADS, SCALE, expect, job

LENGTHS = [(70, 5), (0, 64), (0, 0), (33, 1), (2, 9)]  # 80 + 64 + 0 + 48 + 16 rows in pages of 16


def test_a_batch_by_hand() -> None:
    # Rows of q: 0-5, 5-69, 69-70, 70-79. Buffers of 96 rows: the second sequence crosses the border.
    groups = split([c + n for c, n in LENGTHS], [0, 5, 69, 69, 70, 79], 16, 96)
    assert groups == [
        Group(0, 0, 5, True, 5),
        Group(0, 5, 69, True, 5),
        Group(1, 5, 69, False, 69),
        Group(1, 69, 70, True, 70),
        Group(2, 70, 79, True, 79),
    ]


def causal(b: int, q_lo: int, q_hi: int, k_lo: int, k_hi: int) -> bool:
    return q_hi < k_lo


def test_a_causal_batch_by_hand() -> None:
    # The second sequence has its first 16 keys in the first buffer: 16 rows are whole there, and 48 go on.
    assert split([c + n for c, n in LENGTHS], [0, 5, 69, 69, 70, 79], 16, 96, causal) == [
        Group(0, 0, 21, True, 21),
        Group(0, 21, 69, True, 21),
        Group(1, 21, 69, False, 69),
        Group(1, 69, 70, True, 70),
        Group(2, 70, 79, True, 79),
    ]
    # 24 rows on 40 cached ones, in buffers of 16: all of them see the first three, the last eight the fourth.
    assert split([64], [0, 24], 16, 16, causal) == [
        Group(0, 0, 24, True, 0),
        Group(1, 0, 24, False, 0),
        Group(2, 0, 24, False, 8),
        Group(3, 8, 24, False, 24),
    ]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([0, 1, 5, 40])), max_size=6),
    page_size=st.sampled_from([1, 4, 16]),
    size=st.sampled_from([1, 7, 16, 48, 1000]),
    hidden=st.sampled_from([None, causal]),
)
def test_every_row_meets_exactly_the_chunks_that_hold_its_keys(
    lengths: Any, page_size: int, size: int, hidden: Any
) -> None:
    offsets = offsets_of([new for _, new in lengths])
    totals = [cached + new for cached, new in lengths]
    met: dict[int, list[tuple[int, bool, bool]]] = {row: [] for row in range(offsets[-1])}
    for group in split(totals, offsets, page_size, size, hidden):
        for row in range(group.first, group.last):
            met[row].append((group.chunk, group.starts, row < group.through))
    starts = offsets_of([-(-total // page_size) * page_size for total in totals])
    for s, total in enumerate(totals):
        for row in range(offsets[s], offsets[s + 1]):
            seen = total if hidden is None else total - (offsets[s + 1] - 1 - row)
            chunks = sorted({key // size for key in range(starts[s], starts[s] + seen)})
            assert met[row] == [(chunk, chunk == chunks[0], chunk == chunks[-1]) for chunk in chunks]


@pytest.mark.parametrize("mask", [masks.CausalMask(), masks.NullMask()], ids=["causal", "all"])
@pytest.mark.parametrize("given", ["offsets on the CPU", "nothing"])
def test_only_rows_that_cross_a_border_are_merged(given: str, mask: mla.Mask) -> None:
    data, q, weight = job(LENGTHS)
    merged: list[int] = []

    def count(kernels: _Kernels, args: MergeArgs) -> None:
        merged.append(args.output.shape[0])
        merge(kernels, args)

    merge = _Kernels.merge
    totals = [c + n for c, n in LENGTHS]
    more = {"seq_lens_cpu": totals} if given != "nothing" else {}
    with mock.patch.object(_Kernels, "merge", count):
        out, lse = mla.chunked_prefill(
            q, data.cache, 0, weight, data.input_row_offsets, mask, SCALE, buffer_token_size=96,
            return_lse=True, target="cpu", **more,
        )  # fmt: skip
    assert merged == [48 if isinstance(mask, masks.CausalMask) else 64], "of the second sequence alone"
    expected, expected_lse = expect(data, q, weight, mask)
    assert_output(out, expected, "fp32")
    assert_lse(lse, expected_lse, "fp32")


def test_masks_see_the_numbers_and_positions_of_the_whole_batch() -> None:
    data, q, weight = job(LENGTHS)
    windows = torch.tensor([30, 9, 1, 20, 4], dtype=torch.int32)
    bias = torch.randn(5, HEADS, 64, 80)
    for mask in (
        mla.Mask.from_function(lambda b, h, q, k: (k <= q) & (q - k < windows[b]) & (k + b > 1)),
        mla.Mask.from_function(lambda b, h, q, k: (k <= q) & (q - k < 9 + 3 * b)),
        mla.Mask.from_function(lambda b, h, q, k: (k <= q) | (h == HEADS - 1)),
        masks.MaterializedMask(bias),
    ):
        sinks = torch.randn(HEADS)
        out, lse = mla.chunked_prefill(
            q, data.cache, 0, weight, data.input_row_offsets, mask, SCALE, buffer_token_size=40, return_lse=True,
            sinks=sinks, seq_lens_cpu=[c + n for c, n in LENGTHS], target="cpu",
        )  # fmt: skip
        expected, expected_lse = expect(data, q, weight, mask, sinks=sinks)
        assert_output(out, expected, "fp32")
        assert_lse(lse, expected_lse, "fp32")


def test_a_plan_keeps_what_it_was_told() -> None:
    data, q, weight = job(LENGTHS)
    offsets, totals = data.input_row_offsets.clone(), torch.tensor([c + n for c, n in LENGTHS])
    plan = prefill_plan(offsets, data.cache, 0, 96, seq_lens_cpu=totals, target="cpu")
    offsets.zero_()
    totals.zero_()
    out = mla.chunked_prefill(
        q, data.cache, 0, weight, data.input_row_offsets, masks.CausalMask(), SCALE, plan=plan, target="cpu"
    )
    assert_output(out, expect(data, q, weight, masks.CausalMask())[0], "fp32")


def test_what_is_no_mask_is_refused_even_where_nothing_is_asked() -> None:
    data, q, weight = job([(5, 0)])
    with pytest.raises(mla.DTypeError, match="mask must be a mask object"):
        mla.chunked_prefill(q, data.cache, 0, weight, data.input_row_offsets, "causal", SCALE, target="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("attention_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("offsets_on_host", [True, False])
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 32, 0]], ids=str)
def test_rows_of_sequences_without_keys_are_nothing(
    lengths: list[int], offsets_on_host: bool, attention_dtype: torch.dtype | None
) -> None:
    """As on a rank that holds other keys of the sequence; also where it is the last and the chunks before are full."""
    data, q, weight = job([(0, 3), (0, 33), (0, 5)], dtype=torch.bfloat16)
    cache = data.cache.with_batch(None, data.page_table, seq_lens=torch.tensor(lengths))
    sinks = torch.randn(HEADS)
    out, lse = mla.chunked_prefill(
        q, cache, 0, weight, data.input_row_offsets, masks.NullMask(), SCALE, buffer_token_size=16,
        return_lse=True, sinks=sinks, target="cpu", attention_dtype=attention_dtype,
        **({} if offsets_on_host else {"max_chunks": 3}),
    )  # fmt: skip
    empty = torch.tensor([length == 0 for length in lengths]).repeat_interleave(torch.tensor([3, 33, 5]))
    assert (out[empty] == 0).all() and torch.equal(lse[empty], sinks.expand(int(empty.sum()), HEADS))
    assert (out[~empty] != 0).any(-1).all()


def test_chunks_without_queries_cost_nothing() -> None:
    data, q, weight = job([(200, 0), (10, 3)])
    with mock.patch("mla._chunk_buffer.up_project", wraps=mla.gather.up_project) as projections:
        mla.chunked_prefill(
            q, data.cache, 0, weight, data.input_row_offsets, masks.CausalMask(), SCALE, buffer_token_size=64,
            seq_lens_cpu=[200, 13], target="cpu",
        )  # fmt: skip
    assert projections.call_count == 1


def test_the_workspace_holds_the_parted_rows_alone() -> None:
    data, q, weight = job(LENGTHS)
    plan = prefill_plan(
        data.input_row_offsets, data.cache, 0, 96, seq_lens_cpu=[c + n for c, n in LENGTHS], target="cpu"
    )
    seen: list[int] = []
    allocate = Extents.allocate

    def watch(extents: Extents, workspace: torch.Tensor | None, device: torch.device) -> Any:
        seen.append(extents.workspace_bytes())
        return allocate(extents, workspace, device)

    with mock.patch.object(Extents, "allocate", watch):
        mla.chunked_prefill(
            q, data.cache, 0, weight, data.input_row_offsets, masks.CausalMask(), SCALE, plan=plan, target="cpu"
        )
    (groups,) = plan.groups.values()
    assert seen and seen[0] < mla.workspace_size("chunked_prefill", q, data.cache, 0, weight, plan=plan)
    rows = groups.most_parted_rows
    assert rows == 48
    parts = [96 * 512 * 4, 96 * HEADS * 256 * 4, *2 * [rows * HEADS * 128 * 4], *2 * [rows * HEADS * 4]]
    assert seen[0] == sum(math.ceil(part / 256) * 256 for part in parts)
