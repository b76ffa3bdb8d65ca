"""plan, gather, store and merge on an NVIDIA GPU: against the reference, and with threads, streams, graphs and size."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product

import pytest
import torch

from mla.backends.reference.gather import gather as reference_gather
from mla.backends.reference.merge import merge as reference_merge
from mla.backends.reference.store import store as reference_store
from mla.dispatch import resolve
from mla.errors import DeviceError
from mla.gather import gather_latent
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection
from mla.merge import merge_attn_states
from mla.plan import PrefillPlan, generic_flare_mla_prefill_ragged_paged_plan, prefill_plan
from mla.problem import GatherArgs, MergeArgs, Problem, StoreArgs
from mla.store import store
from tests.support.paged import LAYOUTS, PagedData, make_paged, offsets_of
from tests.support.plans import EXAMPLES, Tables, lengths_only, rows_by_hand

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda", 0)


# ---- plan ----------------------------------------------------------------------------------------------------------


def on_device(cached: torch.Tensor, page_size: int, *, include_new: bool = False) -> PagedKVCacheCollection:
    """Return a cache of lengths only."""
    pages = torch.empty(1, page_size, 576, dtype=torch.bfloat16, device=DEVICE)
    table = torch.zeros(cached.shape[0], 1, dtype=torch.int32, device=DEVICE)
    return PagedKVCacheCollection.from_pages(
        pages, table, **{"seq_lens" if include_new else "cache_lengths": cached.to(DEVICE, torch.int32)}
    )


def tables_of(plan: PrefillPlan) -> Tables:
    return Tables(
        plan.buffer_row_offsets.tolist(),
        plan.cache_offsets.tolist(),
        plan.buffer_lengths.tolist(),
        int(plan.required_chunks),
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_plan_examples(name: str) -> None:
    page_size, size, chunks, cached, new, tables = EXAMPLES[name]
    cache = on_device(torch.tensor(cached), page_size)
    offsets = torch.tensor(offsets_of(new), dtype=torch.int32, device=DEVICE)
    assert tables_of(prefill_plan(offsets, cache, 0, size, max_chunks=chunks, target="cuda")) == tables


def test_plan_equals_a_second_statement(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(200):
        batch, page_size = (int(torch.randint(1, high, (), generator=random)) for high in (9, 130))
        cached, new = (torch.randint(0, 300, (batch,), generator=random).tolist() for _ in range(2))
        size, chunks = (int(torch.randint(1, high, (), generator=random)) for high in (700, 7))
        cache = on_device(torch.tensor(cached), page_size)
        offsets = torch.tensor(offsets_of(new, first=3), dtype=torch.int32, device=DEVICE)
        plan = prefill_plan(offsets, cache, 0, size, max_chunks=chunks, target="cuda")
        assert tables_of(plan) == rows_by_hand(cached, new, page_size, size, chunks)


@pytest.mark.parametrize("include_new", [False, True])
@pytest.mark.parametrize(
    ("batch", "longest", "page_size", "size", "chunks"),
    [
        (1023, 4096, 64, 16384, 40),
        (1024, 4096, 64, 16384, 1),
        (1025, 4096, 1, 999, 300),
        (65536, 100, 16, 65536, 9),
        (65536, 2**20, 64, 2**31 - 1, 50),  # sums far beyond 2^32
        (65537, 3, 128, 8192, 17),
        (200_000, 50, 32, 100_000, 5),
        (3, 1000, 64, 1, 5000),
    ],
)
def test_plan_of_large_batches(
    batch: int, longest: int, page_size: int, size: int, chunks: int, include_new: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    cached = torch.randint(0, longest, (batch,), generator=random)
    new = torch.randint(0, 8, (batch,), generator=random)
    padded = (cached + new + page_size - 1) // page_size * page_size
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), padded.cumsum(0)])
    cuts = (torch.arange(chunks) * size)[:, None]
    cache = on_device(cached + new if include_new else cached, page_size, include_new=include_new)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)]).to(DEVICE, torch.int32)
    plan = prefill_plan(offsets, cache, 0, size, max_chunks=chunks, target="cuda")
    expected = (starts - cuts).clamp(0, size)
    assert torch.equal(plan.buffer_row_offsets.cpu().long(), expected)
    held = torch.minimum((cuts - starts[:-1]).clamp(min=0), padded)
    assert torch.equal(plan.cache_offsets.cpu().long(), held)
    rest = starts[-1] - cuts[:, 0]
    assert torch.equal(plan.buffer_lengths.cpu().long(), torch.where(rest > 0, rest.clamp(max=size), -1))
    assert int(plan.required_chunks) == -(-int(starts[-1]) // size)


def test_plan_of_an_empty_batch_writes_lengths_alone() -> None:
    cache = on_device(torch.zeros(0), 64)
    rows, sizes = (torch.full(shape, 7, dtype=torch.int32, device=DEVICE) for shape in ((4, 1), (4,)))
    required = torch.full((1,), 7, dtype=torch.int32, device=DEVICE)
    generic_flare_mla_prefill_ragged_paged_plan(
        torch.zeros(1, dtype=torch.int32, device=DEVICE), cache, 0, 512, rows, rows[:, :0].contiguous(), sizes,
        required_chunks=required, target="cuda",
    )  # fmt: skip
    assert (rows.unique().tolist(), sizes.tolist(), int(required)) == ([7], [0] * 4, 0)


def test_plan_of_empty_sequences() -> None:
    cache = on_device(torch.zeros(1500), 64)
    offsets = torch.full((1501,), 9, dtype=torch.int32, device=DEVICE)
    plan = prefill_plan(offsets, cache, 0, 512, max_chunks=3, target="cuda")
    assert plan.buffer_lengths.tolist() == [-1] * 3
    assert int(plan.required_chunks) == 0
    assert not plan.buffer_row_offsets.any()
    assert not plan.cache_offsets.any()


# ---- gather and store ----------------------------------------------------------------------------------------------


def gather_both(data: PagedData, output: torch.Tensor, chunk: int = 0, size: int = 96) -> torch.Tensor:
    """Gather on the device into `output` and return what the reference makes of the same pages on the CPU."""
    plan = prefill_plan(data.input_row_offsets, data.cache, data.layer_idx, size, max_chunks=8, target="cuda")
    rows, offsets = plan.buffer_row_offsets[chunk], plan.cache_offsets[chunk]
    length = max(int(plan.buffer_lengths[chunk]), 0) + 5  # five rows of zeros behind the plan's total
    expected = output.cpu()
    gather_latent(rows, offsets, length, data.cache, data.layer_idx, output, target="cuda")
    reference_gather(GatherArgs(rows.cpu(), offsets.cpu(), length, to_cpu(data), expected))
    return expected


def to_cpu(data: PagedData) -> PagedKVCache:
    """Return the layer on the CPU, where the reference reads it."""
    layer = data.cache.layer(data.layer_idx)
    return replace(
        layer,
        latent=layer.latent.cpu(),
        rope=layer.rope.cpu(),
        page_table=layer.page_table.cpu(),
        page_indptr=None if layer.page_indptr is None else layer.page_indptr.cpu(),
        lengths=layer.lengths.cpu(),
        scales=None if layer.scales is None else layer.scales.cpu(),
    )


CACHES = [
    *product(("pages",), (torch.bfloat16,), (1, 7, 16, 64, 256), (128,)),
    *product([layout for layout in LAYOUTS if layout not in ("pages", "fused")], (torch.bfloat16,), (16,), (128,)),
    *product(("pages", "padded"), (torch.float16, torch.float32), (16,), (128,)),
    *product(("pages", "blocks"), (torch.float8_e4m3fn,), (1, 64), (64, 128, 576)),
    *product(("fused",), (torch.float8_e4m3fn,), (1, 64), (128,)),
]


def named(cache: tuple[str, torch.dtype, int, int]) -> str:
    layout, dtype, page_size, granularity = cache
    return f"{layout}-{str(dtype).removeprefix('torch.')}-p{page_size}-g{granularity}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("cache", "csr"),
    [(cache, csr) for cache, csr in product(CACHES, (False, True)) if not (csr and cache[0] == "blocks")],
    ids=lambda value: named(value) if isinstance(value, tuple) else "csr" if value else "table",
)
def test_gather_equals_the_reference(cache: tuple[str, torch.dtype, int, int], csr: bool, seed: int) -> None:
    layout, dtype, page_size, granularity = cache
    data = make_paged(
        [0, 130, 0, 77, 5], [40, 3, 0, 64, 1], page_size, device=DEVICE, dtype=dtype, layout=layout,
        granularity=granularity, csr=csr, poison=3.0, seed=seed % 1000,
    )  # fmt: skip
    buffer_dtype = torch.bfloat16 if data.cache.layer(data.layer_idx).scales is not None else dtype
    for chunk in range(3):
        output = torch.full((120, 512), float("nan"), dtype=buffer_dtype, device=DEVICE)
        expected = gather_both(data, output, chunk)
        assert same_bits(output.cpu(), expected)


@pytest.mark.parametrize("offset", [0, 1, 2, 4], ids=lambda offset: f"{2 * offset}-byte-offset")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_gather_at_any_alignment(offset: int, dtype: torch.dtype, seed: int) -> None:
    data = make_paged([100, 9], [20, 50], 16, device=DEVICE, dtype=dtype, poison=3.0, seed=seed % 1000)
    room = torch.full((120, 530), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    output = room[:, offset : offset + 512]
    expected = gather_both(data, output)
    assert same_bits(output.cpu(), expected)
    assert room[:, :offset].isnan().all()
    assert room[:, offset + 512 :].isnan().all(), "nothing beside the rows is written"


def test_gather_reads_its_length_on_the_device(seed: int) -> None:
    data = make_paged([100, 9], [20, 50], 16, device=DEVICE, poison=3.0, seed=seed % 1000)
    plan = prefill_plan(data.input_row_offsets, data.cache, 0, 512, max_chunks=2, target="cuda")
    for chunk, length in ((0, int(plan.buffer_lengths[0])), (1, 0)):
        rows, offsets = plan.buffer_row_offsets[chunk], plan.cache_offsets[chunk]
        output, expected = (torch.full((512, 512), 7.0, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        gather_latent(rows, offsets, plan.buffer_lengths[chunk : chunk + 1], data.cache, 0, output, target="cuda")
        gather_latent(rows, offsets, length, data.cache, 0, expected, target="cuda")
        assert torch.equal(output, expected)
        assert (output[length:] == 7.0).all(), "rows at and past the length are not touched"


def test_gather_and_store_address_more_than_2_31_elements() -> None:
    pages = torch.empty(2**31 // (64 * 576) + 4096, 64, 576, dtype=torch.bfloat16, device=DEVICE)
    last = pages.shape[0] - 1
    table = torch.tensor([[last, last - 1]], dtype=torch.int32, device=DEVICE)
    cache = PagedKVCacheCollection.from_pages(pages, table, torch.tensor([0], dtype=torch.int32, device=DEVICE))
    latent, rope = (torch.randn(100, width, device=DEVICE).bfloat16() for width in (512, 64))
    offsets = torch.tensor([0, 100], dtype=torch.int32, device=DEVICE)
    store(cache, 0, offsets, latent, rope, target="cuda")
    assert torch.equal(torch.cat([pages[last], pages[last - 1]])[:100], torch.cat([latent, rope], dim=1))
    output = torch.empty(128, 512, dtype=torch.bfloat16, device=DEVICE)
    rows = torch.tensor([0, 128], dtype=torch.int32, device=DEVICE)
    gather_latent(rows, torch.zeros(1, dtype=torch.int32, device=DEVICE), 100, cache, 0, output, target="cuda")
    assert torch.equal(output[:100], latent)


@pytest.mark.parametrize("seq_lens", [False, True], ids=["cached", "total"])
@pytest.mark.parametrize("cache", CACHES, ids=named)
def test_store_equals_the_reference(cache: tuple[str, torch.dtype, int, int], seq_lens: bool, seed: int) -> None:
    layout, dtype, page_size, granularity = cache
    data = make_paged(
        [0, 130, 0, 77, 5], [40, 3, 0, 64, 1], page_size, device=DEVICE, dtype=dtype, layout=layout,
        granularity=granularity, seq_lens=seq_lens, poison=3.0, seed=seed % 1000,
    )  # fmt: skip
    layer = data.cache.layer(data.layer_idx)
    row_dtype = layer.rope.dtype if layer.rope.dtype.itemsize > 1 else torch.bfloat16
    latent, rope = (torch.randn(112, width, device=DEVICE).to(row_dtype) for width in (512, 64))
    latent[3, 40:200] = 0.0  # a block of zeros in every granularity but the whole row
    latent[5] *= 1e-30  # subnormal scales
    latent[6] *= 1e30
    offsets = data.input_row_offsets + 2  # rows before the first and behind the last are not stored
    expected = to_cpu(data)
    reference_store(StoreArgs(offsets.cpu(), expected, latent.cpu(), rope.cpu()))
    store(data.cache, data.layer_idx, offsets, latent, rope, target="cuda")
    for part in ("latent", "rope", "scales"):
        got, want = getattr(layer, part), getattr(expected, part)
        assert (got is None) == (want is None)
        assert got is None or same_bits(got.cpu(), want), part


# ---- merge ---------------------------------------------------------------------------------------------------------


def merge_inputs(
    tokens: int, heads: int, v_head_dim: int, dtype: torch.dtype, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two outputs and their LSEs with every kind of empty side; empty sides hold NaN."""
    prefix = torch.randn(tokens, heads, v_head_dim, device=DEVICE).to(dtype)
    suffix = torch.randn(tokens, heads, 2, v_head_dim, device=DEVICE).to(dtype)[:, :, 1]  # strided heads
    lse = 30 * torch.randn(2, tokens, heads, device=DEVICE)
    for row, (first, second) in enumerate(product((float("-inf"), float("inf"), None), repeat=2)):
        for side, value in enumerate((first, second)):
            if value is not None:
                lse[side, row] = value
                (prefix, suffix)[side][row] = float("nan")
    if layout == "HT":
        lse = lse.transpose(1, 2).contiguous()
    return prefix, suffix, lse[0], lse[1]


