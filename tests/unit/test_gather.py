"""Gather and decompress: the plan's map, dequantisation, layouts, poison, addresses past 2^31 elements, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mla
from mla.gather import gather_latent, generic_flare_mla_decompress_k_cache_ragged_paged
from mla.kv_cache import PagedKVCacheCollection
from mla.plan import prefill_plan
from tests.support.paged import LAYOUTS, PagedData, make_paged

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def gather_all(data: PagedData, size: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gathered rows of each sequence over all chunks, without page padding, and each chunk's buffer."""
    lengths = [c + n for c, n in zip(data.cached, data.new, strict=True)]
    plan = prefill_plan(data.input_row_offsets, data.cache, data.layer_idx, size, seq_lens_cpu=lengths, target="cpu")
    rows: list[list[torch.Tensor]] = [[] for _ in lengths]
    buffers = []
    for chunk in plan.chunks():
        buffer = torch.full((size, 512), -1.0, dtype=dtype)
        gather_latent(
            chunk.buffer_row_offsets, chunk.cache_offsets, chunk.buffer_length, data.cache, data.layer_idx, buffer,
            target="cpu",
        )  # fmt: skip
        buffers.append(buffer)
        starts, positions = chunk.buffer_row_offsets.tolist(), chunk.cache_offsets.tolist()
        for s, length in enumerate(lengths):
            live = max(0, min(starts[s + 1] - starts[s], length - positions[s]))
            rows[s].append(buffer[starts[s] : starts[s] + live])
    return [torch.cat(parts) if parts else torch.empty(0, 512) for parts in rows], buffers


def assert_rows(data: PagedData, size: int = 100, dtype: torch.dtype = torch.bfloat16) -> None:
    for found, expected in zip(gather_all(data, size, dtype)[0], data.latent, strict=True):
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, seed: int) -> None:
    assert_rows(make_paged([0, 70, 3, 130], [5, 0, 61, 2], 64, layout=layout, seed=seed))


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 64, 128, 256, 512])
@pytest.mark.parametrize("csr", [False, True], ids=["table", "csr"])
def test_page_sizes(page_size: int, csr: bool, seed: int) -> None:
    assert_rows(make_paged([0, 64, 0, 65], [1, 1, 0, 63], page_size, csr=csr, seed=seed), size=77)


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("granularity", [64, 128, 576])
@pytest.mark.parametrize("output", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dequantises(dtype: torch.dtype, granularity: int, output: torch.dtype, seed: int) -> None:
    data = make_paged([0, 70, 3], [5, 0, 61], 16, dtype=dtype, granularity=granularity, layout="blocks", seed=seed)
    assert_rows(data, dtype=output)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.uint32, torch.int64], ids=str)
@pytest.mark.parametrize("csr", [False, True], ids=["table", "csr"])
@pytest.mark.parametrize("seq_lens", [False, True], ids=["cache_lengths", "seq_lens"])
def test_index_forms(index_dtype: torch.dtype, csr: bool, seq_lens: bool, seed: int) -> None:
    assert_rows(make_paged([0, 70, 3], [5, 0, 61], 16, index_dtype=index_dtype, csr=csr, seq_lens=seq_lens, seed=seed))


def test_page_order_does_not_matter(seed: int) -> None:
    found = [
        gather_all(make_paged([40, 100], [9, 1], 16, order=order, seed=seed), 64, torch.bfloat16)[0]
        for order in ("identity", "reversed", "scattered")
    ]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_rows_past_the_plan_are_zero(poison: float, seed: int) -> None:
    """P 128, 500 cached and 9 new, the length inflated to 640, poison in every spare page."""
    data = make_paged([500], [9], 128, poison=poison, seed=seed)
    plan = prefill_plan(data.input_row_offsets, data.cache, 0, 768, max_chunks=1, target="cpu")
    for length in (640, torch.tensor([640], dtype=torch.int32)):
        buffer = torch.full((768, 512), -1.0, dtype=torch.bfloat16)
        gather_latent(plan.buffer_row_offsets[0], plan.cache_offsets[0], length, data.cache, 0, buffer, target="cpu")
        assert torch.equal(buffer[:509], data.latent[0].bfloat16())
        assert (buffer[512:640] == 0).all()
        assert (buffer[640:] == -1).all()


def test_rows_of_nobody_before_the_first_sequence_are_zero(seed: int) -> None:
    data = make_paged([5], [1], 16, seed=seed)
    buffer = torch.full((32, 512), -1.0, dtype=torch.bfloat16)
    gather_latent(torch.tensor([10, 26]), torch.tensor([0]), 30, data.cache, 0, buffer, target="cpu")
    assert (buffer[:10] == 0).all()
    assert torch.equal(buffer[10:16], data.latent[0].bfloat16())
    assert (buffer[26:30] == 0).all()
    assert (buffer[30:] == -1).all()


