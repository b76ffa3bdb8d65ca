"""What torch is set to when a call is made: default dtype and device, grad mode, inference mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mla
from tests.support.paged import PagedData, make_paged

HEADS, SCALE, LENGTHS = 3, 192**-0.5, ([40, 0, 3], [9, 20, 1])


def step(dtype: torch.dtype = torch.float32) -> tuple[PagedData, torch.Tensor, torch.Tensor]:
    """Return a paged batch, q and kv_b_proj."""
    data = make_paged(*LENGTHS, 16, dtype=dtype)
    q = torch.randn(sum(data.new), HEADS, 192)
    return data, q, torch.randn(HEADS * 256, 512) / 512**0.5


def attend(data: PagedData, q: torch.Tensor, weight: Any, **keywords: Any) -> Any:
    keywords = {"buffer_token_size": 32, "mask": mla.CausalMask(), **keywords}
    mask = keywords.pop("mask")
    return mla.chunked_prefill(
        q, data.cache, data.layer_idx, weight, data.input_row_offsets, mask, SCALE, target="cpu", **keywords
    )


def store(data: PagedData, q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    data.cache.store(data.layer_idx, data.input_row_offsets, weight[: q.shape[0]], q[:, 0, :64], target="cpu")
    return data.cache.layer(data.layer_idx).latent.nan_to_num()


def allocate(data: PagedData, q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    cache = mla.PagedKVCacheCollection.allocate(2, 4, dtype=torch.float8_e4m3fn, device="cpu").layer(0)
    assert cache.scales is not None
    return cache.scales


def merge(data: PagedData, q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    part, lse = q[..., :128].contiguous(), q[..., 130].contiguous()
    merged = torch.empty_like(part)
    mla.merge_attn_states(merged, part, lse, part.flip(0), lse.flip(0), lse, target="cpu")
    return merged


def quantize(data: PagedData, q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    made = mla.quantize_for_prefill(q, q[..., :128], q[..., 64:], q[:, :1, :64], target="cpu")
    return torch.cat([tensor.float().flatten() for tensor in made if tensor is not None])


def biased(data: PagedData, q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    starts = data.input_row_offsets[1:]
    mask = mla.Mask.from_function(lambda b, h, q, k: ((q + h) // (k % 3) >= 0) | (k < starts[b]))
    bias = q.new_zeros(3, 1, 20, 49)
    return attend(data, q, weight, mask=mask & mla.MaterializedMask(bias))


JOBS: dict[str, Callable[..., torch.Tensor]] = {
    "host lengths": attend,
    "max_chunks": lambda *args: attend(*args, max_chunks=8),
    "seq_lens_cpu": lambda *args: attend(*args, seq_lens_cpu=[49, 20, 4]),
    "mask": biased,
    "store": store,
    "allocate": allocate,
    "merge": merge,
    "quantize": quantize,
}


@contextmanager
def torch_defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")]
)
def test_default_dtype_and_device_change_nothing(job: Any, dtype: torch.dtype, device: str) -> None:
    operands = step()
    expected = job(*operands).clone()
    with torch_defaults(dtype, device):
        result = job(*operands)
    assert torch.equal(result, expected) and result.dtype == expected.dtype


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_inference_tensors_outside_of_inference_mode(job: Any) -> None:
    with torch.inference_mode():
        operands = step()
        expected = job(*operands).clone()
    assert torch.equal(job(*operands), expected)


class TestGradients:
    """There is no backward pass: whatever asks for one is refused, by its name, in grad mode alone."""

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("weight", lambda q: {"weight": torch.zeros(HEADS * 256, 512, requires_grad=True)}),
            ("the result of weight", lambda q: {"weight": torch.nn.Linear(512, HEADS * 256, bias=False)}),
            ("output", lambda q: {"output": torch.zeros(q.shape[0], HEADS, 128, requires_grad=True)}),
            ("sinks", lambda q: {"sinks": torch.zeros(HEADS, requires_grad=True)}),
            (
                "bias",
                lambda q: {"mask": mla.MaterializedMask(torch.zeros(3, 20, 49, requires_grad=True))},
            ),
        ],
    )
    def test_operand_of_a_job(self, name: str, change: Any) -> None:
        data, q, weight = step()
        changed = change(q)
        weight = changed.pop("weight", weight)
        with pytest.raises(mla.ArgumentError, match=f"^{name} requires a gradient"):
            attend(data, q, weight, buffer_token_size=1024, **changed)
        with torch.no_grad():
            attend(data, q, weight, buffer_token_size=1024, **changed)

    def test_pages(self) -> None:
        _, q, weight = step()
        pages = torch.zeros(8, 16, 576, requires_grad=True)
        table = torch.arange(8, dtype=torch.int32).view(1, 8)
        cache = mla.PagedKVCacheCollection.from_pages(pages, table, torch.tensor([3], dtype=torch.int32))
        offsets = torch.tensor([0, 2], dtype=torch.int32)
        with pytest.raises(mla.ArgumentError, match=r"^kv_collection requires a gradient"):
            cache.store(0, offsets, torch.zeros(2, 512), torch.zeros(2, 64), target="cpu")
        with pytest.raises(mla.ArgumentError, match="requires a gradient"):
            mla.chunked_prefill(q[:2], cache, 0, weight, offsets, mla.CausalMask(), SCALE, target="cpu")

    def test_lse_of_a_merge(self) -> None:
        part, lse = torch.zeros(4, HEADS, 128), torch.zeros(4, HEADS)
        with pytest.raises(mla.ArgumentError, match=r"^suffix_lse requires a gradient"):
            mla.merge_attn_states(part, part, lse, part, lse.clone().requires_grad_(), target="cpu")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_without_memory_is_refused_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla._launch._numbers", {})
    x = torch.randn(5, HEADS, 128)
    with FakeTensorMode() as mode, pytest.raises(mla.ArgumentError, match=r"FakeTensor of shape \(5, 3, 128\) has no"):
        mla.quantize.quantize_per_head(mode.from_tensor(x), target="cpu")
    _, scale = mla.quantize.quantize_per_head(x, target="cpu")
    assert torch.equal(scale, x.abs().amax((0, 2)) / 448)
