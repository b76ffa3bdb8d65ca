"""chunked_prefill with attention_dtype: q, k and v quantised on the way, V^T by its own projection."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import mla
from mla import DTypeError, ShapeError, UnsupportedError, masks, reference
from mla._check import alignment
from mla._prefill_call import Call, Form, attend
from mla.kv_cache import PagedKVCacheCollection
from mla.problem import Again
from tests.support.paged import PagedData, make_paged, offsets_of
from tests.support.problems import fp8_dtype
from tests.support.replay_step import Step, Tape
from tests.support.tolerance import assert_lse, assert_output

HEADS, SCALE, FP8, CAUSAL = 3, 192**-0.5, torch.float8_e4m3fn, masks.CausalMask()
LENGTHS = [(70, 5), (0, 64), (0, 0), (33, 1)]
TOTALS = [c + n for c, n in LENGTHS]


def job(**options: Any) -> tuple[PagedData, torch.Tensor, torch.Tensor]:
    """Return a paged batch, q and kv_b_proj, in bf16."""
    data = make_paged([c for c, _ in LENGTHS], [n for _, n in LENGTHS], options.pop("page_size", 16), **options)
    random_numbers = torch.Generator().manual_seed(1)
    q = torch.randn(sum(data.new), HEADS, 192, generator=random_numbers).bfloat16()
    return data, q, (torch.randn(HEADS * 256, 512, generator=random_numbers) / 512**0.5).bfloat16()


def run(data: PagedData, q: torch.Tensor, weight: Any, size: int, **keywords: Any) -> Any:
    return mla.chunked_prefill(
        q, data.cache, data.layer_idx, weight, data.input_row_offsets, CAUSAL, SCALE,
        **{
            "buffer_token_size": size, "return_lse": True, "attention_dtype": FP8, "target": "cpu",
            "seq_lens_cpu": TOTALS, **keywords,
        },
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["bf16", "fp8", "fused"])
def test_equals_the_oracle_on_operands_that_are_quantised_by_hand(layout: str) -> None:
    """What each scale means: the arithmetic itself stays within the bound of bf16."""
    data, q, weight = job(
        dtype=torch.bfloat16 if layout == "bf16" else FP8, layout="pages" if layout != "fused" else layout
    )
    out, lse = run(data, q, weight, 1000)
    latent = torch.cat(data.latent).bfloat16()
    keys, values = (latent @ weight.T).view(-1, HEADS, 256).split(128, 2)
    q8, q_scale = mla.quantize_per_token(q, target="cpu")
    longest, rows = latent.double().norm(dim=1).max(), weight.double().norm(dim=1).view(HEADS, 2, 128).amax(2)
    v_scale = (longest * rows[:, 1] / 448).float()
    v8 = mla.quantize_with_scale(values, v_scale, target="cpu")
    if layout == "fp8":
        k8, k_scales = mla.quantize_per_token(keys, target="cpu")
        rest = {}
    else:  # the fused row has a bf16 rope too
        k_scales = (longest * rows[:, 0].max() / 448).float().view(1)
        k8 = mla.quantize_with_scale(keys, k_scales, target="cpu")
        q8, rest = q8[..., :128], {"q_rope": (q[..., 128:] / (q_scale * k_scales).unsqueeze(2)).bfloat16()}
    expected, expected_lse = reference.prefill(
        q8, k8, v8, data.cache.layer(data.layer_idx), masks.CausalMask(), data.input_row_offsets,
        torch.tensor(offsets_of(TOTALS)), SCALE, q_scale=q_scale, k_scales=k_scales, v_scale=v_scale, **rest,
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    assert_output(out, expected, "bf16")
    assert_lse(lse, expected_lse, "bf16")


@pytest.mark.parametrize("size", [16, 50, 80, 1000])
@pytest.mark.parametrize("known", [True, False], ids=["lengths_on_the_host", "lengths_on_the_device"])
@pytest.mark.parametrize("weight_is", ["tensor", "callable"])
def test_every_buffer_size_stays_within_the_bound_of_fp8(size: int, known: bool, weight_is: str) -> None:
    data, q, weight = job()
    projection = weight if weight_is == "tensor" else lambda latent: latent @ weight.T
    sinks = torch.randn(HEADS)
    more = {} if known else {"seq_lens_cpu": None, "max_chunks": -(-192 // size) + 1}
    out, _ = run(data, q, projection, size, sinks=sinks, **more)
    exact, _ = run(data, q, weight, size, sinks=sinks, attention_dtype=None)
    error = (out.double() - exact.double()).norm() / exact.double().norm()
    assert 1e-2 < error < 5e-2, "above what bf16 leaves, and within what fp8 may"


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("cuda", marks=pytest.mark.cuda),
        pytest.param("rocm", marks=pytest.mark.rocm),
        pytest.param("triton", marks=pytest.mark.triton),
    ],
)
@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("weight_is", ["tensor", "callable"])
def test_every_target_agrees_with_the_reference(target: str, cache: str, weight_is: str) -> None:
    data, q, weight = job(device="cuda", dtype=torch.bfloat16 if cache == "bf16" else fp8_dtype(torch.device("cuda")))
    q, weight = q.cuda(), weight.cuda()

    # So that both sides see the same numbers: a chunk's scale is its maximum, and a product that rounds one bit away
    # there would round every key to another fp8 number.
    def in_f64(latent: torch.Tensor) -> torch.Tensor:
        return (latent.double() @ weight.to(latent.device).double().T).to(latent.dtype)

    projection = weight if weight_is == "tensor" else in_f64
    same, _, _ = job(dtype=data.cache.layer(0).rope.dtype)
    format_here = {"attention_dtype": fp8_dtype(torch.device("cuda"))}
    for size in (50, 1000):
        try:
            out, lse = run(data, q, projection, size, target=target, **format_here)
        except UnsupportedError as error:
            pytest.skip(str(error).splitlines()[0])
        same_projection = weight.cpu() if weight_is == "tensor" else projection
        expected, expected_lse = run(same, q.cpu(), same_projection, size, **format_here)
        assert_output(out, expected, "fp8")
        assert_lse(lse, expected_lse, "fp8", factor=2)


@pytest.mark.parametrize("weight_is", ["tensor", "callable"])
def test_leftovers_in_pages_and_workspaces_change_no_bit(weight_is: str) -> None:
    results = []
    for poison, dirt in ((float("nan"), 255), (float("inf"), 255), (1e4, 0)):
        data, q, weight = job(poison=poison)
        projection = weight if weight_is == "tensor" else lambda latent, weight=weight: latent @ weight.T
        given = q, data.cache, data.layer_idx, projection
        need = mla.workspace_size("chunked_prefill", *given, buffer_token_size=50, attention_dtype=FP8, target="cpu")
        workspace = torch.full((need,), dirt, dtype=torch.uint8)
        with pytest.raises(mla.ArgumentError, match=f"needs {need} bytes"):
            run(data, q, projection, 50, workspace=workspace[:-1])
        for more in ({}, {"seq_lens_cpu": None, "max_chunks": 5}):
            results.append(
                torch.cat([x.float().flatten() for x in run(data, q, projection, 50, workspace=workspace, **more)])
            )
    assert all(torch.equal(result, results[i % 2]) for i, result in enumerate(results))


@pytest.mark.parametrize(("cache", "saved"), [(torch.bfloat16, 64 * HEADS * 128 * 2), (FP8, 0)], ids=["bf16", "fp8"])
def test_one_kernel_for_projection_and_rounding_needs_no_room_between(
    cache: torch.dtype, saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def project(output: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, target: str) -> None:
        product = (a.float() @ b.float().T).view(len(scale), -1) / scale.view(-1, 1)
        output.copy_(product.clamp(-448, 448).view(output.shape))

    data, q, weight = job(dtype=cache)
    given = q, data.cache, data.layer_idx, weight
    options: dict[str, Any] = {"buffer_token_size": 64, "attention_dtype": FP8, "target": "cpu"}
    need = mla.workspace_size("chunked_prefill", *given, **options)
    expected, expected_lse = run(data, q, weight, 64)
    monkeypatch.setattr("mla._chunk_buffer.projects_to_fp8", lambda *_: True)
    monkeypatch.setattr("mla._chunk_buffer.project_to_fp8", project)
    less = mla.workspace_size("chunked_prefill", *given, **options)
    assert need - less == saved, "a key with a scale of its own is projected before the scale is known"
    output, lse = run(data, q, weight, 64, workspace=torch.full((less,), 255, dtype=torch.uint8))
    assert_output(output, expected.double(), "fp8", factor=2)
    assert_lse(lse, expected_lse.double(), "fp8", factor=2)


def test_values_are_projected_transposed_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Call] = []

    def watch(call: Call, form: Form) -> Again | None:
        seen.append(call)
        return attend(call, form)

    monkeypatch.setattr("mla.chunked.attend", watch)
    data, q, weight = job(page_size=1)
    run(data, q, weight, 1000)
    (call,) = seen
    assert call.v.shape == (173, HEADS, 128)
    assert call.v.stride() == (1, 128 * 176, 176)
    assert alignment(call.v.transpose(0, 2)) == 16


def test_a_replay_follows_new_lengths(seed: int) -> None:
    source, step, mask, tape = random.Random(seed), Step(dtype=torch.bfloat16), masks.CausalMask(), Tape()
    step.draw(source)
    lse = tape.record(lambda: step.run(mask, "cpu", 48, max_chunks=8, attention_dtype=FP8))
    for _ in range(3):
        step.draw(source)
        step.output.fill_(3.0)
        tape.replay()
        expected, expected_lse = step.expect(mask, "cpu", 48, attention_dtype=FP8)
        rows = sum(step.new)
        torch.testing.assert_close(step.output[:rows], expected, rtol=2**-7, atol=1e-2)
        torch.testing.assert_close(lse[:rows], expected_lse, rtol=0, atol=2e-5)
        assert (step.output[rows:] == 3.0).all(), "rows of no sequence stay"


@pytest.mark.parametrize("what", ["keys", "queries"])
def test_where_the_rope_is_all_there_is(what: str) -> None:
    data, q, weight = job()
    (weight if what == "keys" else q[..., :128]).zero_()
    out, lse = run(data, q, weight, 50)
    exact, exact_lse = run(data, q, weight, 50, attention_dtype=None)
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=2e-2)
    assert (out.double() - exact.double()).norm() <= 5e-2 * exact.double().norm()


def test_rows_of_zeros_over_keys_that_are_next_to_nothing() -> None:
    data, q, weight = job()
    q[4:20] = 0.0
    out, lse = run(data, q, weight * 2.0**-100, 1000)
    exact, exact_lse = run(data, q, weight * 2.0**-100, 1000, attention_dtype=None)
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=2e-2)
    assert (out.double() - exact.double()).norm() <= 5e-2 * exact.double().norm()


def test_traced() -> None:
    data, q, weight = job()

    def step(q: torch.Tensor) -> Any:
        return run(data, q * 1.0, weight, 50, seq_lens_cpu=None, max_chunks=5)

    with torch.no_grad():
        traced = torch.compile(step, fullgraph=True, backend="aot_eager")(q)
        assert all(torch.equal(a, b) for a, b in zip(traced, step(q), strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_dtype": torch.float16}, "attention_dtype must be torch.bfloat16, as q, or float8"),
        ({"attention_dtype": "fp8"}, "attention_dtype must be"),
        ({"q": torch.float16}, "q must be torch.bfloat16 where attention_dtype is torch.float8_e4m3fn"),
        ({"attention_dtype": torch.float8_e4m3fnuz, "cache": FP8}, "the rope of kv_collection must be torch.bfloat16"),
        ({"cache": torch.float16}, "the rope of kv_collection must be torch.bfloat16 or torch.float8_e4m3fn"),
    ],
)
def test_refusals(change: dict[str, Any], words: str) -> None:
    data, q, weight = job(dtype=change.pop("cache", torch.bfloat16))
    dtype = change.pop("q", torch.bfloat16)
    with pytest.raises(DTypeError, match=words):
        run(data, q.to(dtype), weight.to(dtype), 50, **change)


def test_queries_with_gaps_are_refused() -> None:
    data, q, weight = job()
    with pytest.raises(ShapeError, match="q must be contiguous in its last dimension"):
        run(data, q.repeat_interleave(2, 2)[..., ::2], weight, 50)


def test_the_dtype_of_q_asks_for_nothing() -> None:
    data, q, weight = job()
    same, plain = (run(data, q, weight, 50, attention_dtype=dtype) for dtype in (torch.bfloat16, None))
    assert all(torch.equal(a, b) for a, b in zip(same, plain, strict=True))


def test_a_batch_of_nothing() -> None:
    pages, table = torch.zeros(1, 16, 576, dtype=torch.bfloat16), torch.zeros(0, 1, dtype=torch.int32)
    cache = PagedKVCacheCollection.from_pages(pages, table, torch.zeros(0, dtype=torch.int32))
    out = mla.chunked_prefill(
        torch.zeros(0, HEADS, 192).bfloat16(), cache, 0, torch.zeros(HEADS * 256, 512).bfloat16(),
        torch.zeros(1, dtype=torch.int32), masks.CausalMask(), SCALE, attention_dtype=FP8, max_chunks=2, target="cpu",
    )  # fmt: skip
    assert out.shape == (0, HEADS, 128)
