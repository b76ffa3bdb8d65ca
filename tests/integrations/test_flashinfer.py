"""FlashInfer's names, held against the library's own functions."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

import mla
from mla.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from mla.integrations.flashinfer import BatchPrefillWithRaggedKVCacheWrapper

HEADS, SCALE = 3, 192**-0.5
QO, KV = torch.tensor([0, 20, 20, 33], dtype=torch.int32), torch.tensor([0, 50, 55, 68], dtype=torch.int32)

DEVICES = [pytest.param("cpu", torch.float32, id="cpu"), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda)]


def operands(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = int(KV[-1])
    k = torch.cat((torch.randn(rows, HEADS, 128), torch.randn(rows, 1, 64).expand(-1, HEADS, -1)), -1)
    q, v = torch.randn(int(QO[-1]), HEADS, 192), torch.randn(rows, HEADS, 128)
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def wrapper(device: str, **keywords: Any) -> BatchPrefillWithRaggedKVCacheWrapper:
    return BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(8 << 20, dtype=torch.uint8, device=device), "NHD", **keywords
    )


def planned(device: str, dtype: torch.dtype, **changes: Any) -> BatchPrefillWithRaggedKVCacheWrapper:
    made = wrapper(device)
    made.plan(QO, KV, HEADS, HEADS, 192, 128, **({"causal": True, "q_data_type": dtype} | changes))
    return made


def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: mla.Mask, **keywords: Any) -> Any:
    target = "cpu" if q.device.type == "cpu" else "gpu"
    return mla.prefill(q, k[..., :128], v, k[:, :1, 128:], mask, QO, KV, SCALE, target=target, **keywords)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(
    ("plan", "mask"),
    [
        ({}, mla.CausalMask()),
        ({"causal": False}, mla.NullMask()),
        ({"window_left": 7}, mla.SlidingWindowCausalMask(8)),
        ({"window_left": 7, "causal": False}, mla.SlidingWindowNonCausalMask(8)),
    ],
    ids=["causal", "all", "window", "window, not causal"],
)
def test_output_and_lse(device: str, dtype: torch.dtype, plan: dict[str, Any], mask: mla.Mask) -> None:
    q, k, v = operands(device, dtype)
    made = planned(device, dtype, **plan)
    expected, natural = own(q, k, v, mask, return_lse=True)
    assert torch.equal(made.run(q, k, v), expected)
    output, lse = made.run(q, k, v, return_lse=True)
    assert torch.equal(output, expected)
    torch.testing.assert_close(lse, natural / math.log(2))
    _, lse = made.run_return_lse(q, k, v, lse_base="ln", lse_layout="HN")
    assert torch.equal(lse, natural.T)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_given_tensors_scale_and_softcap(device: str, dtype: torch.dtype) -> None:
    q, k, v = operands(device, dtype)
    made = planned(device, dtype, sm_scale=0.3, logits_soft_cap=5.0, o_data_type="float32", max_token_per_sequence=20)
    out = torch.empty(q.shape[0], HEADS, 128, device=device)
    lse = torch.empty(q.shape[0], HEADS, device=device)
    result = made.run(q, k, v, out=out, lse=lse, return_lse=True, enable_pdl=True)
    assert result[0] is out
    assert result[1] is lse
    target = "cpu" if device == "cpu" else "gpu"
    expected, natural = mla.prefill(
        q, k[..., :128], v, k[:, :1, 128:], mla.CausalMask(), QO, KV, 0.3, softcap=5.0,
        output=torch.empty_like(out), return_lse=True, target=target,
    )  # fmt: skip
    assert torch.equal(out, expected)
    torch.testing.assert_close(lse, natural / math.log(2))


def test_an_empty_row_stays_empty_in_base_two() -> None:
    q, k, v = operands("cpu", torch.float32)
    made = wrapper("cpu")
    made.plan(QO, torch.tensor([0, 5, 5, 68]), HEADS, HEADS, 192, 128, causal=True, q_data_type="float32")
    output, lse = made.run(q, k, v, return_lse=True)
    assert (output[:15] == 0).all()  # 20 queries of 5 keys
    assert (lse[:15] == -math.inf).all()
    assert lse[15:].isfinite().all()


def test_fixed_buffers_are_what_a_run_reads() -> None:
    q, k, v = operands("cpu", torch.float32)
    buffers = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
    made = wrapper("cpu", use_cuda_graph=True, qo_indptr_buf=buffers[0], kv_indptr_buf=buffers[1])
    made.plan(QO.long(), KV.long(), HEADS, HEADS, 192, 128, causal=True, q_data_type=torch.float32)
    assert torch.equal(torch.stack(buffers), torch.stack([QO, KV]))
    assert torch.equal(made.run(q, k, v), own(q, k, v, mla.CausalMask()))
    with pytest.raises(ShapeError, match="qo_indptr must have length 4"):
        made.plan(QO[:-1], KV[:-1], HEADS, HEADS, 192, 128, q_data_type=torch.float32)
    with pytest.raises(ArgumentError, match="only then"):
        wrapper("cpu", use_cuda_graph=True)


def test_argument_names_are_flashinfers() -> None:
    """In the order of FlashInfer 0.7.4; what comes after is taken by name."""
    names = [
        "self", "qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "custom_mask",
        "packed_custom_mask", "causal", "pos_encoding_mode", "use_fp16_qk_reduction", "window_left", "logits_soft_cap",
        "sm_scale", "rope_scale", "rope_theta", "q_data_type", "kv_data_type", "o_data_type", "non_blocking",
    ]  # fmt: skip
    parameters = list(inspect.signature(BatchPrefillWithRaggedKVCacheWrapper.plan).parameters)
    assert parameters[: len(names)] == names
    planned(
        "cpu", torch.float32, use_fp16_qk_reduction=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None, disable_split_kv=True,
        seq_lens=KV.diff(), seq_lens_q=QO.diff(), max_sequence_kv=50, v_indptr=None, o_indptr=None,
        qo_indptr_cpu=QO, kv_indptr_cpu=KV,
        uniform_q_len=None, use_token_head_sf=False,
    )  # fmt: skip


def test_refused() -> None:
    q, k, v = operands("cpu", torch.float32)
    with pytest.raises(ArgumentError, match="plan must be called before run"):
        wrapper("cpu").run(q, k, v)
    with pytest.raises(UnsupportedError, match="kv_layout must be 'NHD'"):
        BatchPrefillWithRaggedKVCacheWrapper(torch.empty(8, dtype=torch.uint8), "HND")
    for changes, error, match in (
        ({"custom_mask": torch.ones(4)}, UnsupportedError, "custom_mask is not served"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, UnsupportedError, "pos_encoding_mode"),
        ({"use_token_head_sf": True}, UnsupportedError, "use_token_head_sf"),
        ({"casual": True}, ArgumentError, "casual is no argument"),
        ({"q_data_type": "float8_e4m3fn"}, DTypeError, "float8_e4m3fn"),
        ({"kv_data_type": "bfloat16"}, DTypeError, "kv_data_type"),
    ):
        with pytest.raises(error, match=match):
            planned("cpu", torch.float32, **changes)
    with pytest.raises(ShapeError, match=r"one of \(192, 128\), \(256, 256\)"):
        wrapper("cpu").plan(QO, KV, HEADS, 1, 192, 128)
    made = planned("cpu", torch.float32)
    with pytest.raises(UnsupportedError, match="q_scale"):
        made.run(q, k, v, q_scale=0.5)
    with pytest.raises(ShapeError, match=r"k was planned as \(\*, 3, 192\)"):
        made.run(q, k[:, :1], v)
    with pytest.raises(ArgumentError, match="lse_base"):
        made.run(q, k, v, lse_base="e")
