"""chunked_prefill: the whole job in one call, equal to the one-shot result for every buffer size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla
from mla import BufferOverflowError, DTypeError, MlaError, ShapeError, masks, reference
from mla.plan import prefill_plan
from tests.support.paged import PagedData, make_paged, offsets_of
from tests.support.tolerance import assert_lse, assert_output

HEADS, SCALE = 3, 192**-0.5


def job(
    lengths: list[tuple[int, int]], page_size: int = 16, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[PagedData, torch.Tensor, torch.Tensor]:
    """Return a paged batch, q and kv_b_proj."""
    data = make_paged([c for c, _ in lengths], [n for _, n in lengths], page_size, dtype=dtype, **options)
    wide = torch.float32 if dtype.itemsize == 1 else dtype
    q = torch.randn(sum(data.new), HEADS, 192).to(wide)
    return data, q, (torch.randn(HEADS * 256, 512) / 512**0.5).to(wide)


def expect(data: PagedData, q: torch.Tensor, weight: torch.Tensor, mask: masks.Mask, **keywords: Any) -> Any:
    """Return the oracle's one-shot answer from the logical rows."""
    counts = [c + n for c, n in zip(data.cached, data.new, strict=True)]
    latent = torch.cat(data.latent).double()
    kv = (latent @ weight.double().T).view(-1, HEADS, 256)
    rows = torch.tensor(offsets_of(counts))
    layer = data.cache.layer(data.layer_idx)
    return reference.prefill(
        q, kv[..., :128], kv[..., 128:], layer, mask, data.input_row_offsets, rows, SCALE, **keywords
    )


def run(data: PagedData, q: torch.Tensor, weight: Any, mask: masks.Mask, size: int, **keywords: Any) -> Any:
    return mla.chunked_prefill(
        q, data.cache, data.layer_idx, weight, data.input_row_offsets, mask, SCALE, buffer_token_size=size,
        return_lse=True, target="cpu", **keywords,
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 15, 16, 17, 60]), st.sampled_from([0, 1, 15, 16, 33])), max_size=4
    ),
    size=st.sampled_from([1, 7, 16, 32, 48, 1000]),
    mask=st.sampled_from([masks.NullMask(), masks.CausalMask(), masks.SlidingWindowCausalMask(20)]),
)
def test_every_buffer_size_gives_the_one_shot_result(lengths: Any, size: int, mask: masks.Mask) -> None:
    data, q, weight = job(lengths)
    sinks = torch.randn(HEADS)
    out, lse = run(data, q, weight, mask, size, sinks=sinks)
    expected, expected_lse = expect(data, q, weight, mask, sinks=sinks) if lengths else (out.double(), lse.double())
    assert_output(out, expected, "fp32")
    assert_lse(lse, expected_lse, "fp32")


