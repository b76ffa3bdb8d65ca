"""Inputs that broke other libraries, by kind: each test runs on every target that is here.

A docstring names the public reports that the input was distilled from. "Poison" is NaN, then Inf.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import mla
from mla import BufferOverflowError, DTypeError, ShapeError, explain, masks, merge_attn_states, reference
from mla.gather import gather_latent
from mla.kv_cache import PagedKVCacheCollection
from mla.plan import prefill_plan
from tests.support.paged import make_paged, offsets_of
from tests.support.problems import Case, build, fp8_dtype
from tests.support.tolerance import assert_lse, assert_output, precision_of

TARGETS = ["cpu", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cuda", "rocm", "triton"))]
POISONS = pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
SCALE = 192**-0.5


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device(target: str) -> torch.device:
    return torch.device("cpu" if target == "cpu" else "cuda")


def agree(case: Case, target: str, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a case, compare it with the oracle, and return output and LSE."""
    problem = build(case, device, seed)
    output, lse = problem.run(target)
    expected, expected_lse = problem.expect()
    assert_output(output, expected, precision_of(case.dtypes))
    assert_lse(lse, expected_lse, precision_of(case.dtypes))
    return output, lse


def whole_job(
    cached: list[int], new: list[int], sizes: list[int], target: str, device: torch.device, *, scale: float = SCALE,
    heads: int = 4, page_size: int = 64,
) -> None:  # fmt: skip
    """Run chunked_prefill with several buffer sizes and compare each with the oracle in one shot."""
    data = make_paged(cached, new, page_size, device=device)
    random = torch.Generator().manual_seed(0)
    q = torch.randn(sum(new), heads, 192, generator=random).bfloat16().to(device)
    weight = (torch.randn(heads * 256, 512, generator=random) / 512**0.5).bfloat16().to(device)
    latent = torch.cat(data.latent).bfloat16().to(device)
    kv = (latent @ weight.T).view(-1, heads, 256)  # rounded as the buffer rounds it
    rows = torch.tensor(offsets_of([c + n for c, n in zip(cached, new, strict=True)]), device=device)
    mask = masks.CausalMask()
    operands = (q, kv[..., :128], kv[..., 128:], data.cache.layer(0), mask, data.input_row_offsets, rows, scale)
    expected, expected_lse = reference.prefill(*operands)
    for size in sizes:
        output, lse = mla.chunked_prefill(
            q, data.cache, 0, weight, data.input_row_offsets, mask, scale, buffer_token_size=size, return_lse=True,
            target=target,
        )  # fmt: skip
        assert_output(output, expected, "bf16")
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=1e-4)


# ---- empty rows, LSE, merging ----------------------------------------------------------------------------------------


def test_01_rows_without_keys_in_a_chunk(target: str, device: torch.device) -> None:
    """vllm 27491, flashinfer 4051."""
    parts = []
    for first in range(0, 512, 128):
        case = Case(lengths=((0, 7), (300, 5)), chunk=(first, 128), dtypes="fp32" if target == "cpu" else "bf16",
                    out_dtype="fp32", spare_rows=(0, 0))  # fmt: skip
        output, lse = agree(case, target, device)
        parts.append((output.contiguous(), lse.contiguous()))
        empty = lse == -math.inf
        assert (output[empty] == 0).all() and output.isfinite().all()
    assert (parts[3][1] == -math.inf).all()
    merged = []
    for order in itertools.permutations(range(4)):
        output, lse = (x.clone() for x in parts[order[0]])
        for i in order[1:]:
            merge_attn_states(output, output, lse, *parts[i], lse, target=target)
        assert output.isfinite().all() and lse.isfinite().all()
        merged.append((output, lse))
    for other in merged[1:]:
        torch.testing.assert_close(other, merged[0])


def test_01_empty_with_empty(target: str, device: torch.device) -> None:
    zero, lse = torch.zeros(3, 2, 128, device=device), torch.full((3, 2), -math.inf, device=device)
    output, output_lse = torch.full_like(zero, math.nan), torch.full_like(lse, math.nan)
    merge_attn_states(output, zero, lse, zero, lse, output_lse, target=target)
    assert (output == 0).all() and (output_lse == -math.inf).all()


