"""The validation helpers: what they return, and that they name what came."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mla
from mla._check import (
    alignment,
    as_index,
    as_page_ids,
    check_offsets,
    require_last_dim_contiguous,
    require_no_grad,
    require_shape,
    short_dtype,
)
from mla._launch import stream_scope

CPU = torch.device("cpu")


class TestAsIndex:
    def test_canonical_tensor_is_returned_itself(self) -> None:
        tensor = torch.arange(4, dtype=torch.int32)
        assert as_index(tensor, "x", 4, CPU) is tensor

    @pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64], ids=str)
    def test_every_dtype_and_stride(self, dtype: torch.dtype) -> None:
        result = as_index(torch.tensor([0, 9, 5, 9, 7, 9]).to(dtype)[::2], "x", 3, CPU)
        assert result.dtype == torch.int32
        assert result.is_contiguous()
        assert result.tolist() == [0, 5, 7]

    def test_uint32_shares_memory(self) -> None:
        tensor = torch.tensor([1, 2], dtype=torch.uint32)
        assert as_index(tensor, "x", 2, CPU).data_ptr() == tensor.data_ptr()

    @pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
    def test_no_value_is_wrapped(self, value: int) -> None:
        with pytest.raises(mla.ArgumentError, match=f"x holds a value that int32 does not.*{value}"):
            as_index(torch.tensor([value]), "x", 1, CPU)
        if value > 0:
            with pytest.raises(mla.ArgumentError, match="x holds a value"):
                as_index(torch.tensor([value]).to(torch.uint32), "x", 1, CPU)

    @pytest.mark.parametrize("capturing", [False, True])
    def test_cpu_tensor_for_a_gpu(self, capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        with FakeTensorMode():
            tensor = torch.zeros(3, dtype=torch.int32)
            if capturing:
                with pytest.raises(mla.DeviceError, match="x is on the CPU and a graph is being captured"):
                    as_index(tensor, "x", 3, torch.device("cuda:0"))
            else:
                assert as_index(tensor, "x", 3, torch.device("cuda:0")).device == torch.device("cuda:0")

    def test_another_device(self) -> None:
        with pytest.raises(mla.DeviceError, match="x is on meta"):
            as_index(torch.zeros(3, dtype=torch.int32, device="meta"), "x", 3, CPU)


def test_page_ids_keep_their_row_stride() -> None:
    table = torch.arange(12, dtype=torch.int32).view(2, 6)[:, :4]
    result = as_page_ids(table, "table", CPU)
    assert result.stride() == (6, 1)
    assert result.data_ptr() == table.data_ptr()
    assert as_page_ids(table.t(), "table", CPU).stride(-1) == 1


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(64, dtype=torch.uint8), 16),
        (torch.zeros(4, 64, dtype=torch.uint8)[1:], 16),
        (torch.zeros(64, dtype=torch.uint8)[1:], 1),
        (torch.zeros(64, dtype=torch.bfloat16)[1:], 2),
        (torch.zeros(64, dtype=torch.bfloat16)[4:], 8),
        (torch.zeros(3, 60, dtype=torch.bfloat16), 8),
        (torch.zeros(1, 61, dtype=torch.bfloat16), 16),
        (torch.zeros(3, 61, dtype=torch.float32), 4),
        (None, 16),
    ],
)
def test_alignment(tensor: torch.Tensor | None, expected: int) -> None:
    assert alignment(tensor) == expected
    assert alignment(torch.zeros(64), tensor) == expected


def test_alignment_of_a_meta_tensor_follows_its_strides() -> None:
    assert alignment(torch.zeros(3, 5, dtype=torch.bfloat16, device="meta")) == 2


@pytest.mark.parametrize(
    ("offsets", "rows", "error", "words"),
    [
        ([0, 3, 2], None, mla.ArgumentError, ["x", "never fall", "[0, 3, 2]"]),
        ([-1, 3], None, mla.ArgumentError, ["x", "non-negative"]),
        ([0, 3, 9], 8, mla.ShapeError, ["x", "9", "q", "8"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets(
    offsets: list[int], rows: int | None, error: type[Exception], words: list[str], dtype: torch.dtype
) -> None:
    with pytest.raises(error) as caught:
        check_offsets(torch.tensor(offsets, dtype=dtype), "x", rows, "q")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64], ids=str)
def test_good_offsets(dtype: torch.dtype) -> None:
    check_offsets(torch.tensor([2, 2, 8]).to(dtype), "x", 8, "q")
    check_offsets(torch.tensor([0, 3, 2], dtype=torch.int32, device="meta"), "x")  # left unread


def test_short_names() -> None:
    named = {short_dtype(d) for d in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)}
    assert named == {"bf16", "fp16", "fp32", "fp8"}
    assert short_dtype(torch.float8_e4m3fnuz) == "fp8_fnuz"
    with pytest.raises(mla.DTypeError, match=r"float64 is not supported; allowed: bfloat16"):
        short_dtype(torch.float64)


def test_shape_says_both_sizes() -> None:
    with pytest.raises(mla.ShapeError, match=r"k must have shape \(\*, 4, 128\), got \(7, 3, 128\); q has shape"):
        require_shape(torch.zeros(7, 3, 128), "k", (None, 4, 128), "q has shape (5, 4, 192)")
    require_shape(torch.zeros(7, 4, 128), "k", (None, 4, 128))


def test_last_dim() -> None:
    require_last_dim_contiguous(torch.zeros(4, 6)[:, :3], "x")
    require_last_dim_contiguous(torch.zeros(4, 1).t().contiguous().t(), "x")
    with pytest.raises(mla.ShapeError, match=r"x must be contiguous in its last dimension, got strides \(6, 2\)"):
        require_last_dim_contiguous(torch.zeros(4, 6)[:, ::2], "x")


def test_gradients_are_refused_in_grad_mode_alone() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    with pytest.raises(mla.ArgumentError, match="q requires a gradient"):
        require_no_grad(k=None, q=tensor)
    with torch.no_grad():
        require_no_grad(q=tensor)
    with torch.inference_mode():
        require_no_grad(q=tensor)


def test_the_cpu_has_no_streams() -> None:
    with stream_scope(CPU, None):
        pass
    with pytest.raises(mla.ArgumentError, match="stream 7 was given"):
        stream_scope(CPU, 7)


@pytest.mark.parametrize("stream", ["7", True, 7.0])
def test_what_is_no_stream_is_refused(stream: object) -> None:
    with pytest.raises(mla.DTypeError, match=f"stream must be a .* got {type(stream).__name__}"):
        stream_scope(torch.device("cuda", 0), stream)  # type: ignore[arg-type]
