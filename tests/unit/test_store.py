"""Store: where rows go, quantisation, layouts, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla
from mla.gather import gather_latent
from mla.kv_cache import PagedKVCacheCollection
from tests.support.paged import LAYOUTS, make_paged, offsets_of, slots_of

FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}


@pytest.mark.parametrize(
    ("layout", "csr"), [*((layout, False) for layout in LAYOUTS), ("pages", True), ("layers", True), ("fused", True)]
)
@pytest.mark.parametrize("seq_lens", [False, True], ids=["cache_lengths", "seq_lens"])
def test_rows_go_behind_the_cached_ones_and_nowhere_else(layout: str, csr: bool, seq_lens: bool, seed: int) -> None:
    cached, new = [0, 70, 3, 15], [5, 0, 61, 1]
    data = make_paged(cached, new, 16, layout=layout, csr=csr, seq_lens=seq_lens, seed=seed)
    layer = data.cache.layer(data.layer_idx)
    before = layer.rope.clone()
    latent, rope = torch.randn(70, 512).bfloat16(), torch.randn(70, 64).bfloat16()
    first = 2  # rows before the first offset belong to nobody
    starts = offsets_of(new, first)
    data.cache.store(data.layer_idx, torch.tensor(starts), latent, rope, target="cpu")
    changed = torch.ones(layer.rope.shape[:2], dtype=torch.bool)
    for s in range(4):
        for i, (page, slot) in enumerate(slots_of(data, s, cached[s], cached[s] + new[s])):
            assert torch.equal(layer.rope[page, slot], rope[starts[s] + i])
            if layout != "fused":
                assert torch.equal(layer.latent[page, slot], latent[starts[s] + i])
            changed[page, slot] = False
    assert torch.equal(layer.rope[changed].view(torch.int16), before[changed].view(torch.int16))


def quantised(granularity: int, dtype: torch.dtype = torch.float8_e4m3fn) -> PagedKVCacheCollection:
    cache = PagedKVCacheCollection.allocate(6, 16, 2, dtype=dtype, quantization_granularity=granularity)
    return cache.with_batch(torch.tensor([0, 14]), torch.tensor([[4, 1], [2, 5]]))


@pytest.mark.parametrize("granularity", [64, 128, 576])
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("rows_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantises_each_block(granularity: int, dtype: torch.dtype, rows_dtype: torch.dtype, seed: int) -> None:
    cache = quantised(granularity, dtype)
    rows = (torch.randn(30, 576) * torch.logspace(-3, 3, 576)).to(rows_dtype)
    cache.store(1, torch.tensor([0, 20, 30]), rows[:, :512], rows[:, 512:], target="cpu")
    layer = cache.layer(1)
    assert layer.scales is not None
    places = [(4, t) for t in range(16)] + [(1, t) for t in range(4)] + [(2, 14), (2, 15)] + [(5, t) for t in range(8)]
    for row, (page, slot) in zip(rows.float(), places, strict=True):
        stored = torch.cat([layer.latent[page, slot], layer.rope[page, slot]]).float()
        for block in range(-(-576 // granularity)):
            columns = slice(block * granularity, min(576, (block + 1) * granularity))
            scale = float(layer.scales[page, slot, block])
            assert scale == pytest.approx(float(row[columns].abs().max()) / FP8[dtype], rel=1e-6)
            # e4m3 has 3 bits of fraction: half a step is 2^-4 of the value, or of the smallest normal number.
            error = (stored[columns] * scale - row[columns]).abs()
            smallest = 2.0**-6 if dtype == torch.float8_e4m3fn else 2.0**-7
            assert (error <= 2.0**-4 * row[columns].abs().clamp(min=smallest * scale) * 1.0001).all()
    assert not cache.layer(0).latent.float().any()


def test_zeros_are_stored_as_zeros() -> None:
    cache = quantised(128)
    cache.store(0, torch.tensor([0, 1, 2]), torch.zeros(2, 512), torch.zeros(2, 64), target="cpu")
    layer = cache.layer(0)
    assert layer.scales is not None
    assert torch.isfinite(layer.scales).all()
    assert (layer.scales[4, 0] > 0).all()
    assert not layer.latent.float().any()


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1.0, 3e38])
def test_extreme_magnitudes_stay_finite(magnitude: float) -> None:
    cache = quantised(576)
    rows = torch.full((2, 576), magnitude)
    cache.store(0, torch.tensor([0, 1, 2]), rows[:, :512], rows[:, 512:], target="cpu")
    output = torch.full((32, 512), float("nan"))
    gather_latent(torch.tensor([0, 16, 32]), torch.tensor([0, 0]), 32, cache, 0, output, target="cpu")
    assert torch.isfinite(output[0]).all()
    assert (output[0] - magnitude).abs().max() <= max(magnitude * 2**-4, 2.0**-126)


def test_values_are_stored_times_scale(seed: int) -> None:
    """Store, then gather in f32: exactly stored * scale."""
    cache = quantised(128)
    rows = torch.randn(30, 576).bfloat16()
    cache.store(1, torch.tensor([0, 20, 30]), rows[:, :512], rows[:, 512:], target="cpu")
    output = torch.empty(32, 512)
    gather_latent(torch.tensor([0, 32, 32]), torch.tensor([0, 0]), 20, cache, 1, output, target="cpu")
    layer = cache.layer(1)
    assert layer.scales is not None
    for t, (page, slot) in enumerate([(4, t) for t in range(16)] + [(1, t) for t in range(4)]):
        expected = layer.latent[page, slot].float() * layer.scales[page, slot, :4].repeat_interleave(128)
        assert torch.equal(output[t], expected)
    assert torch.linalg.norm(output[:20] - rows[:20, :512].float()) <= 5e-2 * torch.linalg.norm(rows[:20, :512].float())


def test_fused_rows_hold_flash_mlas_bytes(seed: int) -> None:
    raw = torch.zeros(3, 4, 656, dtype=torch.uint8)
    cache = PagedKVCacheCollection.from_pages(raw, torch.tensor([[2]]), torch.tensor([1]))
    latent, rope = torch.randn(1, 512).bfloat16(), torch.randn(1, 64).bfloat16()
    cache.store(0, torch.tensor([0, 1]), latent, rope, target="cpu")
    row = raw[2, 1]
    scales = latent.float().view(4, 128).abs().amax(1) / 448
    assert torch.equal(row[512:528].view(torch.float32), scales)
    assert torch.equal(row[528:].view(torch.bfloat16), rope[0])
    expected = (latent.float().view(4, 128) / scales[:, None]).view(512).to(torch.float8_e4m3fn)
    assert torch.equal(row[:512], expected.view(torch.uint8))
    assert not raw[:2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_round_trip_is_exact_without_scales(dtype: torch.dtype, seed: int) -> None:
    cache = PagedKVCacheCollection.allocate(9, 3, 2, dtype=dtype)
    cache = cache.with_batch(torch.tensor([2, 0]), torch.tensor([[8, 1, 3], [0, 7, 2]]))
    rows = torch.randn(12, 640).to(dtype)
    cache.store(1, torch.tensor([0, 7, 12]), rows[:, :512], rows[:, 512:576], target="cpu")
    output = torch.empty(15, 512, dtype=dtype)
    gather_latent(torch.tensor([0, 9, 15]), torch.tensor([0, 0]), 15, cache, 1, output, target="cpu")
    assert torch.equal(output[2:9], rows[:7, :512])
    assert torch.equal(output[9:14], rows[7:, :512])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"latent": torch.zeros(10, 576).bfloat16()}, mla.ShapeError, ["latent", "(*, 512)", "(10, 576)"]),
        ({"rope": torch.zeros(9, 64).bfloat16()}, mla.ShapeError, ["rope", "(10, 64)", "(9, 64)", "latent"]),
        ({"latent": torch.zeros(10, 512)}, mla.DTypeError, ["latent", "bfloat16", "float32"]),
        ({"rope": torch.zeros(10, 64).half()}, mla.DTypeError, ["rope", "bfloat16", "float16"]),
        ({"latent": torch.zeros(512, 10).bfloat16().t()}, mla.ShapeError, ["latent", "contiguous"]),
        ({"latent": torch.zeros(10, 512, device="meta").bfloat16()}, mla.DeviceError, ["latent", "meta"]),
        ({"latent": torch.zeros(10, 512).bfloat16().requires_grad_()}, mla.ArgumentError, ["latent", "gradient"]),
        ({"offsets": torch.tensor([0, 5, 11])}, mla.ShapeError, ["input_row_offsets", "11", "latent", "10"]),
        ({"offsets": torch.tensor([0, 5])}, mla.ShapeError, ["input_row_offsets", "3", "2"]),
        ({"offsets": torch.tensor([5, 0, 10])}, mla.ArgumentError, ["input_row_offsets", "5, 0"]),
        ({"layer_idx": 1}, mla.ArgumentError, ["layer_idx", "1"]),
        ({"target": "triton:sm_90a"}, mla.DeviceError, ["triton", "cpu"]),
    ],
)
def test_refusals_name_what_came(change: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    data = make_paged([40, 3], [5, 5], 16, poison=0.0)
    given: dict[str, Any] = {
        "layer_idx": 0, "offsets": torch.tensor([0, 5, 10]), "target": "cpu",
        "latent": torch.zeros(10, 512).bfloat16(), "rope": torch.zeros(10, 64).bfloat16(), **change,
    }  # fmt: skip
    before = data.cache.layer(0).latent.clone()
    with pytest.raises(error) as caught:
        data.cache.store(given["layer_idx"], given["offsets"], given["latent"], given["rope"], target=given["target"])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert torch.equal(data.cache.layer(0).latent, before)


def test_no_room_for_the_new_tokens() -> None:
    cache = PagedKVCacheCollection.allocate(4, 16).with_batch(torch.tensor([30]), torch.tensor([[1, 2]]))
    with pytest.raises(mla.ShapeError, match="33 tokens in 3 pages of 16, its row holds 2"):
        cache.store(
            0, torch.tensor([0, 3]), torch.zeros(3, 512).bfloat16(), torch.zeros(3, 64).bfloat16(), target="cpu"
        )


def test_a_bf16_rope_beside_fp8_takes_bf16_rows() -> None:
    raw = torch.zeros(3, 4, 656, dtype=torch.uint8)
    cache = PagedKVCacheCollection.from_pages(raw, torch.tensor([[2]]), torch.tensor([1]))
    with pytest.raises(mla.DTypeError, match="latent must be bfloat16"):
        cache.store(0, torch.tensor([0, 1]), torch.zeros(1, 512), torch.zeros(1, 64), target="cpu")


def test_more_new_tokens_than_tokens() -> None:
    cache = PagedKVCacheCollection.allocate(4, 16).with_batch(
        None, torch.tensor([[1, 2]]), seq_lens=torch.tensor([2], dtype=torch.int32)
    )
    with pytest.raises(mla.ArgumentError, match=r"seq_lens less the new tokens must not be negative, got \[-1\]"):
        cache.store(
            0, torch.tensor([0, 3]), torch.zeros(3, 512).bfloat16(), torch.zeros(3, 64).bfloat16(), target="cpu"
        )
