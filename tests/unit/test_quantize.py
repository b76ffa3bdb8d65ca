"""Quantisers: what they take and refuse, and that their operands are those of a prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mla
from mla import ArgumentError, DTypeError, ShapeError, reference
from mla.replay import Recording
from tests.support.tolerance import assert_lse, assert_output

OFFSETS = torch.tensor([0, 40, 61]), torch.tensor([0, 70, 200])


def operands(heads: int = 3) -> dict[str, torch.Tensor]:
    up = torch.randn(200, heads, 256).bfloat16()
    return {
        "q": torch.randn(61, heads, 192).bfloat16(),
        "k": up[..., :128],
        "v": up[..., 128:],
        "rope": torch.randn(200, 1, 64).bfloat16(),
    }


@pytest.mark.parametrize("v_scale", ["head", "tensor", "token"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_one_call_makes_the_operands_of_a_prefill(v_scale: Any, dtype: torch.dtype) -> None:
    given = operands()
    made = mla.quantize_for_prefill(**given, v_scale=v_scale, dtype=dtype, target="cpu")
    output, lse = torch.empty(61, 3, 128, dtype=torch.bfloat16), torch.empty(61, 3)
    mla.flare_mla_prefill(
        output, *made[:7], mla.CausalMask(), *OFFSETS, 0.07, v_scale=made.v_scale, lse=lse, target="cpu"
    )
    plain = reference.prefill(*given.values(), mla.CausalMask(), *OFFSETS, 0.07)
    assert_output(output, plain[0], "fp8")
    # Rounding q and k moves a logit too: over 120 draws 1.2 bounds by the median, 2.7 at most.
    assert_lse(lse, plain[1], "fp8", factor=4)


def test_the_rope_beside_rows_of_zeros_stays_finite() -> None:
    given = operands()
    given["q"][3, :, :128], given["k"][5], given["rope"] = 0.0, 0.0, given["rope"] * 8
    made = mla.quantize_for_prefill(**given, target="cpu")
    assert made.k_rope is not None and made.k_rope.isfinite().all() and made.q_rope.isfinite().all()
    output, lse = torch.empty(61, 3, 128, dtype=torch.bfloat16), torch.empty(61, 3)
    mla.flare_mla_prefill(
        output, *made[:7], mla.CausalMask(), *OFFSETS, 0.02, v_scale=made.v_scale, lse=lse, target="cpu"
    )
    plain, plain_lse = reference.prefill(*given.values(), mla.CausalMask(), *OFFSETS, 0.02)
    assert_output(output, plain, "fp8")
    assert_lse(lse, plain_lse, "fp8", factor=4)


def test_without_a_rope_the_queries_keep_theirs() -> None:
    given = operands()
    rope = given.pop("rope")
    made = mla.quantize_for_prefill(**given, target="cpu")
    assert made.k_rope is None and torch.equal(made.q_rope, given["q"][..., 128:])
    batched = torch.stack([torch.nn.functional.pad(rope[:70], (0, 0, 0, 0, 0, 60)), rope[70:]])
    output = mla.prefill(
        made.q_nope, made.k, made.v, batched, mla.NullMask(), *OFFSETS, 0.07, q_rope=made.q_rope,
        q_scale=made.q_scale, k_scales=made.k_scales, v_scale=made.v_scale, rope_prescaled=False, target="cpu",
    )  # fmt: skip
    plain, _ = reference.prefill(*given.values(), batched, mla.NullMask(), *OFFSETS, 0.07)
    assert_output(output, plain, "fp8")


def test_a_blocks_scales_are_those_of_a_quantised_cache() -> None:
    rows = torch.randn(5, 576)
    collection = mla.PagedKVCacheCollection.from_pages(
        torch.zeros(1, 8, 576).to(torch.float8_e4m3fn), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0]),
        scales=torch.zeros(1, 8, 5), quantization_granularity=128,
    )  # fmt: skip
    collection.store(0, torch.tensor([0, 5]), rows[:, :512], rows[:, 512:], target="cpu")
    cache = collection.layer(0)
    fp8, scale = mla.quantize_per_block(rows, 128, target="cpu")
    assert cache.scales is not None
    assert torch.equal(cache.scales[0, :5], scale)
    assert torch.equal(cache.latent[0, :5].view(torch.uint8), fp8[:, :512].view(torch.uint8))
    assert torch.equal(cache.rope[0, :5].view(torch.uint8), fp8[:, 512:].view(torch.uint8))


X = torch.zeros(4, 3, 64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mla.quantize_per_token(X[0, 0], target="cpu"), ShapeError, "x must be 2-D or 3-D"),
        (lambda: mla.quantize_per_token(X[..., :20], target="cpu"), ShapeError, "multiple of 8"),
        (lambda: mla.quantize_per_token(X[:, :0], target="cpu"), ShapeError, "at least one head"),
        (lambda: mla.quantize_per_token(X.mT, target="cpu"), ShapeError, "contiguous in its last"),
        (lambda: mla.quantize_per_token(X.double(), target="cpu"), DTypeError, "x must be bfloat16"),
        (lambda: mla.quantize_per_token(X, dtype=torch.float8_e5m2, target="cpu"), DTypeError, "float8_e5m2"),
        (lambda: mla.quantize_per_token(X, out=X.to(torch.float8_e4m3fnuz), target="cpu"), DTypeError, "out must be"),
        (lambda: mla.quantize_per_token(X, scale=torch.ones(4), target="cpu"), ShapeError, "scale must be 2-D"),
        (lambda: mla.quantize_per_token(X, scale=torch.ones(1, 1).expand(4, 1), target="cpu"), ShapeError, "memory"),
        (lambda: mla.quantize_per_block(X, 32, target="cpu"), ArgumentError, "64, 128, 576, got 32"),
        (lambda: mla.quantize_per_head(X[0], target="cpu"), ShapeError, "x must be 3-D"),
        (lambda: mla.quantize_with_scale(X, torch.ones(2), target="cpu"), ShapeError, r"\(1,\), \(3,\) or \(4, 1\)"),
        (lambda: mla.quantize_with_scale(X, torch.ones(3).half(), target="cpu"), DTypeError, "scale must be float32"),
        (lambda: mla.quantize_for_prefill(X, X, X, target="cpu"), ShapeError, r"q must have shape \(\*, 3, 128\)"),
        (
            lambda: mla.quantize_for_prefill(**operands(), v_scale="row", target="cpu"),  # type: ignore[arg-type]
            ArgumentError,
            "'head', 'tensor', 'token', got 'row'",
        ),
        (
            lambda: mla.quantize_for_prefill(**operands(), v_scale=["head"], target="cpu"),  # type: ignore[arg-type]
            ArgumentError,
            r"got \['head'\]",
        ),
        (
            lambda: mla.quantize_for_prefill(**operands() | {"v": X.mT}, target="cpu"),
            ShapeError,
            "v must be contiguous",
        ),
        (
            lambda: mla.quantize_for_prefill(**operands() | {"k": X.clone().requires_grad_()}, target="cpu"),
            ArgumentError,
            "k requires a gradient",
        ),
        (lambda: mla.quantize_per_token(X.clone().requires_grad_(), target="cpu"), ArgumentError, "no backward"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_nothing_is_quantised_to_nothing() -> None:
    x = torch.zeros(0, 3, 64)
    assert mla.quantize_per_token(x, target="cpu")[0].shape == x.shape
    assert (mla.quantize_per_tensor(x, target="cpu")[1] == torch.finfo(torch.float32).tiny).all()


def test_it_can_be_traced() -> None:
    given = operands()
    compiled = torch.compile(
        lambda **tensors: mla.quantize_for_prefill(**tensors, target="cpu"), fullgraph=True, backend="aot_eager"
    )
    for one, other in zip(compiled(**given), mla.quantize_for_prefill(**given, target="cpu"), strict=True):
        assert torch.equal(one.float(), other.float()) and one.dtype == other.dtype


def test_a_recorded_launch_runs_again(tmp_path: Any) -> None:
    from mla.problem import Problem, QuantizeArgs

    x = torch.randn(4, 3, 64)
    args = QuantizeArgs(x, torch.zeros_like(x).to(torch.float8_e4m3fn), torch.zeros(4, 1, 1))
    Recording.of("none", Problem("quantize", "fp32", "fp8"), args).save(tmp_path / "call.pt")
    recording = Recording.load(tmp_path / "call.pt")
    errors = recording.errors(recording.run("cpu", torch.device("cpu")), recording.expect())
    assert errors == {"output": 0.0, "scale": 0.0}
