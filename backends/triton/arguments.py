"""A prefill call as the values that its kernels take by name."""

from __future__ import annotations

from typing import Any

import torch

from mla.backends.triton.runtime import Kernel
from mla.problem import PrefillArgs, Problem

#: Bits of ``flags``, as kernels/triton/prefill.py reads them.
HAS_CACHE_OFFSETS, HAS_START_POSITIONS, HAS_KV_LENGTHS, LENGTHS_INCLUDE_NEW = 1, 2, 4, 8
CAPTURES, BIASES = 4, 2


def values_of(problem: Problem, args: PrefillArgs) -> dict[str, Any]:
    """Return every run-time value of a call but ``order``; another stands in for an absent index tensor."""
    output, q, k, v, lse = args.output, args.q, args.k, args.v, args.lse
    q_rope, scale = args.q_rope, args.softmax_scale
    if scale < 0:  # kernels take the maximum before they scale
        q, q_rope, scale = -q, None if q_rope is None else -q_rope, -scale
    index = args.cu_seqlens_q
    values: dict[str, Any] = {
        "output": output, "stride_output_t": output.stride(0), "stride_output_h": output.stride(1),
        "q": q, "stride_q_t": q.stride(0), "stride_q_h": q.stride(1),
        "k": k, "stride_k_t": k.stride(0), "stride_k_h": k.stride(1),
        "v": v, "stride_v_t": v.stride(0), "stride_v_h": v.stride(1),
        "lse": lse, "stride_lse_t": None, "stride_lse_h": None,
        "q_rope": q_rope, "stride_q_rope_t": None, "stride_q_rope_h": None,
        "cu_seqlens_q": index, "cu_seqlens_k": args.cu_seqlens_k,
        "cache_offsets": index if args.cache_offsets is None else args.cache_offsets,
        "start_positions": index if args.start_positions is None else args.start_positions,
        "kv_lengths": index if args.kv_lengths is None else args.kv_lengths,
        "sinks": args.sinks, "scale": scale, "softcap": args.softcap,
        "batch_size": index.shape[0] - 1, "num_heads": q.shape[1], "rope_length": 0,
    }  # fmt: skip
    if lse is not None:
        values["stride_lse_t"], values["stride_lse_h"] = lse.stride()
    if q_rope is not None:
        values["stride_q_rope_t"], values["stride_q_rope_h"] = q_rope.stride(0), q_rope.stride(1)
    flags = HAS_CACHE_OFFSETS * (args.cache_offsets is not None)
    flags += HAS_START_POSITIONS * (args.start_positions is not None) + HAS_KV_LENGTHS * (args.kv_lengths is not None)

    cache, rope = args.cache, args.rope
    if cache is not None:
        rope, table = cache.rope, cache.page_table
        flags += LENGTHS_INCLUDE_NEW * cache.lengths_include_new
        values |= {
            "page_table": table, "page_indptr": cache.page_indptr, "lengths": cache.lengths,
            "stride_table": None if cache.page_indptr is not None else table.stride(0), "stride_rope_page":
            rope.stride(0),
        }  # fmt: skip
    else:
        assert rope is not None
        batched = problem.rope == "batched"
        values |= {"page_table": None, "page_indptr": None, "lengths": index, "stride_table": None}
        values |= {"stride_rope_page": rope.stride(0) if batched else 0, "rope_length": rope.shape[1] if batched else 0}
    values |= {"rope": rope, "stride_rope_t": rope.stride(-2), "flags": flags}

    captures = args.mask.captures_on(q.device)
    for slot in range(CAPTURES):
        values[f"c{slot}"] = captures[slot] if slot < len(captures) else None
    for slot, bias in enumerate(args.mask.biases):
        head = 0 if bias.shape[1] == 1 else bias.stride(1)
        values |= {f"bias{slot}": bias, f"stride_bias{slot}_b": bias.stride(0), f"stride_bias{slot}_h": head}
        values |= {
            f"stride_bias{slot}_q": bias.stride(2),
            f"rows_bias{slot}": bias.shape[2],
            f"cols_bias{slot}": bias.shape[3],
        }
    return values


def order_batch(values: dict[str, Any], args: PrefillArgs, schedule: Kernel) -> None:
    """Put the order of a batch of several sequences into ``values["order"]``, made by a kernel on the device."""
    batch = values["batch_size"]
    values["order"] = values["cu_seqlens_q"]
    if batch > 1:
        if args.workspace is None:
            values["order"] = torch.empty(2 * batch + 1, dtype=torch.int32, device=args.q.device)
        else:
            values["order"] = args.workspace[: 4 * (2 * batch + 1)].view(torch.int32)
        schedule.launch(values, 1)


def query_tiles(args: PrefillArgs, block_m: int) -> int:
    """Return a bound of the query tiles of a batch, from what the host knows; exact for one sequence."""
    tokens, batch = args.q.shape[0], args.cu_seqlens_q.shape[0] - 1
    return -(-tokens // block_m) if batch == 1 else tokens // block_m + min(batch, tokens)