def test_02_plus_infinity_is_an_empty_prefix(target: str, device: torch.device) -> None:
    """vllm PR 15492."""
    suffix = torch.randn(32, 4, 128, device=device).bfloat16()
    suffix_lse = torch.randn(32, 4, device=device)
    prefix, prefix_lse = torch.randn_like(suffix), torch.randn(32, 4, device=device)
    prefix[:16], prefix_lse[:16] = math.nan, math.inf
    output, lse = torch.empty_like(suffix), torch.empty_like(suffix_lse)
    merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, lse, target=target)
    assert torch.equal(output[:16], suffix[:16])
    torch.testing.assert_close(lse[:16], suffix_lse[:16])
    assert_output(output, reference.merge(prefix, prefix_lse, suffix, suffix_lse)[0], "bf16")


def test_03_the_lse_is_a_natural_logarithm(target: str, device: torch.device) -> None:
    """sglang 40903: prefix 3072 and suffix 64; a base-2 LSE shows 11.8 % error."""
    whole = Case(lengths=((3072, 64),), heads=16, spare_rows=(0, 0), out_dtype="fp32", mask="none")
    problem = build(whole, device)
    expected, expected_lse = problem.expect()
    parts = []
    for chunk in ((0, 3072), (3072, 64)):
        offsets = torch.tensor([chunk[0]], dtype=torch.int32, device=device)
        rows = torch.tensor([0, chunk[1]], dtype=torch.int32, device=device)
        k, v = (problem.operands[name][chunk[0] : sum(chunk)] for name in "kv")
        operands = {**problem.operands, "k": k, "v": v, "cache_row_offsets": rows}
        output = torch.empty(64, 16, 128, device=device)
        parts += mla.prefill(**operands, cache_offsets=offsets, output=output, return_lse=True, target=target)
    output, lse = torch.empty(64, 16, 128, device=device), torch.empty(64, 16, device=device)
    merge_attn_states(output, *parts, lse, target=target)
    assert_output(output, expected, "bf16")
    assert_lse(lse, expected_lse, "bf16")


@pytest.mark.parametrize("strided", ["prefix", "suffix"])
@pytest.mark.parametrize("alias", ["neither", "prefix", "suffix"])
def test_04_strides_and_aliases_of_merge(strided: str, alias: str, target: str, device: torch.device) -> None:
    """local-inference-lab/vllm PR 15, 17."""
    parts = {}
    for name in ("prefix", "suffix"):
        wide = torch.full((40, 4, 192 if name == strided else 128), math.nan, device=device).bfloat16()
        wide[..., :128] = torch.randn(40, 4, 128)
        parts[name] = wide[..., :128]
    lses = [torch.randn(40, 4, device=device) for _ in range(2)]
    expected, _ = reference.merge(parts["prefix"], lses[0], parts["suffix"], lses[1])
    output = parts.get(alias, torch.empty(40, 4, 128, device=device).bfloat16())
    merge_attn_states(output, parts["prefix"], lses[0], parts["suffix"], lses[1], target=target)
    assert_output(output, expected, "bf16")


def test_05_yarn_scale_in_three_chunks(target: str, device: torch.device) -> None:
    """TensorRT-LLM PR 19112."""
    whole_job([150], [40], [64], target, device, scale=SCALE * 1.3689**2)


@pytest.mark.parametrize(("queries", "keys"), [(2048, 1024), (8, 3), (512, 1)])
def test_06_more_queries_than_keys(queries: int, keys: int, target: str, device: torch.device) -> None:
    """flash-attention 1778, PR 978: positions before the first key are negative."""
    q = torch.randn(queries, 2, 192, device=device).bfloat16()
    k, v = torch.randn(2, keys, 2, 128, device=device).bfloat16()
    k_rope = torch.randn(keys, 1, 64, device=device).bfloat16()
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (queries, keys))
    operands = (q, k, v, k_rope, masks.CausalMask(), cu_q, cu_k, SCALE)
    output, lse = mla.prefill(*operands, return_lse=True, target=target)
    expected, expected_lse = reference.prefill(*operands)
    assert (output[: queries - keys] == 0).all() and (lse[: queries - keys] == -math.inf).all()
    assert_output(output, expected, "bf16")
    assert_lse(lse, expected_lse, "bf16")
    starts = torch.tensor([keys - queries], dtype=torch.int32, device=device)
    again = mla.prefill(q, k, v, k_rope[None], *operands[4:], start_positions=starts, target=target)
    assert torch.equal(again, output)