@pytest.mark.parametrize("layout", ["TH", "HT"])
@pytest.mark.parametrize("shape", [(9, 1, 128), (133, 16, 128), (50, 3, 256), (300, 128, 128)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float32,) * 2, (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_merge_equals_the_reference(
    dtype: torch.dtype, out_dtype: torch.dtype, shape: tuple[int, int, int], layout: str
) -> None:
    prefix, suffix, prefix_lse, suffix_lse = merge_inputs(*shape, dtype, layout)
    output = torch.full(shape, float("nan"), dtype=out_dtype, device=DEVICE)
    lse = torch.full_like(prefix_lse, float("nan"))
    merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, lse, lse_layout=layout, target="cuda")
    expected, expected_lse = torch.empty(shape, dtype=torch.float64), torch.empty(shape[:2], dtype=torch.float64)
    flat = [x.T if layout == "HT" else x for x in (prefix_lse, suffix_lse)]
    reference_merge(MergeArgs(expected, prefix.cpu(), flat[0].cpu(), suffix.cpu(), flat[1].cpu(), expected_lse))
    got_lse = (lse.T if layout == "HT" else lse).cpu().double()
    torch.testing.assert_close(got_lse, expected_lse, rtol=1e-6, atol=1e-5)
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[out_dtype]
    torch.testing.assert_close(output.cpu().double(), expected, rtol=step, atol=1e-5)


@pytest.mark.parametrize("side", ["prefix", "suffix"])
def test_merge_in_place_equals_merge(side: str) -> None:
    prefix, suffix, prefix_lse, suffix_lse = merge_inputs(1000, 16, 128, torch.bfloat16, "TH")
    output, lse = torch.empty_like(prefix), torch.empty_like(prefix_lse)
    merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, lse, target="cuda")
    into, into_lse = (prefix, prefix_lse) if side == "prefix" else (suffix, suffix_lse)
    merge_attn_states(into, prefix, prefix_lse, suffix, suffix_lse, into_lse, target="cuda")
    assert same_bits(into, output)
    assert same_bits(into_lse, lse)


