"""Prefill on several devices, on torch.distributed: by heads, by keys; docs/scaling.md tells when and at what cost."""

from __future__ import annotations

from mla.distributed.context_parallel import context_parallel_prefill
from mla.distributed.head_parallel import head_parallel_prefill
from mla.distributed.key_shards import ContiguousKeys, InterleavedKeys, KeyShard, own_rows

__all__ = [
    "ContiguousKeys",
    "InterleavedKeys",
    "KeyShard",
    "context_parallel_prefill",
    "head_parallel_prefill",
    "own_rows",
]