LENGTHS = [(70, 5), (0, 64), (0, 0), (33, 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["TH", "HT"])
def test_dtypes(dtype: torch.dtype, layout: str) -> None:
    data, q, weight = job(LENGTHS, dtype=dtype)
    out, lse = run(data, q, weight, masks.CausalMask(), 48, lse_layout=layout)
    expected, expected_lse = expect(data, q, weight, masks.CausalMask())
    assert out.dtype == q.dtype
    # Keys are rounded to the dtype of the buffer, which the oracle's are not.
    assert_output(out, expected, {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "fp32"), factor=2)
    torch.testing.assert_close(lse if layout == "TH" else lse.T, expected_lse.float(), atol=1e-2, rtol=0)


def test_plan_weight_and_workspace_in_all_their_forms() -> None:
    data, q, weight = job(LENGTHS)
    mask = masks.CausalMask()
    whole = run(data, q, weight, mask, 48)
    plan = prefill_plan(data.input_row_offsets, data.cache, 0, 48, max_chunks=9, target="cpu")
    checked = prefill_plan(data.input_row_offsets, data.cache, 0, 48, target="cpu")
    checked.check()
    totals = [c + n for c, n in LENGTHS]
    size = mla.workspace_size("chunked_prefill", q, data.cache, 0, weight, buffer_token_size=48)
    dirty = torch.full((size,), 255, dtype=torch.uint8)  # NaN in every dtype
    for more in (
        {"plan": plan}, {"plan": checked}, {"max_chunks": 5}, {"seq_lens_cpu": totals},
        {"seq_lens_cpu": torch.tensor(totals), "max_chunks": 20}, {"workspace": dirty},
    ):  # fmt: skip
        torch.testing.assert_close(run(data, q, weight, mask, 48, **more), whole)
    torch.testing.assert_close(run(data, q, lambda latent: latent @ weight.T, mask, 48), whole)
    with pytest.raises(MlaError, match=f"needs {size} bytes, got {size - 1}"):
        run(data, q, weight, mask, 48, workspace=dirty[:-1])


def test_one_chunk_writes_straight_to_the_output() -> None:
    data, q, weight = job(LENGTHS)
    output = torch.full((q.shape[0], HEADS, 256), math.nan)[..., :128]
    out, _ = run(data, q, weight, masks.CausalMask(), 1000, output=output)
    assert out is output
    assert_output(out, expect(data, q, weight, masks.CausalMask())[0], "fp32")


def test_a_cut_sequence_is_nan_and_never_plausible() -> None:
    data, q, weight = job(LENGTHS)
    first = offsets_of(data.new)
    expected, expected_lse = expect(data, q, weight, masks.CausalMask())
    # 80 + 64 + 0 + 48 rows; five chunks of 32 hold the first two sequences and 16 rows of the last.
    out, lse = run(data, q, weight, masks.CausalMask(), 32, max_chunks=5)
    assert out[first[3] :].isnan().all() and lse[first[3] :].isnan().all()
    assert_output(out[: first[3]], expected[: first[3]], "fp32")
    assert_lse(lse[: first[3]], expected_lse[: first[3]], "fp32")
    with pytest.raises(BufferOverflowError):
        run(data, q, weight, masks.CausalMask(), 32, max_chunks=5, seq_lens_cpu=[c + n for c, n in LENGTHS])


def test_page_padding_that_was_cut_off_does_not_count() -> None:
    data, q, weight = job([(0, 33)])
    out, lse = run(data, q, weight, masks.CausalMask(), 40, max_chunks=1)
    expected, expected_lse = expect(data, q, weight, masks.CausalMask())
    assert_output(out, expected, "fp32")
    assert_lse(lse, expected_lse, "fp32")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": torch.empty(HEADS * 256 - 1, 512)}, ShapeError, "weight must have shape (768, 512)"),
        ({"weight": torch.empty(HEADS * 256, 512, dtype=torch.float16)}, DTypeError, "weight must be float32"),
        ({"weight": None}, DTypeError, "weight must be a torch.Tensor or a callable"),
        ({"q": torch.empty(70, HEADS, 191)}, ShapeError, "(192, 128), (256, 256)"),
        ({"q": torch.empty(69, HEADS, 192)}, ShapeError, "ends at 70, but q has 69 rows"),
        ({"mask": "causal"}, DTypeError, "CausalMask()"),
        ({"lse_layout": "HTT"}, MlaError, "lse_layout"),
        ({"buffer_token_size": 0}, MlaError, "buffer_token_size"),
        ({"layer_idx": 1}, MlaError, "layer_idx"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    data, q, weight = job(LENGTHS)
    arguments = {
        "q": q, "kv_collection": data.cache, "layer_idx": 0, "weight": weight,
        "input_row_offsets": data.input_row_offsets, "mask": masks.CausalMask(), "scale": SCALE, "target": "cpu",
    }  # fmt: skip
    with pytest.raises(error) as caught:
        mla.chunked_prefill(**{**arguments, **change})
    assert words in str(caught.value)


@pytest.mark.parametrize("chunks", [{"size": 16}, {"size": 16, "max_chunks": 8}, {"size": 4096}], ids=str)
@pytest.mark.parametrize(
    ("output", "error", "words"),
    [
        (torch.full((69, HEADS, 128), 7.0), ShapeError, "output must have shape (70, 3, 128), got (69, 3, 128)"),
        (torch.full((71, HEADS, 128), 7.0), ShapeError, "output must have shape (70, 3, 128), got (71, 3, 128)"),
        (torch.full((70, HEADS * 128), 7.0), ShapeError, "output must be 3-D"),
        (torch.full((70, HEADS, 128), 7.0).bfloat16(), DTypeError, "output must be float32, got torch.bfloat16"),
        (torch.full((70, 128, HEADS), 7.0).mT, ShapeError, "output must be contiguous in its last dimension"),
        (torch.full((70, 1, 128), 7.0).expand(70, HEADS, 128), ShapeError, "output is written"),
        ([0.0], DTypeError, "output must be a torch.Tensor, got list"),
    ],
)
def test_an_output_is_refused_before_anything_runs(output: Any, error: Any, words: str, chunks: dict[str, int]) -> None:
    data, q, weight = job(LENGTHS)
    with pytest.raises(error) as caught:
        run(data, q, weight, masks.CausalMask(), output=output, **chunks)
    assert words in str(caught.value)
    assert isinstance(output, list) or output.eq(7.0).all()


def test_a_plan_of_another_batch() -> None:
    data, q, weight = job(LENGTHS)
    other, _, _ = job([(5, 5)])
    plan = prefill_plan(other.input_row_offsets, other.cache, 0, 48, target="cpu")
    with pytest.raises(ShapeError, match="plan was made for 1 sequences, kv_collection has 4"):
        run(data, q, weight, masks.CausalMask(), 48, plan=plan)


class TestPlanOfAnotherBatch:
    """A plan that knows its lengths is refused where they are not those of the call."""

    def run(self, lengths: list[int], offsets: list[int]) -> None:
        data, q, weight = job([(40, 9), (3, 20)])
        plan = prefill_plan(data.input_row_offsets, data.cache, data.layer_idx, 64, seq_lens_cpu=[49, 23], target="cpu")
        cache = data.cache.with_batch(torch.tensor(lengths), data.page_table)
        mla.chunked_prefill(
            q, cache, data.layer_idx, weight, torch.tensor(offsets), masks.CausalMask(), SCALE, plan=plan, target="cpu"
        )

    def test_same(self) -> None:
        self.run([40, 3], [0, 9, 29])

    def test_other_lengths(self) -> None:
        with pytest.raises(mla.ArgumentError, match=r"plan was made for lengths \[49, 23\], the batch has \[48, 23\]"):
            self.run([39, 3], [0, 9, 29])

    def test_more_rows_than_q_where_offsets_are_not_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data, q, weight = job([(40, 9), (3, 20)])
        plan = prefill_plan(data.input_row_offsets, data.cache, data.layer_idx, 64, seq_lens_cpu=[49, 23], target="cpu")
        monkeypatch.setattr("mla.chunked.readable", lambda tensor: False)  # as on a GPU
        with pytest.raises(ShapeError, match=r"plan was made for 29 rows of q, q has shape \(28, 3, 192\)"):
            mla.chunked_prefill(
                q[:28], data.cache, data.layer_idx, weight, torch.tensor([0, 9, 28]), masks.CausalMask(), SCALE,
                plan=plan, target="cpu",
            )  # fmt: skip

    def test_other_rows(self) -> None:
        with pytest.raises(mla.ArgumentError, match=r"plan was made for input_row_offsets .* has \[0, 8, 28\]"):
            self.run([41, 3], [0, 8, 28])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"plan": "shared"}, DTypeError, "plan must be a PrefillPlan, got str"),
        ({"input_row_offsets": 4}, DTypeError, "input_row_offsets must be a torch.Tensor, got int"),
        ({"buffer_token_size": 0}, mla.ArgumentError, "buffer_token_size must be from 1"),
    ],
)
def test_refusals_name_the_argument(change: dict[str, Any], error: type[Exception], words: str) -> None:
    data, q, weight = job([(40, 9)])
    given = {"input_row_offsets": data.input_row_offsets, "target": "cpu", **change}
    with pytest.raises(error, match=words):
        mla.chunked_prefill(q, data.cache, data.layer_idx, weight, mask=masks.CausalMask(), scale=SCALE, **given)


def test_workspace_size_takes_operands_by_name() -> None:
    data, q, weight = job([(40, 9)])
    named = {"q": q, "kv_collection": data.cache, "layer_idx": data.layer_idx, "weight": weight}
    size = mla.workspace_size("chunked_prefill", *named.values(), buffer_token_size=32)
    assert mla.workspace_size("chunked_prefill", **named, buffer_token_size=32, target="cpu") == size > 0
    with pytest.raises(mla.ArgumentError, match="buffer_token_size"):
        mla.workspace_size("chunked_prefill", **named, buffer_token_size=0)
    with pytest.raises(TypeError, match="weight"):
        mla.workspace_size("chunked_prefill", q, data.cache, data.layer_idx)