def test_merge_in_place_leaves_rows_alone_that_the_suffix_has_nothing_for() -> None:
    prefix, suffix, prefix_lse, suffix_lse = merge_inputs(100, 16, 128, torch.float32, "TH")
    prefix_lse.fill_(1.0)
    suffix_lse[::2] = float("-inf")
    prefix[::2] = torch.tensor(-0.0)  # which would be 0 after an addition of 0
    merge_attn_states(prefix, prefix, prefix_lse, suffix, suffix_lse, prefix_lse, target="cuda")
    assert prefix[::2].signbit().all() and not prefix[1::2].eq(0).all()


def test_merge_spreads_nan_lse() -> None:
    prefix, suffix, prefix_lse, suffix_lse = merge_inputs(12, 4, 128, torch.bfloat16, "TH")
    prefix_lse[11, 2] = float("nan")
    output, lse = torch.empty_like(prefix), torch.empty_like(prefix_lse)
    merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, lse, target="cuda")
    assert output[11, 2].isnan().all()
    assert lse[11, 2].isnan()
    assert int(output.isnan().any(-1).sum()) == int(lse.isnan().sum()) == 1


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_merge_at_any_alignment(offset: int) -> None:
    prefix, suffix, prefix_lse, suffix_lse = merge_inputs(77, 5, 128, torch.bfloat16, "TH")
    expected = torch.empty_like(prefix)
    merge_attn_states(expected, prefix, prefix_lse, suffix, suffix_lse, target="cuda")
    room = torch.full((77, 5, 140), 7.0, dtype=torch.bfloat16, device=DEVICE)
    output = room[:, :, offset : offset + 128]
    merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, target="cuda")
    assert same_bits(output, expected)
    assert (room[:, :, :offset] == 7.0).all()
    assert (room[:, :, offset + 128 :] == 7.0).all()