# ---- ragged edges ----------------------------------------------------------------------------------------------------


def test_07_the_same_request_in_every_buffer(target: str, device: torch.device) -> None:
    """vllm 26042."""
    whole_job([300, 0, 65], [50, 129, 1], [64, 128, 7 * 64, 4096], target, device)


def test_08_no_nan_of_the_output_survives(target: str, device: torch.device) -> None:
    """flash-attention 1214."""
    output, _ = agree(Case(lengths=((4, 3),), heads=16, spare_rows=(0, 0)), target, device)
    assert not output.isnan().any()


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_09_empty_and_tiny_sequences(mask: str, target: str, device: torch.device) -> None:
    """flash-attention 1537, 1619, 2562; FlashMLA 11, 92."""
    batches = [(0, 1, 0, 1), (1, 0, 0, 0, 1, 0, 0, 0), *itertools.permutations((0, 1, 63, 64, 65), 3)]
    for new in batches:
        agree(Case(lengths=tuple((0, n) for n in new), heads=1, mask=mask), target, device)


def test_09_queries_without_keys(target: str, device: torch.device) -> None:
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    problem = build(Case(lengths=((0, 5),), rope="ragged"), device)
    problem.keywords["kv_lengths"] = lengths
    output, lse = problem.run(target)
    assert (output[2:7] == 0).all() and (lse[2:7] == -math.inf).all()


def test_10_page_edges(target: str, device: torch.device) -> None:
    """flashinfer 725."""
    agree(Case(lengths=((0, 1), (60, 3), (0, 64), (64, 1))), target, device)


def test_11_a_row_too_many_and_a_row_too_few(target: str, device: torch.device) -> None:
    """sglang 29008: the tail is untouched; too short a q is an error with both numbers."""
    problem = build(Case(spare_rows=(0, 1)), device)
    output, lse = problem.run(target)
    assert output[-1].isnan().all() and lse[-1].isnan().all() and not output[:-1].isnan().any()
    problem = build(Case(spare_rows=(0, 0)), device)
    rows = problem.operands["q"].shape[0]
    problem.operands["q"] = problem.operands["q"][:-1]
    for offsets, check in ((problem.operands["valid_length"].cpu(), False), (problem.operands["valid_length"], True)):
        problem.operands["valid_length"] = offsets
        with pytest.raises(ShapeError, match=f"ends at {rows}, but q has {rows - 1} rows"):
            problem.run(target, check_indices=check)


# ---- paged cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "live"),
    [
        ((131072, 64, 576), [0, 58254, 58255, 131071]),
        ((3_900_000, 1, 576), [3_728_269, 3_728_270, 3_728_271, 3_899_999]),
    ],
    ids=["pages", "slots"],
)
def test_12_addresses_beyond_32_bits(
    shape: tuple[int, ...], live: list[int], target: str, device: torch.device, tmp_path: Path
) -> None:
    """flashinfer 3130, vllm 56037, aiter 2517: on the CPU a sparse file stands in for the memory."""
    page_size, total = shape[1], 4 * shape[1]
    if device.type == "cpu":
        size = math.prod(shape)
        pages = torch.from_file(str(tmp_path / "pages"), shared=True, size=size, dtype=torch.bfloat16).view(shape)
    else:
        pages = torch.empty(shape, dtype=torch.bfloat16, device=device)
    rows = torch.randn(4, page_size, 576).bfloat16()
    for page, content in zip(live, rows, strict=True):
        pages[page] = content.to(device)
    table = torch.tensor([live], dtype=torch.int32, device=device)
    cached = total * 3 // 4
    cache = PagedKVCacheCollection.from_pages(pages, table, torch.tensor([cached], dtype=torch.int32, device=device))
    problem = build(Case(lengths=((cached, total - cached),), page_size=page_size, spare_rows=(0, 0)), device)
    problem.operands["k_rope"] = cache.layer(0)
    output, _ = problem.run(target)
    assert_output(output, problem.expect()[0], "bf16")
    buffer = torch.empty(total, 512, dtype=torch.bfloat16, device=device)
    whole = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, total], [0])]
    gather_latent(*whole, total, cache, 0, buffer, target=target)
    assert torch.equal(buffer.cpu(), rows[..., :512].reshape(total, 512))


