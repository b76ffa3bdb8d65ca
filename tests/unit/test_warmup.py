"""warmup: later steps of the same kind prepare nothing."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import mla
from mla import ArgumentError, DeviceError, DTypeError, ShapeError, dispatch, masks
from mla.registry_file import Implementation
from tests.support.paged import make_paged

HEADS = 3


def step(dtype: torch.dtype, cache_dtype: torch.dtype, mask: mla.Mask, **more: Any) -> None:
    """Make a step of other lengths than those of a warm-up."""
    data = make_paged([70, 0, 13], [5, 64, 1], 16, dtype=cache_dtype, granularity=64, layout="layers")
    q, weight = torch.randn(70, HEADS, 192).to(dtype), torch.randn(HEADS * 256, 512).to(dtype)
    data.cache.store(data.layer_idx, data.input_row_offsets, q[:, 0, :128].repeat(1, 4), q[:, 1, :64], target="cpu")
    for size in (32, 1000):
        for return_lse in (False, True):
            mla.chunked_prefill(
                q, data.cache, data.layer_idx, weight, data.input_row_offsets, mask, 0.07, buffer_token_size=size,
                return_lse=return_lse, target="cpu", **more,
            )  # fmt: skip
    part, lse = torch.zeros(70, HEADS, 128, dtype=dtype), torch.zeros(70, HEADS)
    mla.merge_attn_states(part, part, lse, part, lse, lse, target="cpu")


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "mask", "sinks", "attention_dtype"),
    [
        (torch.bfloat16, torch.bfloat16, masks.CausalMask(), False, None),
        (torch.float16, torch.float8_e4m3fn, masks.CausalPaddingMask(torch.tensor([70, 60, 9])), True, None),
        (torch.bfloat16, torch.bfloat16, masks.CausalMask(), False, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e4m3fn, masks.CausalMask(), True, torch.float8_e4m3fn),
    ],
)
def test_a_later_step_prepares_nothing(
    dtype: Any, cache_dtype: Any, mask: mla.Mask, sinks: bool, attention_dtype: Any
) -> None:
    more: dict[str, Any] = {"sinks": torch.zeros(HEADS)} if sinks else {}
    more["attention_dtype"] = attention_dtype
    dispatch.forget()
    with mock.patch.object(Implementation, "load", autospec=True, side_effect=Implementation.load) as loads:
        mla.warmup(
            HEADS, dtype=dtype, cache_dtype=cache_dtype, quantization_granularity=64, page_size=16, masks=[mask],
            sinks=sinks, attention_dtype=attention_dtype, target="cpu",
        )  # fmt: skip
        assert loads.call_count
        with mock.patch.object(dispatch, "chosen", side_effect=AssertionError("something was not warm")):
            step(dtype, cache_dtype, mask, **more)


def test_what_was_not_asked_for_is_not_warm() -> None:
    dispatch.forget()
    mla.warmup(HEADS, page_size=16, target="cpu")
    with mock.patch.object(dispatch, "chosen", side_effect=AssertionError("something was not warm")):
        step(torch.bfloat16, torch.bfloat16, masks.CausalMask())
        with pytest.raises(AssertionError):
            step(torch.bfloat16, torch.bfloat16, masks.NullMask())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q_depth": 191}, ShapeError, "q_depth must be one of 192, 256"),
        ({"num_heads": 0}, ArgumentError, "num_heads must be at least 1"),
        ({"masks": ["causal"]}, DTypeError, "CausalMask"),
        ({"page_size": 0}, ArgumentError, "page_size must be at least 1"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        mla.warmup(**{"num_heads": 2, "target": "cpu", **change})


def test_a_target_without_a_device() -> None:
    with mock.patch("torch.cuda.is_available", return_value=False), pytest.raises(DeviceError, match="no device"):
        mla.warmup(2, target="cuda")