@pytest.mark.parametrize("length", [0, -1, torch.tensor([-1], dtype=torch.int32), torch.tensor(0)])
def test_nothing_to_gather(length: Any) -> None:
    data = make_paged([5], [1], 16)
    buffer = torch.full((32, 512), -1.0, dtype=torch.bfloat16)
    gather_latent(torch.tensor([0, 16]), torch.tensor([0]), length, data.cache, 0, buffer, target="cpu")
    assert (buffer == -1).all()


def test_output_of_any_row_stride(seed: int) -> None:
    data = make_paged([40], [9], 16, seed=seed)
    plan = prefill_plan(data.input_row_offsets, data.cache, 0, 64, max_chunks=1, target="cpu")
    wide = torch.full((64, 600), -1.0, dtype=torch.bfloat16)
    gather_latent(plan.buffer_row_offsets[0], plan.cache_offsets[0], 64, data.cache, 0, wide[:, 8:520], target="cpu")
    assert torch.equal(wide[:49, 8:520], data.latent[0].bfloat16())
    assert (wide[:, :8] == -1).all()
    assert (wide[:, 520:] == -1).all()


def test_addresses_past_2_to_31_elements(tmp_path: Path) -> None:
    """A sparse file stands in for 9.7 GB of cache; only the pages in the table are ever touched."""
    shape = (131_072, 64, 576)
    elements = shape[0] * shape[1] * shape[2]
    assert elements > 2**31
    try:
        flat = torch.from_file(str(tmp_path / "cache"), shared=True, size=elements, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no sparse file of {elements * 2} bytes here: {error}")
    live = [131_071, 0, 58_255, 58_254]
    table = torch.tensor([live[:3], [live[3], -1, -1]])
    cache = PagedKVCacheCollection.from_pages(flat.view(shape), table, torch.tensor([150, 0]))
    rows = torch.randn(60, 576).bfloat16()
    cache.store(0, torch.tensor([0, 10, 60]), rows[:, :512], rows[:, 512:], target="cpu")
    past = torch.randn(150, 576).bfloat16()
    for t in range(150):
        flat.view(shape)[live[t // 64], t % 64] = past[t]
    expected = torch.cat([past, rows[:10]])[:, :512]
    buffer = torch.zeros(256, 512, dtype=torch.bfloat16)
    gather_latent(torch.tensor([0, 192, 256]), torch.tensor([0, 0]), 256, cache, 0, buffer, target="cpu")
    assert torch.equal(buffer[:160], expected)
    assert torch.equal(buffer[192:242], rows[10:, :512])


def test_slots_far_behind(tmp_path: Path) -> None:
    """P = 1 with slots past 3,728,270: slot * 576 passes 2^31."""
    slots = 3_900_000
    try:
        flat = torch.from_file(str(tmp_path / "cache"), shared=True, size=slots * 576, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no sparse file of {slots * 1152} bytes here: {error}")
    pool = flat.view(slots, 1, 576)
    indices = torch.tensor([3_728_271, 3_899_999, 5, 3_728_270])
    cache = PagedKVCacheCollection.from_csr(pool, torch.tensor([0, 3, 4]), indices)
    rows = torch.randn(4, 576).bfloat16()
    pool[indices, 0] = rows
    buffer = torch.zeros(4, 512, dtype=torch.bfloat16)
    gather_latent(torch.tensor([0, 3, 4]), torch.tensor([0, 0]), 4, cache, 0, buffer, target="cpu")
    assert torch.equal(buffer, rows[:, :512])


class TestDecompress:
    def run(self, data: PagedData, weight: Any, length: Any = 49, columns: int = 1024) -> torch.Tensor:
        plan = prefill_plan(data.input_row_offsets, data.cache, 0, 64, max_chunks=1, target="cpu")
        latent = torch.empty(64, 512, dtype=torch.bfloat16)
        output = torch.full((64, columns), -1.0, dtype=torch.bfloat16)
        generic_flare_mla_decompress_k_cache_ragged_paged(
            plan.buffer_row_offsets[0], plan.cache_offsets[0], length, weight, data.cache, 0, latent, output,
            target="cpu",
        )  # fmt: skip
        return output

    @pytest.mark.parametrize("length", [49, torch.tensor([49]), torch.tensor([64], dtype=torch.int32)])
    def test_projection(self, length: Any, seed: int) -> None:
        data = make_paged([40], [9], 16, seed=seed)
        weight = torch.randn(1024, 512).bfloat16() / 22
        output = self.run(data, weight, length)
        expected = data.latent[0].double() @ weight.double().t()
        assert torch.linalg.norm(output[:49].double() - expected) <= 4e-3 * torch.linalg.norm(expected)

    def test_rows_past_a_host_length_are_not_written(self, seed: int) -> None:
        output = self.run(make_paged([40], [9], 16, seed=seed), torch.randn(1024, 512).bfloat16())
        assert (output[49:] == -1).all()

    def test_callable_weight(self, seed: int) -> None:
        data = make_paged([40], [9], 16, seed=seed)
        weight = torch.randn(1024, 512).bfloat16() / 22
        assert torch.equal(self.run(data, lambda latent: latent @ weight.t()), self.run(data, weight))

    @pytest.mark.parametrize(
        ("weight", "error", "words"),
        [
            (torch.zeros(1000, 512).bfloat16(), mla.ShapeError, ["weight", "(1024, 512)", "(1000, 512)", "k_buffer"]),
            (torch.zeros(1024, 512), mla.DTypeError, ["weight", "float32", "bfloat16", "callable"]),
            (torch.zeros(1024, 512, device="meta").bfloat16(), mla.DeviceError, ["weight", "meta"]),
            ("kv_b_proj", mla.DTypeError, ["weight", "str"]),
            (lambda latent: latent, mla.ShapeError, ["result of weight", "(49, 1024)", "(49, 512)"]),
            (torch.zeros(1024, 512).bfloat16().requires_grad_(), mla.ArgumentError, ["weight", "gradient"]),
        ],
    )
    def test_refusals(self, weight: Any, error: type[Exception], words: list[str]) -> None:
        with pytest.raises(error) as caught:
            self.run(make_paged([40], [9], 16), weight)
        assert all(word in str(caught.value) for word in words), str(caught.value)

    def test_parameter_is_fine_without_grad_mode(self) -> None:
        with torch.no_grad():
            self.run(make_paged([40], [9], 16), torch.zeros(1024, 512).bfloat16().requires_grad_())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"buffer": torch.zeros(64, 576).bfloat16()}, mla.ShapeError, ["k_latent_buffer", "512", "(64, 576)"]),
        ({"buffer": torch.zeros(64, 512).half()}, mla.DTypeError, ["k_latent_buffer", "bfloat16", "float16"]),
        ({"buffer": torch.zeros(512, 64).bfloat16().t()}, mla.ShapeError, ["k_latent_buffer", "contiguous"]),
        ({"buffer": torch.zeros(32, 512).bfloat16()}, mla.ShapeError, ["buffer_row_offsets_1d", "64", "32"]),
        ({"length": 65}, mla.ShapeError, ["buffer_length", "65", "64"]),
        ({"length": -2}, mla.ArgumentError, ["buffer_length", "-2"]),
        ({"length": 1.5}, mla.DTypeError, ["buffer_length", "float"]),
        ({"length": torch.tensor([1, 2])}, mla.ShapeError, ["buffer_length", "(2,)"]),
        ({"offsets": torch.tensor([0, 64, 64])}, mla.ShapeError, ["buffer_row_offsets_1d", "2", "3"]),
        ({"offsets": torch.tensor([64, 0])}, mla.ArgumentError, ["buffer_row_offsets_1d", "64, 0"]),
        ({"positions": torch.tensor([0, 0])}, mla.ShapeError, ["cache_offsets_1d", "1", "2"]),
        ({"positions": torch.tensor([96])}, mla.ShapeError, ["page table too narrow"]),
        ({"positions": torch.tensor([32])}, mla.ArgumentError, ["page ids", "[0, 7)"]),
        ({"layer": 3}, mla.ArgumentError, ["layer_idx", "3"]),
        ({"target": "gpu"}, mla.DeviceError, ["gpu", "cpu"]),
    ],
)
def test_refusals_name_what_came(change: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    data = make_paged([40], [9], 16)
    given: dict[str, Any] = {
        "offsets": torch.tensor([0, 64]), "positions": torch.tensor([0]), "length": 64, "layer": 0, "target": "cpu",
        "buffer": torch.zeros(64, 512).bfloat16(), **change,
    }  # fmt: skip
    with pytest.raises(error) as caught:
        gather_latent(
            given["offsets"], given["positions"], given["length"], data.cache, given["layer"], given["buffer"],
            target=given["target"],
        )  # fmt: skip
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert (given["buffer"] == 0).all()


def test_grad_mode() -> None:
    data = make_paged([40], [9], 16)
    buffer = torch.zeros(64, 512, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(mla.ArgumentError, match="k_latent_buffer"):
        gather_latent(torch.tensor([0, 64]), torch.tensor([0]), 64, data.cache, 0, buffer, target="cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache_offsets_1d": torch.tensor([-5])}, r"cache_offsets_1d must not be negative, got \[-5\]"),
        ({"k_latent_buffer": torch.zeros(1, 512).expand(64, 512)}, "k_latent_buffer is written, but its elements"),
        ({"k_buffer": torch.zeros(1, 512).expand(64, 512)}, "k_buffer is written, but its elements share memory"),
    ],
)
def test_offsets_and_buffers_that_cannot_be(change: dict[str, Any], words: str) -> None:
    data = make_paged([40], [9], 16, dtype=torch.float32)
    given = {
        "buffer_row_offsets_1d": torch.tensor([0, 49]), "cache_offsets_1d": torch.tensor([0]), "buffer_length": 49,
        "weight": torch.zeros(512, 512), "kv_collection": data.cache, "layer_idx": data.layer_idx,
        "k_latent_buffer": torch.zeros(64, 512), "k_buffer": torch.zeros(64, 512), **change,
    }  # fmt: skip
    with pytest.raises(mla.MlaError, match=words):
        mla.generic_flare_mla_decompress_k_cache_ragged_paged(**given, target="cpu")
