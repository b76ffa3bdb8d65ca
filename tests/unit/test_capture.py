"""What a captured graph promises, as far as the CPU can tell: the host reads no value, replays follow the memory."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import pad

import mla
from mla import ArgumentError, DeviceError, Mask, dispatch, masks
from mla.kv_cache import PagedKVCacheCollection
from mla.plan import prefill_plan
from tests.support.replay_step import Step, Tape

META = torch.device("meta")


@pytest.mark.parametrize(("size", "chunks"), [(32, 12), (48, 8), (400, 1)])
def test_a_replay_follows_new_lengths(size: int, chunks: int, seed: int) -> None:
    source, step, mask, tape = random.Random(seed), Step(), masks.CausalMask(), Tape()
    step.draw(source)
    lse = tape.record(lambda: step.run(mask, "cpu", size, max_chunks=chunks))
    for _ in range(8):
        step.draw(source)
        step.output.fill_(3.0)
        tape.replay()
        expected, expected_lse = step.expect(mask, "cpu", size)
        rows = sum(step.new)
        torch.testing.assert_close(step.output[:rows], expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(lse[:rows], expected_lse, rtol=0, atol=2e-5)
        assert (step.output[rows:] == 3.0).all(), "rows of no sequence stay"


def test_a_replay_that_overflows_says_so(seed: int) -> None:
    source, step, mask, tape = random.Random(seed), Step(), masks.NullMask(), Tape()
    step.set([0, 0, 0, 0], [1, 1, 1, 1])
    lse = tape.record(lambda: step.run(mask, "cpu", 48, max_chunks=3))
    seen = set()
    for number in range(400):
        if number >= 12 and len(seen) == 2:
            break
        step.draw(source)
        step.output.fill_(3.0)
        tape.replay()
        assert (step.output[sum(step.new) :] == 3.0).all(), "rows of no sequence stay"
        expected, expected_lse = step.expect(mask, "cpu", 48)
        cut = torch.tensor(step.cut(48, 3), dtype=torch.bool)
        rows = sum(step.new)
        assert step.output[:rows][cut].isnan().all() and lse[:rows][cut].isnan().all()
        torch.testing.assert_close(step.output[:rows][~cut], expected[~cut], rtol=0, atol=2e-5)
        torch.testing.assert_close(lse[:rows][~cut], expected_lse[~cut], rtol=0, atol=2e-5)
        seen |= set(cut.tolist())
    assert seen == {False, True}


def test_a_plan_that_cannot_overflow_is_not_searched_for_cuts() -> None:
    step = Step()
    step.set([0, 9, 3, 0], [1, 1, 5, 1])
    with mock.patch("mla.chunked._spoil_cut_sequences", side_effect=AssertionError):
        step.run(masks.NullMask(), "cpu", 400, max_chunks=1)
        with pytest.raises(AssertionError):
            step.run(masks.NullMask(), "cpu", 32, max_chunks=1)


@pytest.fixture
def kernels_that_do_nothing() -> Iterator[None]:
    def nothing(problem: object, target: object, device: object) -> Callable[[object], None]:
        return lambda args: None

    patches = [
        mock.patch(f"mla.{name}.resolve", nothing)
        for name in ("dispatch", "plan", "gather", "store", "merge", "quantize")
    ]
    dispatch.forget()
    for patch in patches:
        patch.start()
    yield
    mock.patch.stopall()
    dispatch.forget()


@pytest.mark.usefixtures("kernels_that_do_nothing")
class TestNothingIsRead:
    """On the meta device a tensor has no values: whatever looks at one raises."""

    def step(self) -> Step:
        return Step(META)

    def test_the_whole_job(self) -> None:
        step = self.step()
        mask = masks.CausalPaddingMask(torch.zeros(4, dtype=torch.int32, device=META))
        for more in ({"max_chunks": 5}, {"max_chunks": 1}, {"max_chunks": 50}):
            step.run(mask, "cpu", 32, **more)
        plan = prefill_plan(step.offsets, step.cache, 0, 32, max_chunks=5, target="cpu")
        step.run(mask, "cpu", 32, plan=plan, sinks=torch.zeros(2, device=META))
        step.run(mask, "cpu", 32, seq_lens_cpu=[16, 20, 0, 1])
        Step(META, torch.bfloat16).run(mask, "cpu", 32, max_chunks=5, attention_dtype=torch.float8_e4m3fn)

    def test_its_parts(self) -> None:
        step = self.step()
        latent, kv = step.q.new_empty(32, 512), step.q.new_empty(32, 512)
        step.cache.store(0, step.offsets, step.q.new_empty(40, 512), step.q.new_empty(40, 64), target="cpu")
        plan = prefill_plan(step.offsets, step.cache, 0, 32, target="cpu")
        mla.generic_flare_mla_decompress_k_cache_ragged_paged(
            plan.buffer_row_offsets[0], plan.cache_offsets[0], plan.buffer_lengths[:1], step.weight, step.cache, 0,
            latent, kv, target="cpu",
        )  # fmt: skip
        heads = kv.view(32, 2, 256)
        out, lse = mla.prefill(
            step.q, heads[..., :128], heads[..., 128:], step.cache.layer(0), masks.CausalMask(), step.offsets.long(),
            plan.buffer_row_offsets[0], 0.1, cache_offsets=plan.cache_offsets[0], return_lse=True, target="cpu",
        )  # fmt: skip
        mla.merge_attn_states(out, out, lse, out, lse, lse, target="cpu")

    def test_what_is_known_to_read(self) -> None:
        step = self.step()
        with pytest.raises(NotImplementedError, match="meta"):
            step.run(masks.CausalMask(), "cpu", 32)
        plan = prefill_plan(step.offsets, step.cache, 0, 32, target="cpu")
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            plan.check()


class TestRefusedWhileCapturing:
    """What a replay could not follow raises at the capture."""

    @pytest.fixture(autouse=True)
    def capturing(self) -> Iterator[None]:
        self.step = Step()
        self.step.set([0, 9, 3, 0], [1, 1, 5, 1])
        self.host_plan = prefill_plan(
            self.step.offsets, self.step.cache, 0, 48, seq_lens_cpu=self.step.totals, target="cpu"
        )
        wide = PagedKVCacheCollection.from_pages(self.step.pages, self.step.table, self.step.lengths.long())
        indptr = torch.arange(5, dtype=torch.int32) * 6
        listed = PagedKVCacheCollection.from_csr(
            self.step.pages, indptr, self.step.table.flatten(), kv_last_page_len=torch.full((4,), 16, dtype=torch.int32)
        )
        self.copies = {"cache_lengths": wide, "page list": listed}
        places = ("_check", "plan", "gather", "store", "chunked", "_prefill_call", "page_tables", "kv_cache")
        patches = [mock.patch(f"mla.{place}.is_capturing", lambda device: True) for place in places]
        for patch in patches:
            patch.start()
        yield
        mock.patch.stopall()

    def run(self, mask: Mask | None = None, cache: Any = None, **more: Any) -> None:
        step = self.step
        mla.chunked_prefill(
            step.q, cache or step.cache, 0, step.weight, step.offsets, mask or masks.CausalMask(), 0.1,
            buffer_token_size=48, target="cpu", **more,
        )  # fmt: skip

    def test_what_can_be_captured(self) -> None:
        self.run(max_chunks=9)

    def test_layers_of_a_captured_step_share_what_the_plan_cuts(self) -> None:
        step = self.step
        plan = prefill_plan(step.offsets, step.cache, 0, 48, max_chunks=1, target="cpu")
        with mock.patch("mla.chunked.pad", side_effect=pad) as searches:
            self.run(plan=plan)
            self.run(plan=plan)
        assert searches.call_count == 1
        before = dataclasses.replace(plan, captured=False)
        with mock.patch("mla.chunked.pad", side_effect=pad) as searches:
            self.run(plan=before)
            self.run(plan=before)
        assert searches.call_count == 2, "tables from outside may be written anew between two steps"

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ({}, "one of plan and max_chunks must be given while a graph is captured"),
            ({"seq_lens_cpu": [1, 10, 8, 1]}, "seq_lens_cpu fixes the number of chunks"),
            ({"max_chunks": 9, "seq_lens_cpu": [1, 10, 8, 1]}, "seq_lens_cpu fixes the number of chunks"),
        ],
    )
    def test_lengths_of_the_host(self, more: dict[str, Any], words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            self.run(**more)

    def test_a_plan_that_knows_its_lengths(self) -> None:
        with pytest.raises(ArgumentError, match="plan has lengths that the host knows"):
            self.run(plan=self.host_plan)

    @pytest.mark.parametrize("what", ["cache_lengths", "page list"])
    def test_tables_that_were_copied(self, what: str) -> None:
        cache, step = self.copies[what], self.step
        with pytest.raises(DeviceError, match=f"replay would not see new values: .*{what}"):
            self.run(cache=cache, max_chunks=9)
        with pytest.raises(DeviceError, match="replay would not see new values"):
            cache.store(0, step.offsets, step.q.new_zeros(8, 512), step.q.new_zeros(8, 64), target="cpu")
        with pytest.raises(DeviceError, match="replay would not see new values"):
            prefill_plan(step.offsets, cache, 0, 48, max_chunks=9, target="cpu")
        with pytest.raises(DeviceError, match="replay would not see new values"):
            mla.prefill(
                step.q, step.q[..., :128], step.q[..., :128], cache.layer(0), masks.CausalMask(), step.offsets,
                step.offsets, 0.1, target="cpu",
            )  # fmt: skip

    def test_a_mask_whose_tensor_was_copied(self) -> None:
        for lengths in (torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)):  # the second: on the CPU
            with pytest.raises(DeviceError, match=r"a tensor captured by CausalPaddingMask .* replay would not see"):
                self.run(masks.CausalPaddingMask(lengths), max_chunks=9)

    def test_checks_of_values(self) -> None:
        step = self.step
        with pytest.raises(ArgumentError, match="check_indices=True synchronises"):
            mla.prefill(
                step.q, step.q[..., :128], step.q[..., :128], step.cache.layer(0), masks.CausalMask(), step.offsets,
                step.offsets, 0.1, check_indices=True, target="cpu",
            )  # fmt: skip
