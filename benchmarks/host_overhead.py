"""Microseconds of Python that a repeated call costs beside its launch, measured with kernels that do nothing.

    python benchmarks/host_overhead.py

Index tensors on the CPU are checked by value at every call, which calls on a GPU do not pay; both figures are printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import torch

import mla
from mla import dispatch, masks
from mla.kv_cache import PagedKVCacheCollection

CALLS, ROUNDS = 100, 200


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
    batch, heads, tokens = 4, 16, 256
    cache = PagedKVCacheCollection.from_pages(
        torch.zeros(64, 64, 576, dtype=torch.bfloat16),
        torch.arange(64, dtype=torch.int32).view(batch, 16),
        torch.zeros(batch, dtype=torch.int32),
    ).layer(0)
    offsets = torch.arange(batch + 1, dtype=torch.int32) * (tokens // batch)
    q = torch.zeros(tokens, heads, 192, dtype=torch.bfloat16)
    kv = torch.zeros(tokens, heads, 256, dtype=torch.bfloat16)
    k, v, output, lse = kv[..., :128], kv[..., 128:], torch.empty_like(kv[..., :128]), torch.empty(tokens, heads)
    mask = masks.CausalMask()

    def prefill() -> None:
        mla.flare_mla_prefill(output, q, k, v, cache, mask, offsets, offsets, 0.07, lse=lse, target="cpu")

    def merge() -> None:
        mla.merge_attn_states(output, output, lse, output, lse, lse, target="cpu")

    def nothing(problem: object, target: object, device: object) -> Callable[[object], None]:
        return lambda args: None

    with mock.patch("mla.dispatch.resolve", nothing), mock.patch("mla.merge.resolve", nothing):
        dispatch.forget()
        print(f"flare_mla_prefill, values of CPU index tensors checked: {microseconds(prefill):6.1f} us")
        with mock.patch("mla._prefill_call._check_values", lambda call, device: None):
            print(f"flare_mla_prefill, as on a GPU:                         {microseconds(prefill):6.1f} us")
        print(f"merge_attn_states:                                      {microseconds(merge):6.1f} us")
    dispatch.forget()


if __name__ == "__main__":
    main()
