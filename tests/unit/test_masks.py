"""Masks as a caller meets them: meaning, combination, programs, captured tensors, errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla.errors import ArgumentError, DeviceError, DTypeError, MlaError, ShapeError
from mla.masks import (
    CausalMask,
    CausalPaddingMask,
    ChunkedCausalMask,
    ChunkedMask,
    Mask,
    MaterializedMask,
    NullMask,
    SlidingWindowCausalMask,
    SlidingWindowNonCausalMask,
    as_mask,
    maximum,
    minimum,
    where,
)

CPU = torch.device("cpu")
Q, K = torch.arange(-20, 20)[:, None], torch.arange(-20, 20)[None, :]
LENGTHS = torch.tensor([3, 9])


@pytest.mark.parametrize(
    ("mask", "meaning"),
    [
        (NullMask(), lambda q, k: True),
        (CausalMask(), lambda q, k: k <= q),
        (ChunkedMask(6), lambda q, k: q // 6 == k // 6),
        (ChunkedCausalMask(6), lambda q, k: k <= q and q // 6 == k // 6),
        (SlidingWindowCausalMask(4), lambda q, k: q - 4 < k <= q),
        (SlidingWindowNonCausalMask(4), lambda q, k: k > q - 4),
        (CausalPaddingMask(LENGTHS), lambda q, k: k <= q and k < 9),
        (CausalMask() & ChunkedMask(6), lambda q, k: k <= q and q // 6 == k // 6),
        (CausalMask() | ChunkedMask(6), lambda q, k: k <= q or q // 6 == k // 6),
        (Mask.from_function(lambda b, h, q, k: ~((k <= q) ^ (k < LENGTHS[b]))), lambda q, k: (k <= q) == (k < 9)),
        (Mask.from_function(lambda b, h, q, k: abs(q - k) <= maximum(minimum(q, 3), h)),
         lambda q, k: abs(q - k) <= max(min(q, 3), 2)),
        (Mask.from_function(lambda b, h, q, k: where(q < 0, -k, k % 7) > 2), lambda q, k: (-k if q < 0 else k % 7) > 2),
    ],
    ids=lambda value: str(value) if isinstance(value, Mask) else "",
)  # fmt: skip
def test_meaning(mask: Mask, meaning: Callable[[int, int], bool]) -> None:
    expected = torch.tensor([[meaning(int(q), int(k)) for k in K[0]] for q in Q[:, 0]])
    assert torch.equal(mask.visible(1, 2, Q, K), expected)


def test_visible_broadcasts_over_sequences_and_heads() -> None:
    visible = CausalPaddingMask(LENGTHS).visible(torch.arange(2).view(2, 1, 1, 1), torch.arange(5).view(5, 1, 1), Q, K)
    assert visible.shape == (2, 5, 40, 40)
    assert torch.equal(visible[0, 4], (K <= Q) & (K < 3))


def test_programs_are_equal_when_the_code_is() -> None:
    first, second = CausalPaddingMask(LENGTHS), CausalPaddingMask(LENGTHS + 1)
    assert first.program == second.program
    assert hash(first.program) == hash(second.program)
    assert first.program.captures == ("b",)
    assert ChunkedMask(4).program != ChunkedMask(5).program
    assert ChunkedMask(4).program.key != ChunkedMask(5).program.key
    assert Mask.from_function(lambda b, h, q, k: k <= q).program.key == CausalMask().program.key
    assert MaterializedMask(torch.zeros(1, 2, 2)).program != MaterializedMask(torch.zeros(1, 2, 2).half()).program
    by_b, by_h = (Mask.from_function(f) for f in (lambda b, h, q, k: k < LENGTHS[b], lambda b, h, q, k: k < LENGTHS[h]))
    assert by_b.program != by_h.program
    assert by_b.program.key != by_h.program.key


def test_programs_survive_pickling_and_copying() -> None:
    program = SlidingWindowCausalMask(7).program
    assert pickle.loads(pickle.dumps(program)) == program
    assert copy.deepcopy(program) == program


def test_what_a_program_says() -> None:
    assert NullMask().program.always
    assert not CausalMask().program.always
    assert not MaterializedMask(torch.zeros(1, 2, 2)).program.always
    assert (NullMask() | CausalMask()).program.always
    assert CausalMask().program.name == "CausalMask"
    assert str((CausalMask() & ChunkedMask(3)).program) == "(CausalMask & ChunkedMask)"
    assert (CausalMask() & MaterializedMask(torch.zeros(1, 2, 2).bfloat16())).program.biases == ("bf16",)


def test_a_tensor_captured_twice_takes_one_slot_and_unused_ones_none() -> None:
    twice = CausalPaddingMask(LENGTHS) & Mask.from_function(lambda b, h, q, k: q - k < LENGTHS[b])
    assert twice.program.captures == ("b",)
    both = Mask.from_function(lambda b, h, q, k: (k < LENGTHS[b]) & (q < LENGTHS[h]))
    assert both.program.captures == ("b", "h")
    folded = Mask.from_function(lambda b, h, q, k: (k < 5) | (LENGTHS[b] * 0 == 0))
    assert folded.program.captures == ()


def test_captured_tensors_are_int32_and_contiguous() -> None:
    for source in (LENGTHS, LENGTHS.int(), LENGTHS.to(torch.uint32), torch.tensor([[3, 0], [9, 0]])[:, 0]):
        (capture,) = CausalPaddingMask(source).captures_on(CPU)
        assert capture.dtype == torch.int32
        assert capture.is_contiguous()
        assert capture.tolist() == [3, 9]


def test_an_int32_tensor_is_read_where_it_lies() -> None:
    lengths = LENGTHS.int()
    mask = CausalPaddingMask(lengths)
    lengths[0] = 17
    assert mask.visible(0, 0, torch.tensor(30), torch.tensor(16))


def test_captured_tensors_move_from_the_cpu_once_and_from_a_gpu_never() -> None:
    meta = torch.device("meta")
    mask = CausalPaddingMask(LENGTHS)
    assert mask.captures_on(meta)[0].device == meta
    assert mask.captures_on(meta)[0] is mask.captures_on(meta)[0]
    with pytest.raises(DeviceError, match="on meta, the call is on cpu"):
        CausalPaddingMask(torch.zeros(2, dtype=torch.int32, device=meta)).captures_on(CPU)


def test_bias_reads_rows_of_the_call_and_hides_outside() -> None:
    full = torch.randn(2, 3, 4, 5)
    mask = MaterializedMask(full) & MaterializedMask(full[:, 0].bfloat16())
    rows, cols = torch.arange(-2, 7)[:, None], torch.arange(-2, 7)
    inside = (rows >= 0) & (rows < 4) & (cols >= 0) & (cols < 5)
    bias = mask.bias(1, 2, rows, cols)
    assert bias.dtype == torch.float32
    assert torch.equal(bias == -torch.inf, ~inside)
    assert torch.equal(bias[2:6, 2:7], full[1, 2] + full[1, 0].bfloat16().float())


def test_check_names_what_disagrees() -> None:
    CausalPaddingMask(LENGTHS).check(2, 7, CPU)
    with pytest.raises(ShapeError, match="indexed by b has 2 elements; the call has 3 sequences"):
        CausalPaddingMask(LENGTHS).check(3, 7, CPU)
    with pytest.raises(ShapeError, match="indexed by h has 2 elements; the call has 7 heads"):
        Mask.from_function(lambda b, h, q, k: k < LENGTHS[h]).check(2, 7, CPU)
    with pytest.raises(ShapeError, match=r"\[2, 3, 4, 5\].*\[2, 1 or 16, Sq, Sk\]"):
        MaterializedMask(torch.zeros(2, 3, 4, 5)).check(2, 16, CPU)
    with pytest.raises(DeviceError, match="bias of MaterializedMask is on cpu"):
        MaterializedMask(torch.zeros(2, 4, 5)).check(2, 16, torch.device("meta"))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda b, h, q, k: k <= q and k > 3, DTypeError, "use &, |, ~"),
        (lambda b, h, q, k: not k <= q, DTypeError, "use &, |, ~"),
        (lambda b, h, q, k: True if k <= q else q > 3, DTypeError, "where"),
        (lambda b, h, q, k: 0 <= k <= q, DTypeError, "&"),
        (lambda b, h, q, k: max(q, k) < 3, DTypeError, "minimum and maximum"),
        (lambda b, h, q, k: k <= q & k < 3, DTypeError, "parentheses"),
        (lambda b, h, q, k: q - k, DTypeError, "must return a condition"),
        (lambda b, h, q, k: None, DTypeError, "must return a condition"),
        (lambda b, h, q, k: q / 2 < k, DTypeError, "use // instead of /"),
        (lambda b, h, q, k: q < 2.5, DTypeError, "computes with integers, got float 2.5"),
        (lambda b, h, q, k: (q < 2) + 1 < k, TypeError, "unsupported operand"),
        (lambda b, h, q, k: q + (q < k) < 3, DTypeError, r"where\(condition, 1, 0\)"),
        (lambda b, h, q, k: k < LENGTHS, DTypeError, r"as in lengths\[b\]"),
        (lambda b, h, q, k: k < LENGTHS[q], DTypeError, "by b or by h only"),
        (lambda b, h, q, k: k < LENGTHS[b + 1], DTypeError, "by b or by h only"),
        (lambda b, h, q, k: k < [3, 9][b], DTypeError, "only a torch tensor"),
        (lambda b, h, q, k: k < torch.zeros(2)[b], DTypeError, "float32; allowed: int32, int64, uint32"),
        (lambda b, h, q, k: k < torch.zeros(2, 2, dtype=torch.int32)[b], ShapeError, r"\[2, 2\].*\[B\]"),
        (lambda b, h, q, k: k < 2**31, ArgumentError, "2147483648 is outside"),
        (lambda b, h, q, k: sum(torch.tensor([i])[b] for i in range(5)) < k, ArgumentError, "5 captured tensors; .* 4"),
    ],
)
def test_mistakes_in_a_mask_function_are_explained(function: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        Mask.from_function(function)
    assert error is TypeError or isinstance(caught.value, MlaError)


@pytest.mark.parametrize("kind", [ChunkedMask, ChunkedCausalMask, SlidingWindowCausalMask, SlidingWindowNonCausalMask])
def test_window_sizes_are_checked(kind: Any) -> None:
    for value in (0, -1, 2**31):
        with pytest.raises(ArgumentError, match=f"{kind.__name__} takes a size .* got {value}"):
            kind(value)
    for value in (2.0, "2", True, None, torch.tensor(2)):
        with pytest.raises(DTypeError, match=f"{kind.__name__} takes a size"):
            kind(value)


def test_materialized_mask_checks_its_bias() -> None:
    with pytest.raises(DTypeError, match=r"torch.bool; write torch.where"):
        MaterializedMask(torch.ones(1, 2, 2, dtype=torch.bool))
    with pytest.raises(DTypeError, match="got list"):
        MaterializedMask([[0.0]])  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"\[2, 2\]; allowed"):
        MaterializedMask(torch.zeros(2, 2))
    with pytest.raises(ShapeError, match="last dim of bias must be contiguous"):
        MaterializedMask(torch.zeros(1, 3, 4).transpose(1, 2))
    with pytest.raises(ArgumentError, match="3 biases; allowed: at most 2"):
        bias = MaterializedMask(torch.zeros(1, 2, 2))
        bias & bias & bias
    with pytest.raises(DTypeError, match=r"MaterializedMask adds a bias .* cannot be a side of \|"):
        CausalMask() | MaterializedMask(torch.zeros(1, 2, 2))


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("causal", r"got 'causal'; pass mla.CausalMask\(\)"),
        ("CausalMask", r"pass mla.CausalMask\(\)"),
        ("sliding_window_causal", r"pass mla.SlidingWindowCausalMask\(window_size\)"),
        ("full", r"pass mla.NullMask\(\)"),
        (None, r"pass mla.NullMask\(\)"),
        (CausalMask, r"make an object of it: mla.CausalMask\(\)"),
        (torch.zeros(1, 2, 2), r"pass mla.MaterializedMask\(bias\)"),
        (lambda b, h, q, k: k <= q, r"pass mla.Mask.from_function"),
        (3, r"got a int; pass one of .*NullMask\(\), CausalMask\(\)"),
    ],
)
def test_only_mask_objects_are_taken_and_the_message_names_the_right_one(value: object, advice: str) -> None:
    with pytest.raises(DTypeError, match=f"mask_functor must be a mask object, {'.*' + advice}"):
        as_mask(value, "mask_functor")


def test_long_expressions_are_built_and_evaluated_without_recursion() -> None:
    def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
        total = q < 0
        for i in range(80):
            total = total | ((q >= 10 * i) & (k < 10 * i + 5))
        return total

    mask = Mask.from_function(documents)
    assert mask.tile_class(0, 0, 0, 9, 0, 4) == 2
    with pytest.raises(ArgumentError, match="operations; allowed: at most 512"):
        Mask.from_function(lambda b, h, q, k: documents(b, h, q, k) | documents(b, h, q + 1, k))


@pytest.mark.parametrize("lengths", [torch.tensor([2**40]), torch.tensor([2**32 - 1]).to(torch.uint32)])
def test_a_captured_value_that_int32_does_not_hold_is_refused(lengths: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match="indexed by b holds a value that int32 does not"):
        CausalPaddingMask(lengths)


def test_what_cannot_be_called_makes_no_mask() -> None:
    with pytest.raises(DTypeError, match="function must be a callable of \\(b, h, q, k\\), got int"):
        Mask.from_function(5)  # type: ignore[arg-type]
