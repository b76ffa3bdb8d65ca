"""The paged cache: views of the engines' layouts, tables, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mla
from mla.gather import gather_latent
from mla.kv_cache import PagedKVCacheCollection
from tests.support.paged import LAYOUTS, make_paged, slots_of

TABLE = torch.tensor([[1, 2], [3, -1]], dtype=torch.int32)
LENGTHS = torch.tensor([20, 5], dtype=torch.int32)


def pages(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_shows_the_same_rows(layout: str, seed: int) -> None:
    data = make_paged([0, 70, 3], [5, 0, 61], 16, layout=layout, seed=seed)
    layer = data.cache.layer(data.layer_idx)
    assert (layer.page_size, layer.batch_size, layer.num_pages) == (16, 3, data.cache.num_pages)
    assert layer.latent.shape == (layer.num_pages, 16, 512)
    assert layer.rope.shape == (layer.num_pages, 16, 64)
    for s, latent in enumerate(data.latent):
        for t, (page, slot) in enumerate(slots_of(data, s, 0, len(latent))):
            row = torch.cat([layer.latent[page, slot].float(), layer.rope[page, slot].float()])
            if layer.scales is not None:
                scales = layer.scales[page, slot].repeat_interleave(layer.quantization_granularity)
                row[: len(scales)] *= scales
            assert torch.equal(row, torch.cat([latent[t], data.rope[s][t]]))


def test_blocks_are_viewed_not_copied() -> None:
    blocks = pages(4, 1, 3, 16, 1, 576)
    layer = PagedKVCacheCollection(blocks, LENGTHS, TABLE).layer(2)
    blocks[3, 0, 2, 7, 0, 5] = 1
    blocks[3, 0, 2, 7, 0, 512 + 5] = 2
    assert layer.latent[3, 7, 5] == 1
    assert layer.rope[3, 7, 5] == 2
    assert layer.latent.stride() == (3 * 16 * 576, 576, 1)


@pytest.mark.parametrize(
    ("view", "strides"),
    [
        (lambda: pages(4, 5, 16, 576)[:, 1], (5 * 16 * 576, 576, 1)),
        (lambda: pages(4, 16, 640)[..., :576], (16 * 640, 640, 1)),
        (lambda: pages(9, 32, 576)[1::2, ::2], (2 * 32 * 576, 2 * 576, 1)),
        (lambda: pages(16, 4, 576).transpose(0, 1), (576, 4 * 576, 1)),
    ],
    ids=["layers", "padded", "sliced", "transposed"],
)
def test_strides_are_read_from_the_tensor(view: Any, strides: tuple[int, ...]) -> None:
    kv_cache = view()
    layer = PagedKVCacheCollection.from_pages(kv_cache, TABLE, LENGTHS).layer(0)
    assert layer.latent.stride() == strides
    assert layer.latent.data_ptr() == kv_cache.data_ptr()
    assert layer.rope.data_ptr() == kv_cache.data_ptr() + 512 * 2


def test_addresses_of_a_cache_past_2_to_31_elements() -> None:
    cache = PagedKVCacheCollection.from_pages(
        pages(131_072, 64, 576, device="meta"), torch.tensor([[131_071, 0, 58_255]]), torch.tensor([150])
    )
    layer = cache.layer(0)
    page = int(layer.page_ids(torch.tensor(0), torch.tensor(0)))
    assert layer.latent[page, 63].storage_offset() == 131_071 * 64 * 576 + 63 * 576
    assert layer.rope[page, 63].storage_offset() == 131_071 * 64 * 576 + 63 * 576 + 512


def test_layer_is_made_once() -> None:
    cache = PagedKVCacheCollection(pages(4, 1, 3, 16, 1, 576), LENGTHS, TABLE)
    assert cache.layer(1) is cache.layer(1)
    assert cache.layer(1) is not cache.layer(2)
    assert cache.layer(1).signature == cache.layer(2).signature
    assert "bf16" in repr(cache.layer(1))


def test_tables_on_the_device_are_used_in_place() -> None:
    """What a replayed graph relies on: the tables are written anew and the collection is kept."""
    table, lengths = TABLE.clone(), LENGTHS.clone().view(torch.uint32)
    layer = PagedKVCacheCollection.from_pages(pages(4, 16, 576), table, lengths).layer(0)
    table[0, 0] = 2
    lengths.view(torch.int32)[1] = 6
    assert layer.page_table.tolist() == [[2, 2], [3, -1]]
    assert layer.lengths.tolist() == [20, 6]


def test_garbage_behind_a_sequence_is_not_looked_at() -> None:
    table = torch.tensor([[1, 2, 2**40], [3, -7, 999]])
    layer = PagedKVCacheCollection.from_pages(pages(4, 16, 576), table, LENGTHS).layer(0)
    assert layer.page_table[:, 0].tolist() == [1, 3]


def test_bounds_come_from_shapes_or_from_the_caller() -> None:
    layer = PagedKVCacheCollection.from_pages(pages(4, 16, 576), TABLE, LENGTHS).layer(0)
    assert (layer.max_seq_length, layer.max_cache_length) == (32, 32)
    given = PagedKVCacheCollection.from_pages(
        pages(4, 16, 576), TABLE, LENGTHS, max_seq_length=4, max_cache_length=24
    ).layer(0)
    assert (given.max_seq_length, given.max_cache_length) == (4, 24)


def test_lengths_before_and_with_this_step() -> None:
    offsets = torch.tensor([3, 7, 7])
    before = PagedKVCacheCollection.from_pages(pages(4, 16, 576), TABLE, LENGTHS).layer(0)
    assert before.cached_lengths(offsets).tolist() == [20, 5]
    assert before.total_lengths(offsets).tolist() == [24, 5]
    together = PagedKVCacheCollection.from_pages(pages(4, 16, 576), TABLE, seq_lens=LENGTHS).layer(0)
    assert together.lengths_include_new
    assert together.cached_lengths(offsets).tolist() == [16, 5]
    assert together.total_lengths(offsets).tolist() == [20, 5]


class TestCsr:
    indptr = torch.tensor([0, 2, 2, 3])
    indices = torch.tensor([4, 1, 3])

    def test_last_page_len(self) -> None:
        layer = PagedKVCacheCollection.from_csr(
            pages(5, 16, 576), self.indptr, self.indices, kv_last_page_len=torch.tensor([4, 0, 16])
        ).layer(0)
        assert layer.lengths.tolist() == [20, 0, 16]
        assert layer.lengths_include_new
        assert layer.page_indptr is not None
        sequence, page = torch.tensor([0, 0, 2]), torch.tensor([0, 1, 0])
        assert layer.page_ids(sequence, page).tolist() == [4, 1, 3]

    @pytest.mark.parametrize("last", [[17, 0, 16], [4, 0, 0], [4, 0, -1]])
    def test_last_page_len_out_of_range(self, last: list[int]) -> None:
        with pytest.raises(ValueError, match="page size 16"):
            PagedKVCacheCollection.from_csr(
                pages(5, 16, 576), self.indptr, self.indices, kv_last_page_len=torch.tensor(last)
            )

    def test_input_row_offsets_turn_lengths_into_cached_ones(self) -> None:
        layer = PagedKVCacheCollection.from_csr(
            pages(5, 16, 576), self.indptr, self.indices, kv_last_page_len=torch.tensor([4, 0, 16]),
            input_row_offsets=torch.tensor([0, 5, 5, 21]),
        ).layer(0)  # fmt: skip
        assert not layer.lengths_include_new
        assert layer.lengths.tolist() == [15, 0, 0]

    def test_pages_kept_for_later_may_be_garbage(self) -> None:
        layer = PagedKVCacheCollection.from_csr(
            pages(5, 16, 576), torch.tensor([0, 3, 5]), torch.tensor([4, 1, -1, 2, 2**30]), torch.tensor([20, 16])
        ).layer(0)
        assert layer.lengths.tolist() == [20, 16]
        with pytest.raises(mla.ArgumentError, match="page ids"):
            layer.check_indices(torch.tensor([0, 13, 13]))

    def test_slot_list(self) -> None:
        layer = PagedKVCacheCollection.from_csr(
            pages(9, 1, 576), torch.tensor([0, 3, 4]), torch.tensor([8, 2, 5, 0])
        ).layer(0)
        assert layer.page_size == 1
        assert layer.lengths.tolist() == [3, 1]

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"kv_last_page_len": None}, mla.ArgumentError, ["cache_lengths", "seq_lens", "kv_last_page_len"]),
            ({"cache_lengths": torch.tensor([20, 0, 16])}, mla.ArgumentError, ["kv_last_page_len", "cache_lengths"]),
            ({"kv_last_page_len": torch.tensor([4, 0])}, mla.ShapeError, ["kv_last_page_len", "3", "2"]),
            ({"kv_page_indptr": torch.tensor([0, 3, 2, 3])}, mla.ArgumentError, ["kv_page_indptr"]),
            ({"kv_page_indptr": torch.tensor([0, 2, 2, 4])}, mla.ShapeError,
             ["kv_page_indptr", "4", "kv_page_indices", "3"]),
            ({"kv_page_indices": torch.tensor([4, 5, 3])}, mla.ArgumentError, ["page ids", "[0, 5)", "5"]),
            ({"kv_page_indices": torch.tensor([[4, 1, 3]])}, mla.ShapeError, ["kv_page_indices", "1-D"]),
        ],
    )  # fmt: skip
    def test_refusals(self, change: dict[str, Any], error: type[Exception], words: list[str]) -> None:
        given: dict[str, Any] = {
            "kv_page_indptr": self.indptr, "kv_page_indices": self.indices,
            "kv_last_page_len": torch.tensor([4, 0, 16]), **change,
        }  # fmt: skip
        with pytest.raises(error) as caught:
            PagedKVCacheCollection.from_csr(pages(5, 16, 576), **given)
        assert all(word in str(caught.value) for word in words), str(caught.value)


FP8 = {"kv_cache": pages(4, 16, 576, dtype=torch.float8_e4m3fn)}
SPLIT = {"kv_cache": pages(4, 16, 512)}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv_cache": pages(4, 16, 640)}, mla.ShapeError, ["576", "(4, 1, 1, 16, 1, 640)", "slice"]),
        ({"kv_cache": pages(4, 2, 16, 576)}, mla.ShapeError, ["kv_cache", "[num_pages, P, D]", "(4, 2, 16, 576)"]),
        ({"kv_cache": pages(4, 576)}, mla.ShapeError, ["kv_cache", "3-D or 4-D", "2-D"]),
        ({"kv_cache": pages(576, 16, 4).permute(2, 1, 0)}, mla.ShapeError, ["contiguous", "last"]),
        ({"kv_cache": pages(4, 16, 576).double()}, mla.DTypeError, ["blocks", "float64"]),
        ({"kv_cache": pages(4, 16, 576).to(torch.uint8)}, mla.DTypeError, ["uint8", "view(torch.float8_e4m3fn)"]),
        ({"kv_cache": [[0.0]]}, mla.DTypeError, ["kv_cache", "list"]),
        ({"kpe_cache": pages(4, 16, 64)}, mla.ShapeError, ["kpe_cache", "512"]),
        ({**SPLIT, "kpe_cache": pages(4, 8, 64)}, mla.ShapeError, ["kpe_cache", "(4, 1, 16, 64)", "(4, 1, 8, 64)"]),
        ({**SPLIT, "kpe_cache": pages(4, 16, 64).half()}, mla.DTypeError, ["kpe_cache", "bfloat16", "float16"]),
        (SPLIT, mla.ShapeError, ["576", "512 with kpe_cache"]),
        (FP8, mla.ArgumentError, ["scales", "torch.ones"]),
        ({**FP8, "scales": torch.ones(4, 16, 5), "quantization_granularity": 64}, mla.ShapeError,
         ["scales", "(4, 1, 16, 9)", "(4, 1, 16, 5)"]),
        ({**FP8, "scales": torch.ones(4, 16, 3)}, mla.ShapeError, ["scales", "3 columns"]),
        ({**FP8, "scales": torch.ones(4, 16, 5), "quantization_granularity": 100}, mla.ArgumentError,
         ["quantization_granularity", "64", "128", "576", "100"]),
        ({**FP8, "scales": torch.ones(4, 16, 5).half()}, mla.DTypeError, ["scales", "float32", "float16"]),
        ({"scales": torch.ones(4, 16, 5)}, mla.ArgumentError, ["scales", "fp8", "bfloat16"]),
        ({"kv_cache": pages(4, 16, 656)}, mla.DTypeError, ["656", "uint8", "bfloat16"]),
        ({"kv_cache": pages(4, 16, 656, dtype=torch.uint8), "scales": torch.ones(4, 16, 4)}, mla.ArgumentError,
         ["656", "own"]),
        ({"kv_cache": pages(4, 16, 657, dtype=torch.uint8)[..., 1:]}, mla.ShapeError, ["656", "multiples of 4"]),
        ({"cache_lengths": None}, mla.ArgumentError, ["cache_lengths", "seq_lens", "neither"]),
        ({"seq_lens": LENGTHS}, mla.ArgumentError, ["cache_lengths", "seq_lens", "both"]),
        ({"cache_lengths": torch.tensor([20, 5, 1])}, mla.ShapeError,
         ["lookup_table", "(2, 2)", "cache_lengths", "(3,)"]),
        ({"cache_lengths": torch.tensor([20.0, 5.0])}, mla.DTypeError, ["cache_lengths", "float32"]),
        ({"cache_lengths": torch.tensor([20, -5])}, mla.ArgumentError, ["cache_lengths", "negative", "-5"]),
        ({"cache_lengths": torch.tensor([20, 2**32 + 5])}, mla.ShapeError, ["page table too narrow", str(2**32 + 5)]),
        ({"cache_lengths": torch.tensor([33, 5])}, mla.ShapeError,
         ["page table too narrow", "33", "3 pages", "2 pages"]),
        ({"cache_lengths": torch.tensor([20, 17])}, mla.ArgumentError, ["page ids", "[0, 4)", "-1"]),
        ({"max_cache_length": 33}, mla.ShapeError, ["max_cache_length", "33", "3 pages", "2 columns"]),
        ({"page_table": TABLE.float()}, mla.DTypeError, ["lookup_table", "float32"]),
        ({"page_table": TABLE[0]}, mla.ShapeError, ["lookup_table", "2-D", "1-D"]),
        ({"page_table": TABLE.to("meta")}, mla.DeviceError, ["lookup_table", "meta", "cpu"]),
    ],
)  # fmt: skip
def test_refusals_name_what_came(change: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    given = {"kv_cache": pages(4, 16, 576), "page_table": TABLE, "cache_lengths": LENGTHS, **change}
    with pytest.raises(error) as caught:
        PagedKVCacheCollection.from_pages(**given)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("layer_idx", [-1, 3])
def test_layer_out_of_range(layer_idx: int) -> None:
    with pytest.raises(mla.ArgumentError, match=rf"layer_idx must be in \[0, 3\), got {layer_idx}"):
        PagedKVCacheCollection.allocate(4, 16, 3).layer(layer_idx)


@pytest.mark.parametrize("shape", [(4, 2, 3, 16, 1, 576), (4, 1, 3, 16, 2, 576), (4, 16, 576), (4, 1, 3, 0, 1, 576)])
def test_blocks_of_another_form(shape: tuple[int, ...]) -> None:
    with pytest.raises(mla.ShapeError, match="blocks must"):
        PagedKVCacheCollection(pages(*shape), LENGTHS, TABLE)


class TestFp8:
    @pytest.mark.parametrize(
        ("dtype", "values"),
        [(torch.float8_e4m3fn, [0.0, -0.0, "nan", "nan"]), (torch.float8_e4m3fnuz, [0.0, "nan", 240.0, -240.0])],
        ids=str,
    )
    def test_bytes_mean_what_the_dtype_says(self, dtype: torch.dtype, values: list[Any]) -> None:
        raw = torch.zeros(1, 1, 576, dtype=torch.uint8)
        raw[0, 0, :4] = torch.tensor([0x00, 0x80, 0x7F, 0xFF], dtype=torch.uint8)
        cache = PagedKVCacheCollection.from_pages(
            raw.view(dtype), torch.tensor([[0]]), torch.tensor([1]), scales=torch.ones(1, 1, 1)
        )
        output = torch.empty(1, 512)
        gather_latent(torch.tensor([0, 1]), torch.tensor([0]), 1, cache, 0, output, target="cpu")
        expected = torch.tensor([float(v) for v in values])
        torch.testing.assert_close(output[0, :4], expected, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize(("columns", "granularity"), [(9, 64), (5, 128), (1, 576)])
    def test_granularity_is_read_from_the_columns(self, columns: int, granularity: int) -> None:
        cache = PagedKVCacheCollection.from_pages(**FP8, page_table=TABLE, cache_lengths=LENGTHS,
                                                  scales=torch.ones(4, 16, 1, columns))  # fmt: skip
        assert cache.layer(0).quantization_granularity == granularity

    def test_a_bf16_rope_has_no_scales(self) -> None:
        cache = PagedKVCacheCollection.from_pages(
            pages(4, 16, 512, dtype=torch.float8_e4m3fn), TABLE, LENGTHS, kpe_cache=pages(4, 16, 64),
            scales=torch.ones(4, 16, 4),
        )  # fmt: skip
        layer = cache.layer(0)
        assert (layer.dtypes, layer.quantization_granularity) == ("fp8+bf16_rope", 128)

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
    def test_fused_rows(self, dtype: torch.dtype) -> None:
        raw = pages(4, 3, 16, 656, dtype=torch.uint8)[:, 1].view(dtype)
        layer = PagedKVCacheCollection.from_pages(raw, TABLE, LENGTHS).layer(0)
        assert layer.scales is not None
        base = raw.data_ptr()
        assert [layer.latent.data_ptr(), layer.scales.data_ptr(), layer.rope.data_ptr()] == [
            base,
            base + 512,
            base + 528,
        ]
        assert layer.latent.stride() == (3 * 16 * 656, 656, 1)
        assert layer.scales.stride() == (3 * 16 * 164, 164, 1)
        assert layer.rope.stride() == (3 * 16 * 328, 328, 1)
        assert layer.scales.shape == (4, 16, 4)
        assert (layer.dtypes, layer.alignment) == ("fp8+bf16_rope", 16)

    def test_amds_format_on_an_nvidia_device(self) -> None:
        if torch.version.hip is not None:
            pytest.skip("needs a torch build for NVIDIA or the CPU")
        with FakeTensorMode():
            kv_cache = torch.empty(4, 16, 576, dtype=torch.float8_e4m3fnuz, device="cuda:0")
            scales = torch.empty(4, 16, 5, device="cuda:0")
            table = torch.empty(2, 2, dtype=torch.int32, device="cuda:0")
            lengths = torch.empty(2, dtype=torch.int32, device="cuda:0")
            with pytest.raises(TypeError, match="float8_e4m3fnuz is AMD's format"):
                PagedKVCacheCollection.from_pages(kv_cache, table, lengths, scales=scales)


class TestAllocate:
    def test_shape_and_batches(self) -> None:
        cache = PagedKVCacheCollection.allocate(4, 16, 3, dtype=torch.float16)
        assert (cache.num_layers, cache.page_size, cache.num_pages, cache.batch_size) == (3, 16, 4, 0)
        batch = cache.with_batch(LENGTHS, TABLE)
        assert batch.batch_size == 2
        batch.layer(1).latent[3, 4] = 1
        assert (cache.layer(1).latent[3, 4] == 1).all()
        assert not cache.layer(0).latent.any()

    @pytest.mark.parametrize("granularity", [64, 128, 576])
    def test_quantised(self, granularity: int) -> None:
        cache = PagedKVCacheCollection.allocate(
            4, 16, 3, dtype=torch.float8_e4m3fn, quantization_granularity=granularity,
            cache_lengths=LENGTHS, lookup_table=TABLE,
        )  # fmt: skip
        layer = cache.layer(2)
        assert layer.scales is not None
        assert layer.scales.shape == (4, 16, -(-576 // granularity))
        assert layer.dtypes == "fp8"

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"num_pages": 0}, ["num_pages", "0"]),
            ({"page_size": 0}, ["page_size", "0"]),
            ({"num_layers": -1}, ["num_layers", "-1"]),
            ({"quantization_granularity": 64}, ["quantization_granularity", "fp8"]),
            ({"dtype": torch.float8_e4m3fn, "quantization_granularity": 32}, ["quantization_granularity", "32"]),
            ({"cache_lengths": LENGTHS}, ["lookup_table"]),
        ],
    )
    def test_refusals(self, change: dict[str, Any], words: list[str]) -> None:
        with pytest.raises(mla.ArgumentError) as caught:
            PagedKVCacheCollection.allocate(**{"num_pages": 4, "page_size": 16, **change})
        assert all(word in str(caught.value) for word in words), str(caught.value)


class TestCheckIndices:
    def test_good_tables(self) -> None:
        PagedKVCacheCollection.from_pages(pages(4, 16, 576), TABLE, LENGTHS).layer(0).check_indices(
            torch.tensor([0, 12, 23])
        )

    @pytest.mark.parametrize(
        ("offsets", "error", "words"),
        [
            ([0, 13, 13], mla.ShapeError, ["page table too narrow", "33"]),
            ([0, 0, 12], mla.ArgumentError, ["page ids", "-1"]),
            ([0, 5, 3], mla.ArgumentError, ["input_row_offsets", "never fall"]),
        ],
    )
    def test_bad_tables(self, offsets: list[int], error: type[Exception], words: list[str]) -> None:
        layer = PagedKVCacheCollection.from_pages(pages(4, 16, 576), TABLE, LENGTHS).layer(0)
        with pytest.raises(error) as caught:
            layer.check_indices(torch.tensor(offsets))
        assert all(word in str(caught.value) for word in words), str(caught.value)

    def test_tables_that_changed_after_they_were_checked(self) -> None:
        table = TABLE.clone()
        layer = PagedKVCacheCollection.from_pages(pages(4, 16, 576), table, LENGTHS).layer(0)
        table[0, 1] = 4
        with pytest.raises(mla.ArgumentError, match="page ids"):
            layer.check_indices(torch.tensor([0, 0, 0]))


def test_a_wide_page_id_does_not_wrap_round_to_another_page() -> None:
    pages = torch.zeros(4, 4, 576)
    cache = PagedKVCacheCollection.from_pages(pages, torch.tensor([[0, 2**32 + 1]]), torch.tensor([4]))
    with pytest.raises(mla.ArgumentError, match=r"page ids must be in \[0, 4\)"):
        cache.store(0, torch.tensor([0, 3]), torch.zeros(3, 512), torch.zeros(3, 64), target="cpu")


@pytest.mark.parametrize(
    ("bounds", "error", "words"),
    [
        ({"max_seq_length": -1}, mla.ArgumentError, "max_seq_length must not be negative, got -1"),
        ({"max_cache_length": "9"}, mla.DTypeError, "max_cache_length must be an int, got str"),
        ({"max_cache_length": 3}, mla.ArgumentError, "max_cache_length is 3, but cache_lengths goes up to 7"),
    ],
)
def test_bounds_of_lengths(bounds: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PagedKVCacheCollection.from_pages(torch.zeros(4, 4, 576), torch.tensor([[0, 1]]), torch.tensor([7]), **bounds)
