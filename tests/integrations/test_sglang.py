"""SGLang's slot lists, held against the same tokens in pages of the library's own."""

from __future__ import annotations

import pytest
import torch

import mla
from mla.errors import ShapeError
from mla.integrations.sglang import cache_of_requests, cache_of_slots

HEADS, SLOTS, REQUESTS, COLUMNS = 2, 300, 6, 64
PREFIX, EXTEND = [30, 0, 7], [5, 9, 1]

DEVICES = [pytest.param("cpu", torch.float32, id="cpu"), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda)]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_an_extend_step(device: str, dtype: torch.dtype) -> None:
    totals = [p + e for p, e in zip(PREFIX, EXTEND, strict=True)]
    rows = torch.randn(sum(totals), 576).to(dtype)
    offsets = torch.tensor([0, *EXTEND], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    seq_lens = torch.tensor(totals)

    # The pool as SGLang leaves it: slots in any order, slot 0 for padding, unused ones NaN, tables with stale rows.
    slots = torch.randperm(SLOTS - 1)[: sum(totals)].int() + 1
    kv_buffer = torch.full((SLOTS, 1, 576), torch.nan, dtype=dtype)
    kv_buffer[slots.long(), 0] = rows
    req_to_token = torch.full((REQUESTS, COLUMNS), 2**30, dtype=torch.int32)
    req_pool_indices = torch.tensor([4, 1, 5])
    for request, part in zip(req_pool_indices, slots.split(totals), strict=True):
        req_to_token[request, : len(part)] = part
    kv_indptr = torch.tensor([0, *totals], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    buffer = kv_buffer.to(device)
    by_requests = cache_of_requests(
        buffer, req_to_token.to(device), req_pool_indices.to(device), seq_lens.to(device), max_cache_length=max(totals)
    )
    by_slots = cache_of_slots(buffer, kv_indptr.to(device), slots.to(device))
    assert by_requests.layer(0).latent.data_ptr() == buffer.data_ptr()
    assert by_slots.layer(0).latent.data_ptr() == buffer.data_ptr()

    pages = torch.zeros(len(totals), 64, 576, dtype=dtype)  # one page of 64 tokens a sequence
    for page, part in zip(pages, rows.split(totals), strict=True):
        page[: len(part)] = part
    table = torch.arange(len(totals))[:, None].int().to(device)
    own = mla.PagedKVCacheCollection.from_pages(pages.to(device), table, torch.tensor(PREFIX).to(device))

    q = torch.randn(sum(EXTEND), HEADS, 192).to(device, dtype)
    weight = (torch.randn(HEADS * 256, 512) * 512**-0.5).to(device, dtype)
    target = "cpu" if device == "cpu" else "gpu"
    outputs = [
        mla.chunked_prefill(q, cache, 0, weight, offsets, mla.CausalMask(), 0.1, seq_lens_cpu=totals, target=target)
        for cache in (own, by_requests, by_slots)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=tolerance, rtol=tolerance)


def test_refused() -> None:
    with pytest.raises(ShapeError, match=r"kv_buffer must have shape \(\*, 1, \*\)"):
        cache_of_slots(torch.zeros(8, 2, 576), torch.tensor([0, 1]), torch.tensor([3]))
    with pytest.raises(ShapeError, match="req_to_token must be 2-D"):
        cache_of_requests(torch.zeros(8, 1, 576), torch.zeros(4).int(), torch.tensor([0]), torch.tensor([1]))
