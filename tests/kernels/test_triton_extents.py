"""Triton prefill on a GPU where a count passes 16 bits: sequences of a batch, query tiles of one sequence."""

from __future__ import annotations

import pytest
import torch

import mla
from tests.support.tolerance import assert_lse, assert_output

pytestmark = pytest.mark.triton
#: Each is served by another entry on an NVIDIA sm_90.
DTYPES = [torch.bfloat16, torch.float32]
#: Rows of the tallest query tile.
TALLEST = 192


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda", 0)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [n, H, dv] and LSE [n, H] of n queries [n, H, 192], each over keys of its own [n, K, ...]."""
    q, k, v, rope = (x.double() for x in (q, k, v, rope))
    s = (torch.einsum("nhd,nkhd->nhk", q[..., :128], k) + torch.einsum("nhd,nkd->nhk", q[..., 128:], rope)) * scale
    return torch.einsum("nhk,nkhd->nhd", s.softmax(-1), v), s.logsumexp(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences(dtype: torch.dtype, device: torch.device) -> None:
    batch, cached, heads, page_size = 65_537, 3, 2, 4
    q = torch.randn(batch, heads, 192, device=device, dtype=dtype)
    kv = torch.randn(batch * page_size, heads, 256, device=device, dtype=dtype)
    pages = torch.randn(batch, page_size, 576, device=device, dtype=dtype)
    table = torch.randperm(batch, device=device).int()[:, None]
    lengths = torch.full((batch,), cached, dtype=torch.int32, device=device)
    cache = mla.PagedKVCacheCollection.from_pages(pages, table, lengths).layer(0)
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=device)
    k, v, scale = kv[..., :128], kv[..., 128:], 192**-0.5
    output, lse = mla.prefill(
        q, k, v, cache, mla.CausalMask(), offsets, offsets * page_size, scale, return_lse=True, target="triton"
    )
    wide = (x.reshape(batch, page_size, heads, 128) for x in (k, v))
    expected, expected_lse = attention(q, *wide, pages[table[:, 0].long(), :, 512:], scale)
    precision = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    assert_output(output, expected, precision)
    assert_lse(lse, expected_lse, precision)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_query_tiles_of_one_sequence(dtype: torch.dtype, device: torch.device) -> None:
    rows, keys, scale = 65_536 * TALLEST + 1, 40, 192**-0.5
    q = torch.randn(rows, 1, 192, device=device, dtype=dtype)
    kv, rope = (torch.randn(keys, 1, width, device=device, dtype=dtype) for width in (256, 64))
    k, v, ends = kv[..., :128], kv[..., 128:], torch.tensor([0, rows, keys], dtype=torch.int32, device=device)
    output, lse = mla.prefill(
        q, k, v, rope[None], mla.NullMask(), ends[:2], ends[::2], scale, return_lse=True, target="triton"
    )
    some = torch.randint(rows, (4096,), device=device)
    some[:2] = torch.tensor([0, rows - 1], device=device)
    shared = (x.expand(len(some), *x.shape) for x in (k, v, rope[:, 0]))
    expected, expected_lse = attention(q[some], *shared, scale)
    precision = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    assert_output(output[some], expected, precision)
    assert_lse(lse[some], expected_lse, precision)
    assert output.isfinite().all() and lse.isfinite().all()