@POISONS
@pytest.mark.parametrize("where", ["everything", "v"])
@pytest.mark.parametrize("rope", ["paged", "batched", "ragged"])
def test_13_poison_past_the_keys(poison: float, where: str, rope: str, target: str, device: torch.device) -> None:
    """flash-attention 2374, 1745; vllm PR 53856: bitwise equal to the run with zeros there."""
    case = Case(lengths=((60, 5), (0, 65)), rope=rope)
    clean = build(Case(**{**vars(case), "poison": 0.0}), device)
    dirty = build(Case(**{**vars(case), "poison": poison}), device)
    if where == "v":
        dirty.operands.update({name: clean.operands[name] for name in ("k", "k_rope")})
    for a, b in zip(clean.run(target), dirty.run(target), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


@POISONS
def test_14_rows_past_the_plan_are_zero(poison: float, target: str, device: torch.device) -> None:
    """modular KERN-3412: a buffer length that is an upper bound."""
    data = make_paged([500], [9], 128, device=device, poison=poison, spare_pages=2)
    plan = prefill_plan(data.input_row_offsets, data.cache, 0, 640, max_chunks=1, target=target)
    for length in (640, torch.tensor([640], dtype=torch.int32, device=device)):
        buffer = torch.full((640, 512), -1.0, dtype=torch.bfloat16, device=device)
        gather_latent(plan.buffer_row_offsets[0], plan.cache_offsets[0], length, data.cache, 0, buffer, target=target)
        assert torch.equal(buffer[:509].float().cpu(), data.latent[0])
        assert (buffer[512:] == 0).all()


@pytest.mark.parametrize("layout", ["layers", "padded", "split", "blocks"])
def test_15_views_of_other_caches(layout: str, target: str, device: torch.device) -> None:
    """vllm PR 37090."""
    agree(Case(layout=layout), target, device)


@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 128, 256, 512])
def test_16_page_sizes(page_size: int, target: str, device: torch.device) -> None:
    """flashinfer 320."""
    agree(Case(page_size=page_size, csr=True, lengths=((0, 1), (500, 30), (16, 0))), target, device)


def test_16_last_page_len_beyond_the_page() -> None:
    pages = torch.zeros(2, 16, 576, dtype=torch.bfloat16)
    indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [0, 1], [17]))
    with pytest.raises(ValueError, match="kv_last_page_len must be from 1 to the page size 16"):
        PagedKVCacheCollection.from_csr(pages, indptr, indices, kv_last_page_len=last)


def test_17_the_order_of_pages_does_not_matter(target: str, device: torch.device) -> None:
    """flashinfer 3219: bitwise."""
    runs = [build(Case(order=order), device).run(target) for order in ("identity", "reversed", "scattered")]
    for other in runs[1:]:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(runs[0], other, strict=True))


# ---- limits, plan, graphs --------------------------------------------------------------------------------------------


def test_18_workspace_size_is_a_query(target: str, device: torch.device) -> None:
    """flashinfer 1419, 362."""
    problem = build(Case(), device)
    outputs = problem.outputs()
    names = ("q", "k", "v", "k_rope", "mask", "valid_length", "cache_row_offsets", "scale")
    operands = [problem.operands[name] for name in names]
    keywords: dict[str, Any] = {**problem.keywords, "lse": outputs["lse"], "target": target}
    need = mla.workspace_size("flare_mla_prefill", outputs["output"], *operands, **keywords)
    workspace = torch.full((need,), 255, dtype=torch.uint8, device=device)
    mla.flare_mla_prefill(outputs["output"], *operands, **keywords, workspace=workspace)
    assert_output(outputs["output"], problem.expect()[0], "bf16")
    if need:
        with pytest.raises(ValueError, match=f"needs {need} bytes, got {need - 1}"):
            mla.flare_mla_prefill(outputs["output"], *operands, **keywords, workspace=workspace[:-1])


def test_19_overflow_is_never_silent(target: str, device: torch.device) -> None:
    """modular: MAX truncates the plan."""
    data = make_paged([500, 500], [9, 9], 128, device=device)
    plan = prefill_plan(data.input_row_offsets, data.cache, 0, 128, max_chunks=1, target=target)
    with pytest.raises(BufferOverflowError, match="8"):
        plan.check()
    with pytest.raises(BufferOverflowError, match="8"):
        prefill_plan(data.input_row_offsets, data.cache, 0, 128, max_chunks=1, seq_lens_cpu=[509, 509], target=target)


