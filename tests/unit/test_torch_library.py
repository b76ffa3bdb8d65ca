"""The operators of torch.ops.mla: what they mutate, tracing with changing token counts, gradients refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mla
from mla import ArgumentError, DTypeError, Mask, ShapeError, masks
from mla.kv_cache import PagedKVCacheCollection
from mla.plan import prefill_plan
from tests.support.paged import make_paged
from tests.support.problems import MASKS, Case, MaskContext, build
from tests.unit.test_chunked import HEADS, job

LENGTHS = [(70, 5), (0, 64), (0, 0), (33, 1)]
OPERATORS = ("plan", "gather", "store", "prefill", "merge", "chunked_prefill")


def operands(name: str, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of an operator, with every optional tensor that it can write; `dtype` of a cache to store in."""
    data, q, weight = job(LENGTHS, poison=0.0)
    cache, offsets, total = data.cache.layer(0), data.input_row_offsets, q.shape[0]
    plan = prefill_plan(offsets, data.cache, 0, 48, max_chunks=5, target="cpu")
    tables = plan.buffer_row_offsets, plan.cache_offsets, plan.buffer_lengths, plan.required_chunks
    part, lse = torch.randn(total, HEADS, 128), torch.randn(total, HEADS)
    if name == "plan":
        return (*(torch.full_like(table, 77) for table in tables), offsets, *cache.operands, 48, "cpu"), {}
    if name == "gather":
        return (torch.randn(48, 512), tables[0][0], tables[1][0], None, tables[2][:1], *cache.operands, "cpu"), {}
    if name == "store":
        cache = make_paged(data.cached, data.new, 16, dtype=dtype, layout="split", poison=1.0).cache.layer(0)
        return (*cache.operands, offsets, torch.randn(total, 512), torch.randn(total, 64), "cpu"), {}
    if name == "merge":
        sides = part, lse, part + 1, lse - 1
        return (torch.zeros_like(part), torch.zeros_like(lse), *sides), {"target": "cpu"}
    if name == "chunked_prefill":
        last = None, None, torch.randn(HEADS), 0.0, True, "cpu"
        mask = masks.CausalPaddingMask(torch.tensor([70, 60, 0, 34]))
        return (
            torch.zeros_like(part), torch.zeros_like(lse), None, q, *cache.operands, weight, offsets, *mask.operands,
            0.07, *tables, 48, None, None, *last,
        ), {}  # fmt: skip
    problem = build(Case(mask="causal_bias", sinks=True, poison=0.0))
    o, sinks = problem.operands, problem.keywords["sinks"]
    outputs = {name: x.zero_() if isinstance(x, torch.Tensor) else x for name, x in problem.outputs().items()}
    arguments = (
        outputs.pop("output"), o["q"], None, o["k"], o["v"], *o["k_rope"].operands, *o["mask"].operands,
        o["valid_length"], o["cache_row_offsets"], o["scale"],
    )  # fmt: skip
    return arguments, {**outputs, "sinks": sinks, "target": "cpu"}


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    positional, keywords = operands(name, torch.float32)  # opcheck compares no fp8
    torch.library.opcheck(getattr(torch.ops.mla, name).default, positional, keywords)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_schema_names_all_that_is_written_and_nothing_else(name: str) -> None:
    positional, keywords = operands(name)
    operator = getattr(torch.ops.mla, name).default
    given = dict(zip((a.name for a in operator._schema.arguments), positional, strict=False)) | keywords
    before = {key: value.clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
    operator(*positional, **keywords)
    changed = {key for key, value in before.items() if not torch.equal(_bits(value), _bits(given[key]))}
    mutable = {a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert changed == {key for key in mutable if given.get(key) is not None}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


class TestTracing:
    """torch.compile with fullgraph; compilations counted."""

    def compiled(self, function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[Any]]:
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend=backend, **options), graphs

    def same(self, function: Callable[..., Any], traced: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        with torch.no_grad():
            for expected, actual in zip(function(*args, **keywords), traced(*args, **keywords), strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)

    def test_a_step_with_changing_token_counts_is_compiled_once(self) -> None:
        pages = torch.zeros(64, 16, 576)
        weight = torch.randn(HEADS * 256, 512) / 512**0.5
        table = torch.arange(64, dtype=torch.int32).view(4, 16)

        def step(q: Any, cache: Any, offsets: Any, latent: Any, rope: Any, mask: Any) -> Any:
            cache.store(0, offsets, latent * 2.0, rope, target="cpu")
            out, lse = mla.chunked_prefill(
                q + 1.0, cache, 0, weight, offsets, mask, 0.07, buffer_token_size=48, max_chunks=9, return_lse=True,
                lse_layout="HT", target="cpu",
            )  # fmt: skip
            return out * 2.0, lse

        traced, graphs = self.compiled(step, dynamic=True)
        graphs_of_first_step = 0
        for new in ([5, 64, 0, 1], [3, 9, 30, 2], [1, 1, 1, 1], [100, 20, 3, 50]):
            cached = torch.tensor([70, 0, 33, 9], dtype=torch.int32)
            cache = PagedKVCacheCollection.from_pages(
                pages, table, cached, max_seq_length=max(new), max_cache_length=sum(new) + 80
            )
            offsets = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
            total = sum(new)
            q, latent, rope = torch.randn(total, HEADS, 192), torch.randn(total, 512), torch.randn(total, 64)
            self.same(step, traced, q, cache, offsets, latent, rope, masks.CausalMask())
            graphs_of_first_step = graphs_of_first_step or len(graphs)
        assert len(graphs) == graphs_of_first_step
        self.same(step, traced, q, cache, offsets, latent, rope, masks.SlidingWindowCausalMask(40))
        assert len(graphs) > graphs_of_first_step, "another mask is another program"

    def test_without_being_told_the_second_count_makes_it_dynamic(self) -> None:
        def step(q: Any, k: Any, v: Any, rope: Any, mask: Any, rows: Any, keys: Any) -> Any:
            out, lse = mla.prefill(q, k, v, rope, mask, rows, keys, 0.07, return_lse=True, target="cpu")
            return out[2:-3].clone(), lse[2:-3].clone()

        traced, graphs = self.compiled(step)
        for new in (70, 33, 34, 90):
            problem = build(Case(lengths=((37, new), (0, 100)), rope="batched", overrides=False, strided=False))
            self.same(step, traced, *(value for name, value in problem.operands.items() if name != "scale"))
        assert len(graphs) == 2

    @pytest.mark.parametrize("mask", ["documents", "windows_of_heads", "causal_bias", "sink_window"])
    def test_masks_with_data(self, mask: str) -> None:
        def step(q: Any, k: Any, v: Any, rope: Any, mask: Any, rows: Any, keys: Any) -> Any:
            out, lse = mla.prefill(q, k, v, rope, mask, rows, keys, 0.07, return_lse=True, target="cpu")
            return out[2:-3].clone(), lse[2:-3].clone()

        traced, _ = self.compiled(step)
        problem = build(Case(mask=mask))
        self.same(step, traced, *(value for name, value in problem.operands.items() if name != "scale"))

    def test_fp8_with_scales_in_every_form(self) -> None:
        problem = build(Case(dtypes="fp8+bf16_rope", v_scale="number", v_transposed=True))
        o, scales = problem.operands, problem.keywords

        def step(q: Any, k: Any, v: Any) -> Any:
            out = torch.zeros(q.shape[0], q.shape[1], 128, dtype=torch.bfloat16)
            mla.flare_mla_prefill(
                out, q, scales["q_rope"], scales["q_scale"], k, scales["k_scales"], v, o["k_rope"], o["mask"],
                o["valid_length"], o["cache_row_offsets"], 0.07, v_scale=0.75, rope_prescaled=True, target="cpu",
            )  # fmt: skip
            return (out,)

        traced, _ = self.compiled(step)
        self.same(step, traced, o["q"], o["k"], o["v"])

    @pytest.mark.parametrize("dtypes", ["fp32", "bf16+fp8_rope"])
    def test_an_output_that_is_given(self, dtypes: str) -> None:
        problem = build(Case(dtypes=dtypes, rope="batched", overrides=False))
        o, scales = problem.operands, [] if dtypes == "fp32" else [problem.keywords["k_rope_scales"]]

        def step(q: Any, k: Any, v: Any) -> Any:
            out = torch.zeros(q.shape[0], q.shape[1], 128, dtype=q.dtype)
            mla.flare_mla_prefill(
                out, q, k, v, o["k_rope"], *scales, o["mask"], o["valid_length"], o["cache_row_offsets"], 0.07,
                target="cpu",
            )  # fmt: skip
            return (out,)

        traced, _ = self.compiled(step)
        self.same(step, traced, o["q"], o["k"], o["v"])

    def test_everything_made_inside(self) -> None:
        data, q, weight = job(LENGTHS)
        layer = data.cache.layer(0)
        pages = torch.cat((layer.latent, layer.rope), -1).nan_to_num(0.0)

        def step(q: Any, pages: Any, table: Any, lengths: Any, offsets: Any, mask: Any) -> Any:
            cache = PagedKVCacheCollection.from_pages(pages, table, lengths)
            plan = prefill_plan(offsets, cache, 0, 48, max_chunks=5, target="cpu")
            out = mla.chunked_prefill(q, cache, 0, weight, offsets, mask, 0.07, plan=plan, target="cpu")
            latent, kv = q.new_zeros(48, 512), q.new_zeros(48, HEADS * 256)
            mla.generic_flare_mla_decompress_k_cache_ragged_paged(
                plan.buffer_row_offsets[1], plan.cache_offsets[1], plan.buffer_lengths[1:2], weight, cache, 0, latent,
                kv, target="cpu",
            )  # fmt: skip
            heads = kv.view(48, HEADS, 256)
            part, part_lse = mla.prefill(
                q, heads[..., :128], heads[..., 128:], cache.layer(0), mask, offsets, plan.buffer_row_offsets[1], 0.07,
                cache_offsets=plan.cache_offsets[1], return_lse=True, target="cpu",
            )  # fmt: skip
            merged = torch.zeros_like(out)
            mla.merge_attn_states(merged, part, part_lse, out, part_lse - 1.0, target="cpu")
            return out, latent, kv, part, part_lse, merged, plan.buffer_row_offsets

        traced, _ = self.compiled(step)
        self.same(step, traced, q, pages, layer.page_table, layer.lengths, data.input_row_offsets, masks.CausalMask())

    @pytest.mark.parametrize("host", ["list", "tensor", "plan", "checked plan", "nothing"])
    def test_lengths_on_the_host(self, host: str) -> None:
        data, q, weight = job(LENGTHS)
        totals = [c + n for c, n in LENGTHS]
        plan = prefill_plan(
            data.input_row_offsets, data.cache, 0, 48, seq_lens_cpu=totals if host == "plan" else None, target="cpu"
        )
        plan.check()
        more: dict[str, Any] = {
            "list": {"seq_lens_cpu": totals}, "tensor": {"seq_lens_cpu": torch.tensor(totals)}, "plan": {"plan": plan},
            "checked plan": {"plan": plan}, "nothing": {},
        }[host]  # fmt: skip

        def step(q: Any, cache: Any, offsets: Any) -> Any:
            return (
                mla.chunked_prefill(
                    q, cache, 0, weight, offsets, masks_causal, 0.07, buffer_token_size=48, target="cpu", **more
                ),
            )

        masks_causal = masks.CausalMask()
        traced, _ = self.compiled(step)
        self.same(step, traced, q, data.cache, data.input_row_offsets)

    def test_inductor_writes_the_cache_in_place(self) -> None:
        from torch._inductor.utils import run_and_get_code

        data, q, _ = job(LENGTHS)
        total = q.shape[0]

        def step(cache: Any, offsets: Any, latent: Any, rope: Any) -> None:
            cache.store(0, offsets, latent * 2.0, rope * 2.0, target="cpu")

        torch._dynamo.reset()
        with torch.no_grad():
            latent, rope = torch.randn(total, 512), torch.randn(total, 64)
            traced = torch.compile(step, fullgraph=True)
            _, (code,) = run_and_get_code(traced, data.cache, data.input_row_offsets, latent, rope)
        assert "torch.ops.mla.store.default(reinterpret_tensor(" in code
        assert code.count("= empty_strided_cpu(") == 2, "the products, and no copy of the pages"
        row = data.cached[0]  # the first new token of the first sequence
        page, slot = data.pages[0][row // 16], row % 16
        torch.testing.assert_close(data.cache.layer(0).latent[page, slot], latent[0] * 2.0)


class TestRefusals:
    def test_gradients(self) -> None:
        for name, operand, argument in (
            ("gather", "k_latent_buffer", "k_latent_buffer"), ("store", "new_latent", "latent"), ("prefill", "q", "q"),
            ("merge", "prefix_output", "prefix_output"), ("chunked_prefill", "weight", "weight"),
        ):  # fmt: skip
            positional, keywords = operands(name)
            operator = getattr(torch.ops.mla, name).default
            dict(zip((a.name for a in operator._schema.arguments), positional, strict=False))[operand].requires_grad_()
            with pytest.raises(ArgumentError, match=f"{argument} requires a gradient and there is no backward pass"):
                operator(*positional, **keywords)

    def test_gradients_while_tracing(self) -> None:
        part, lse = torch.randn(4, 2, 128), torch.randn(4, 2)

        def step(part: Any) -> Any:
            out = torch.zeros_like(part)
            torch.ops.mla.merge(out, None, part, lse, part, lse, target="cpu")
            return out

        torch._dynamo.reset()
        with pytest.raises(Exception, match="prefix_output requires a gradient and there is no backward pass"):
            torch.compile(step, fullgraph=True, backend="aot_eager")(part.requires_grad_())

    def test_a_callable_weight_while_tracing(self) -> None:
        data, q, weight = job(LENGTHS)
        mask = masks.CausalMask()

        def step(q: Any) -> Any:
            project = lambda latent: latent @ weight.T  # noqa: E731
            return mla.chunked_prefill(q, data.cache, 0, project, data.input_row_offsets, mask, 0.07, target="cpu")

        torch._dynamo.reset()
        with torch.no_grad(), pytest.raises(Exception, match=r"inside torch.compile weight must be a torch.Tensor"):
            torch.compile(step, fullgraph=True, backend="aot_eager")(q)

    def test_a_mask_made_while_tracing(self) -> None:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"a mask cannot be made inside torch.compile"):
            torch.compile(lambda x: (masks.CausalMask(), x + 1)[1], fullgraph=True, backend="aot_eager")(torch.ones(2))

    def test_tables_in_another_form(self) -> None:
        positional, _ = operands("gather")
        names = [a.name for a in torch.ops.mla.gather.default._schema.arguments]
        for name, value, error in (
            ("page_table", positional[names.index("page_table")].long(), DTypeError),
            ("latent", positional[names.index("latent")][..., :500], ShapeError),
        ):
            changed = [value if one == name else x for one, x in zip(names, positional, strict=True)]
            with pytest.raises(error, match=name):
                torch.ops.mla.gather(*changed)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_crosses_as_text(name: str) -> None:
    ctx = MaskContext(3, 4, (5, 1, 9), (8, 7, 9), torch.device("cpu"), torch.Generator().manual_seed(1))
    mask = MASKS[name](ctx)
    again = Mask.from_text(*mask.operands)
    assert again.program == mask.program and again.text == mask.text
    b, h, q, k = (torch.arange(n) for n in (3, 4, 9, 9))
    grid = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q.view(-1, 1), k
    assert torch.equal(again.visible(*grid), mask.visible(*grid))
    assert torch.equal(again.bias(*grid).nan_to_num(neginf=-1e9), mask.bias(*grid).nan_to_num(neginf=-1e9))


def test_text_that_is_no_mask() -> None:
    for text in ("causal", "[]", '["x",[["le",null,[0,1]]],[],[]]'):
        with pytest.raises(ArgumentError, match="must be the text of a mask"):
            Mask.from_text(text)
    with pytest.raises(ArgumentError, match="got 0 captures"):
        Mask.from_text(masks.CausalPaddingMask(torch.tensor([1])).text)


def test_rows_of_no_sequence_stay_in_eager_and_in_a_graph() -> None:
    data, q, weight = job(LENGTHS)
    wide = torch.cat((q, q[:5]))
    output = torch.full((wide.shape[0], HEADS, 128), math.nan)
    output[-3:] = 7.0
    for more in ({"max_chunks": 9}, {"seq_lens_cpu": [c + n for c, n in LENGTHS]}, {}):
        kept = output.clone()
        mla.chunked_prefill(
            wide, data.cache, 0, weight, data.input_row_offsets, masks.CausalMask(), 0.07, buffer_token_size=48,
            output=kept, target="cpu", **more,
        )  # fmt: skip
        assert torch.equal(kept[-3:], output[-3:]) and kept[-5:-3].isnan().all() and not kept[:-5].isnan().any()
