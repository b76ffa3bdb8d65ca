"""Microseconds of Python that a repeated call costs beside its launch, measured with kernels that do nothing.

    python benchmarks/host_overhead.py

The tensors are on the CPU, but no value of an index tensor is checked, as none is on a GPU, and nothing is projected.
The second column is the same call as an operator of torch.ops.mla, which is what compiled code calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import torch

import mla
from mla import dispatch, masks
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection

CALLS, ROUNDS = 20, 50
HEADS, TOKENS, BATCH = 1, 8, 4
MODULES = ("dispatch", "plan", "gather", "store", "merge")


def microseconds(call: Callable[[], object]) -> float:
    """Return the best mean of many short rounds, so that other work on the machine does not count."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e6


def main() -> None:
    torch.set_grad_enabled(False)
    place = {"dtype": torch.bfloat16}
    lengths = torch.zeros(BATCH, dtype=torch.int32)
    table = torch.zeros(BATCH, 16, dtype=torch.int32)
    pages = PagedKVCacheCollection.from_pages(torch.zeros(64, 64, 576, **place), table, lengths)
    cache, offsets = pages.layer(0), torch.zeros(BATCH + 1, dtype=torch.int32)
    q, kv = torch.zeros(TOKENS, HEADS, 192, **place), torch.zeros(TOKENS, HEADS, 256, **place)
    k, v, output = kv[..., :128], kv[..., 128:], torch.zeros(TOKENS, HEADS, 128, **place)
    lse = torch.zeros(TOKENS, HEADS)
    latent, rope = torch.zeros(TOKENS, 512, **place), torch.zeros(TOKENS, 64, **place)
    weight = torch.zeros(HEADS * 256, 512, **place)
    mask, ops, on = masks.CausalMask(), torch.ops.mla, {"target": "cpu"}

    def nothing(problem: object, target: object, device: object) -> Callable[[object], None]:
        return lambda args: None

    patches = [
        *(mock.patch(f"mla.{name}.resolve", nothing) for name in MODULES),
        *(mock.patch(f"mla.{name}.readable", lambda tensor: False) for name in ("_check", "gather")),
        mock.patch.object(PagedKVCache, "check_indices", lambda self, offsets: None),
        mock.patch("mla._prefill_call._check_values", lambda call, device: None),
        mock.patch("mla._chunk_buffer.up_project", lambda latent, weight, output: None),
    ]
    for patch in patches:
        patch.start()
    dispatch.forget()
    plan = mla.prefill_plan(offsets, pages, 0, 128, max_chunks=4, **on)
    tables = plan.buffer_row_offsets, plan.cache_offsets, plan.buffer_lengths, plan.required_chunks
    first = tables[0][0], tables[1][0], tables[2][:1]
    rows = {
        "generic_..._plan": (
            lambda: mla.generic_flare_mla_prefill_ragged_paged_plan(
                offsets, pages, 0, 128, *tables[:3], required_chunks=tables[3], **on
            ),
            lambda: ops.plan(*tables, offsets, *cache.operands, 128, "cpu"),
        ),
        "gather (of the decompression)": (
            lambda: mla.gather.gather_layer(*first, cache, latent[:128], "cpu"),
            lambda: ops.gather(latent[:128], *first[:2], None, first[2], *cache.operands, "cpu"),
        ),
        "store": (
            lambda: pages.store(0, offsets, latent, rope, **on),
            lambda: ops.store(*cache.operands, offsets, latent, rope, "cpu"),
        ),
        "flare_mla_prefill": (
            lambda: mla.flare_mla_prefill(output, q, k, v, cache, mask, offsets, offsets, 0.07, lse=lse, **on),
            lambda: ops.prefill(
                output, q, None, k, v, *cache.operands, *mask.operands, offsets, offsets, 0.07, lse=lse, **on
            ),
        ),
        "merge_attn_states": (
            lambda: mla.merge_attn_states(output, output, lse, output, lse, lse, **on),
            lambda: ops.merge(output, lse, output, lse, output, lse, **on),
        ),
        "chunked_prefill, 1 chunk": (
            lambda: mla.chunked_prefill(
                q, pages, 0, weight, offsets, mask, 0.07, output=output, buffer_token_size=1 << 12, max_chunks=1, **on
            ),
            lambda: ops.chunked_prefill(
                output, None, None, q, *cache.operands, weight, offsets, *mask.operands, 0.07, None, None, None, None,
                1 << 12, None, 1, None, None, None, 0.0, True, "cpu",
            ),
        ),
        "chunked_prefill, 4 chunks": (
            lambda: mla.chunked_prefill(
                q, pages, 0, weight, offsets, mask, 0.07, output=output, buffer_token_size=128, max_chunks=4, **on
            ),
            lambda: ops.chunked_prefill(
                output, None, None, q, *cache.operands, weight, offsets, *mask.operands, 0.07, None, None, None, None,
                128, None, 4, None, None, None, 0.0, True, "cpu",
            ),
        ),
    }  # fmt: skip
    print(f"{'':32}{'function':>12}{'operator':>12}   us")
    for name, (function, operator) in rows.items():
        print(f"{name:32}{microseconds(function):12.1f}{microseconds(operator):12.1f}", flush=True)
    for patch in patches:
        patch.stop()
    dispatch.forget()


if __name__ == "__main__":
    main()