@pytest.mark.parametrize("name", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cuda", "triton")])
def test_20_nothing_synchronises(name: str) -> None:
    """flashinfer 565, vllm PR 52657."""
    problem = build(Case(), "cuda")
    problem.run(name)
    assert problem.paged is not None
    data = problem.paged
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = prefill_plan(data.input_row_offsets, data.cache, 0, 4096, max_chunks=4, target=name)
        problem.run(name)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plan.check()


# ---- fp8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_22_bytes_are_decoded_by_their_dtype(dtype: torch.dtype, target: str, device: torch.device) -> None:
    """sglang PR 28455: 0x80 is -0 in one format and NaN in the other; 0x7f and 0xff the other way round."""
    if device.type == "cuda" and dtype != fp8_dtype(device):
        pytest.skip(f"the hardware's format is {fp8_dtype(device)}")
    pages = torch.zeros(1, 4, 576, dtype=torch.uint8, device=device)
    pages[0, :, :512] = torch.tensor([0x00, 0x80, 0x7F, 0xFF], dtype=torch.uint8, device=device)[:, None]
    table, lengths = (
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    cache = PagedKVCacheCollection.from_pages(
        pages.view(dtype), table, lengths, scales=torch.full((1, 4, 5), 2.0, device=device),
        quantization_granularity=128,
    )  # fmt: skip
    buffer = torch.empty(4, 512, dtype=torch.bfloat16, device=device)
    whole = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 4], [0])]
    gather_latent(*whole, 4, cache, 0, buffer, target=target)
    expected = {torch.float8_e4m3fn: [0.0, 0.0, math.nan, math.nan],
                torch.float8_e4m3fnuz: [0.0, math.nan, 480.0, -480.0]}[dtype]  # fmt: skip
    torch.testing.assert_close(buffer[:, 0].float().cpu(), torch.tensor(expected), equal_nan=True)


@pytest.mark.cuda
def test_22_the_format_of_another_vendor() -> None:
    problem = build(Case(dtypes="fp8"), "cuda")
    problem.operands["q"] = problem.operands["q"].float().to(torch.float8_e4m3fnuz)
    with pytest.raises(DTypeError, match="float8_e4m3fnuz"):
        problem.run("cuda")


@pytest.mark.parametrize("name", ["q_scale", "k_scales", "v_scale"])
def test_23_no_scale_is_assumed(name: str, target: str, device: torch.device) -> None:
    """TensorRT-LLM PR 16916."""
    problem = build(Case(dtypes="fp8"), device)
    del problem.keywords[name]
    with pytest.raises(ValueError, match=rf"{name} is missing.*1\.0"):
        problem.run(target)


# ---- heads, dims, dispatch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 16, 20, 32, 64, 128])
def test_24_any_number_of_heads(heads: int, target: str, device: torch.device) -> None:
    """aiter 548, vllm PR 35850."""
    agree(Case(heads=heads, lengths=((3, 5), (0, 66))), target, device)


@pytest.mark.parametrize("dims", [(191, 128), (192, 64), (96, 96)])
def test_25_dims_that_are_not_supported(dims: tuple[int, int], target: str, device: torch.device) -> None:
    """flashinfer 4299."""
    problem = build(Case(spare_rows=(0, 0)), device)
    tokens, rows = problem.operands["q"].shape[0], problem.operands["k"].shape[0]
    for name, shape in (("q", (tokens, 4, dims[0])), ("k", (rows, 4, dims[0] - 64)), ("v", (rows, 4, dims[1]))):
        problem.operands[name] = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"allowed: \(192, 128\), \(256, 256\)"):
        mla.prefill(**problem.operands, target=target)


@pytest.mark.parametrize("name", ["rocm:gfx1100", "cuda:sm_75", "rocm:gfx942"])
def test_26_every_architecture_has_an_answer(name: str) -> None:
    """aiter 4831, vllm 34641."""
    answer = explain("prefill", target=name)
    assert answer.chosen is not None or all(candidate.against for candidate in answer.candidates)
