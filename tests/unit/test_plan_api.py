"""The plan's functions: what they refuse, what they say about overflow, what a PrefillPlan offers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla
from mla import dispatch
from mla.kv_cache import PagedKVCacheCollection
from mla.plan import generic_flare_mla_prefill_ragged_paged_plan, prefill_plan
from tests.support.plans import EXAMPLES, lengths_only


def arguments(chunks: int = 3) -> dict[str, Any]:
    """Arguments of the generic function that are in order."""
    return {
        "input_row_offsets": torch.tensor([0, 0, 64], dtype=torch.int32),
        "kv_collection": lengths_only([300, 128], 128, 3),
        "layer_idx": 0,
        "buffer_token_size": 512,
        "buffer_row_offsets": torch.zeros(chunks, 3, dtype=torch.int32),
        "cache_offsets": torch.zeros(chunks, 2, dtype=torch.int32),
        "buffer_lengths": torch.zeros(chunks, dtype=torch.int32),
        "target": "cpu",
    }


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"buffer_token_size": 0}, mla.ArgumentError, ["buffer_token_size", "0"]),
        ({"buffer_token_size": 2**31}, mla.ArgumentError, ["buffer_token_size", str(2**31)]),
        ({"buffer_token_size": 512.0}, mla.DTypeError, ["buffer_token_size", "float"]),
        ({"layer_idx": 1}, mla.ArgumentError, ["layer_idx", "1"]),
        ({"layer_idx": -1}, mla.ArgumentError, ["layer_idx", "-1"]),
        ({"layer_idx": "0"}, mla.DTypeError, ["layer_idx", "str"]),
        ({"kv_collection": torch.zeros(2, 2)}, mla.DTypeError, ["kv_collection", "Tensor"]),
        ({"input_row_offsets": torch.tensor([0, 64])}, mla.ShapeError, ["input_row_offsets", "(2,)", "(2,)"]),
        ({"input_row_offsets": torch.tensor([[0, 0, 64]])}, mla.ShapeError, ["input_row_offsets", "2-D"]),
        ({"input_row_offsets": torch.tensor([0.0, 0.0, 64.0])}, mla.DTypeError, ["input_row_offsets", "float32"]),
        ({"input_row_offsets": [0, 0, 64]}, mla.DTypeError, ["input_row_offsets", "list"]),
        ({"input_row_offsets": torch.tensor([0, 70, 64])}, mla.ArgumentError, ["input_row_offsets", "70"]),
        ({"input_row_offsets": torch.tensor([-1, 0, 64])}, mla.ArgumentError, ["input_row_offsets", "-1"]),
        ({"input_row_offsets": torch.tensor([0, 85, 64 + 85])}, mla.ShapeError, ["page table too narrow", "385"]),
        ({"buffer_row_offsets": torch.zeros(2, 3, dtype=torch.int32)}, mla.ShapeError,
         ["buffer_row_offsets", "(3, 3)", "(2, 3)", "buffer_lengths"]),
        ({"cache_offsets": torch.zeros(3, 3).int()}, mla.ShapeError, ["cache_offsets", "(3, 2)", "(3, 3)"]),
        ({"cache_offsets": torch.zeros(3, 2)}, mla.DTypeError, ["cache_offsets", "uint32", "float32"]),
        ({"buffer_lengths": torch.zeros(3, dtype=torch.uint32)}, mla.DTypeError, ["buffer_lengths", "uint32"]),
        ({"buffer_lengths": torch.zeros(3, device="meta").int()}, mla.DeviceError, ["buffer_lengths", "meta"]),
        ({"required_chunks": torch.zeros(2, dtype=torch.int32)}, mla.ShapeError, ["required_chunks", "(1,)", "(2,)"]),
        ({"buffer_row_offsets": torch.zeros(3, 6, dtype=torch.int32)[:, ::2]}, mla.ShapeError,
         ["buffer_row_offsets", "contiguous"]),
        ({"target": "gpu"}, mla.DeviceError, ["gpu", "cpu"]),
        ({"target": "cudda"}, mla.TargetError, ["cudda", "cuda"]),
        ({"stream": 5}, mla.ArgumentError, ["stream"]),
    ],
)  # fmt: skip
def test_refusals_name_what_came(change: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    given = {**arguments(), **change}
    outputs = [given[name] for name in ("buffer_row_offsets", "cache_offsets", "buffer_lengths")]
    before = [t.clone() for t in outputs]
    with pytest.raises(error) as caught:
        generic_flare_mla_prefill_ragged_paged_plan(**given)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert all(a.is_meta or torch.equal(a, b) for a, b in zip(outputs, before, strict=True))


def test_a_refused_call_is_refused_again_and_a_good_one_stays_good() -> None:
    generic_flare_mla_prefill_ragged_paged_plan(**arguments())
    for _ in range(2):
        with pytest.raises(mla.ShapeError):
            generic_flare_mla_prefill_ragged_paged_plan(**{**arguments(), "cache_offsets": torch.zeros(1, 2).int()})
    given = arguments()
    generic_flare_mla_prefill_ragged_paged_plan(**given)
    assert given["buffer_lengths"].tolist() == EXAMPLES["H"].tables.buffer_lengths


def test_validation_is_done_once_for_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.forget()
    calls = []
    real = dispatch.resolve
    monkeypatch.setattr("mla.plan.resolve", lambda *args: calls.append(args) or real(*args))
    for _ in range(3):
        generic_flare_mla_prefill_ragged_paged_plan(**arguments())
    assert len(calls) == 1
    generic_flare_mla_prefill_ragged_paged_plan(**arguments(chunks=4))
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64])
def test_index_dtypes_and_strides(dtype: torch.dtype) -> None:
    spread = torch.tensor([0, 9, 0, 9, 64, 9]).to(dtype)[::2]
    given = {**arguments(), "input_row_offsets": spread}
    generic_flare_mla_prefill_ragged_paged_plan(**given)
    assert given["buffer_row_offsets"].tolist() == EXAMPLES["H"].tables.buffer_row_offsets


def test_a_value_that_int32_does_not_hold_is_refused() -> None:
    with pytest.raises(mla.ArgumentError, match="int32"):
        generic_flare_mla_prefill_ragged_paged_plan(
            **{**arguments(), "input_row_offsets": torch.tensor([0, 0, 2**32 + 64])}
        )


def test_seq_lens_in_place_of_cache_lengths() -> None:
    pages = torch.empty(1, 128, 576, device="meta")
    cache = PagedKVCacheCollection.from_pages(
        pages, torch.zeros(2, 3, dtype=torch.int32), seq_lens=torch.tensor([300, 192])
    )
    plan = prefill_plan(torch.tensor([0, 0, 64]), cache, 0, 512, max_chunks=3, target="cpu")
    assert plan.buffer_row_offsets.tolist() == EXAMPLES["H"].tables.buffer_row_offsets


class TestOverflow:
    """P 128, cached [500, 500], new [9, 9], N 128: eight chunks are needed."""

    offsets = torch.tensor([0, 9, 18], dtype=torch.int32)

    def cache(self) -> PagedKVCacheCollection:
        return lengths_only([500, 500], 128, 4)

    def test_kernel_reports_what_is_needed(self) -> None:
        plan = prefill_plan(self.offsets, self.cache(), 0, 128, max_chunks=1, target="cpu")
        assert plan.required_chunks.item() == 8
        with pytest.raises(mla.BufferOverflowError, match=r"8 chunks.*has 1"):
            plan.check()

    @pytest.mark.parametrize("host", [[509, 509], torch.tensor([509, 509])])
    def test_host_lengths_find_it_at_once(self, host: Any) -> None:
        with pytest.raises(mla.BufferOverflowError, match=r"8 chunks.*has 7"):
            prefill_plan(self.offsets, self.cache(), 0, 128, max_chunks=7, seq_lens_cpu=host, target="cpu")

    def test_host_lengths_size_the_plan(self) -> None:
        plan = prefill_plan(self.offsets, self.cache(), 0, 128, seq_lens_cpu=[509, 509], target="cpu")
        assert plan.max_chunks == 8
        assert plan.host_lengths == (128,) * 8
        plan.check()

    def test_default_is_sixteen_chunks(self) -> None:
        assert prefill_plan(self.offsets, self.cache(), 0, 128, target="cpu").max_chunks == 16

    def test_error_is_a_value_error(self) -> None:
        assert issubclass(mla.BufferOverflowError, ValueError)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_chunks": 0}, mla.ArgumentError, ["max_chunks", "0"]),
        ({"max_chunks": 1.5}, mla.DTypeError, ["max_chunks", "float"]),
        ({"seq_lens_cpu": [300, 192.5]}, mla.DTypeError, ["seq_lens_cpu", "192.5"]),
        ({"seq_lens_cpu": torch.tensor([300.0, 192.5])}, mla.DTypeError, ["seq_lens_cpu", "float32"]),
        ({"seq_lens_cpu": [300]}, mla.ShapeError, ["seq_lens_cpu", "1", "2"]),
        ({"seq_lens_cpu": [300, -1]}, mla.ArgumentError, ["seq_lens_cpu", "-1"]),
        ({"seq_lens_cpu": torch.zeros(2, dtype=torch.int32, device="meta")}, mla.DeviceError, ["seq_lens_cpu", "meta"]),
        ({"seq_lens_cpu": [300, 193]}, mla.ArgumentError, ["seq_lens_cpu", "193", "192"]),
    ],
)
def test_prefill_plan_refusals(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        prefill_plan(torch.tensor([0, 0, 64]), lengths_only([300, 128], 128, 3), 0, 512, target="cpu", **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


class TestChunks:
    def test_known_on_the_host(self) -> None:
        cache = lengths_only([300, 128], 128, 3)
        plan = prefill_plan(
            torch.tensor([0, 0, 64]), cache, 0, 512, seq_lens_cpu=[300, 192], max_chunks=5, target="cpu"
        )
        assert [(c.number, c.buffer_length, c.max_length) for c in plan.chunks()] == [(0, 512, 512), (1, 128, 128)]

    def test_unknown_until_checked(self) -> None:
        cache = lengths_only([300, 128], 128, 3)
        plan = prefill_plan(torch.tensor([0, 0, 64]), cache, 0, 512, max_chunks=3, target="cpu")
        chunks = list(plan.chunks())
        assert [int(c.buffer_length) for c in chunks] == [512, 128, -1]
        assert all(isinstance(c.buffer_length, torch.Tensor) and c.max_length == 512 for c in chunks)
        assert torch.equal(chunks[1].buffer_row_offsets, plan.buffer_row_offsets[1])
        assert torch.equal(chunks[1].cache_offsets, plan.cache_offsets[1])
        plan.check()
        assert [c.buffer_length for c in plan.chunks()] == [512, 128]

    def test_nothing_to_do(self) -> None:
        plan = prefill_plan(torch.tensor([0]), lengths_only([], 64, 1), 0, 512, seq_lens_cpu=[], target="cpu")
        assert list(plan.chunks()) == []
        assert plan.batch_size == 0