# ---- streams, graphs, threads --------------------------------------------------------------------------------------


def test_a_captured_graph_follows_the_tables(seed: int) -> None:
    data = make_paged([100, 9], [20, 50], 16, device=DEVICE, poison=3.0, seed=seed % 1000)
    layer = data.cache.layer(0)
    output = torch.zeros(256, 512, dtype=torch.bfloat16, device=DEVICE)

    def work() -> PrefillPlan:
        plan = prefill_plan(data.input_row_offsets, data.cache, 0, 256, max_chunks=1, target="cuda")
        gather_latent(
            plan.buffer_row_offsets[0], plan.cache_offsets[0], plan.buffer_lengths, data.cache, 0, output, target="cuda"
        )
        return plan

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = work()
    layer.lengths.copy_(torch.tensor([30, 2], dtype=torch.int32))
    output.fill_(7.0)
    graph.replay()
    assert plan.buffer_lengths.tolist() == [64 + 64]
    expected = torch.zeros_like(output)
    work_output = output.clone()
    output.fill_(7.0)
    work()
    expected.copy_(output)
    assert torch.equal(work_output, expected)


def test_launches_go_to_the_stream_of_the_call() -> None:
    prefix, suffix, prefix_lse, suffix_lse = merge_inputs(4096, 128, 128, torch.bfloat16, "TH")
    expected = torch.empty_like(prefix)
    merge_attn_states(expected, prefix, prefix_lse, suffix, suffix_lse, target="cuda")
    output = torch.empty_like(prefix)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, target="cuda")
    assert not side.query(), "the merge waits behind the sleep on its stream"
    side.synchronize()
    assert same_bits(output, expected)


def test_a_thread_without_a_context_launches() -> None:
    prefix, suffix, prefix_lse, suffix_lse = merge_inputs(100, 16, 128, torch.bfloat16, "TH")
    expected = torch.empty_like(prefix)
    merge_attn_states(expected, prefix, prefix_lse, suffix, suffix_lse, target="cuda")
    outputs = [torch.empty_like(prefix) for _ in range(8)]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(output: torch.Tensor) -> None:
        try:
            for _ in range(50):
                merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, target="cuda")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(output,)) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failures
    assert all(same_bits(output, expected) for output in outputs)


def test_tensors_on_the_cpu_are_refused() -> None:
    cache = lengths_only([5], 64, 1)
    with pytest.raises(DeviceError):
        prefill_plan(torch.tensor([0, 3]), cache, 0, 64, target="cuda")
    with pytest.raises(DeviceError):
        resolve(Problem("merge", "bf16", "bf16"), "cuda", torch.device("cpu"))
