"""A prefill call as the values that its kernels take by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mla.backends.triton.entry import search_steps
from mla.backends.triton.runtime import Kernel, Launch
from mla.problem import KV_LORA_RANK, Again, PrefillArgs, Problem

#: Bits of ``flags``, as kernels/triton/prefill.py reads them.
HAS_CACHE_OFFSETS, HAS_START_POSITIONS, HAS_KV_LENGTHS, LENGTHS_INCLUDE_NEW, V_SCALE_OF_ROWS = 1, 2, 4, 8, 16
CAPTURES, BIASES = 4, 2
#: Numbers of a query tile, as the schedule writes them.
SLOT_FIELDS = 8


def values_of(problem: Problem, args: PrefillArgs) -> dict[str, Any]:
    """Return every run-time value of a call but ``slots``; another stands in for an absent index tensor."""
    output, q, k, v, lse = args.output, args.q, args.k, args.v, args.lse
    q_rope, scale, cache = args.q_rope, args.softmax_scale, args.cache
    if scale < 0 and args.q_scale is None:  # kernels take the maximum before they scale; with scales they mind it
        q, q_rope, scale = -q, None if q_rope is None else -q_rope, -scale
    index, offsets, starts, lengths = args.cu_seqlens_q, args.cache_offsets, args.start_positions, args.kv_lengths
    output_t, output_h, _ = output.stride()
    q_t, q_h, _ = q.stride()
    k_t, k_h, _ = k.stride()
    v_t, v_h, v_d = v.stride()
    lse_t, lse_h = (0, 0) if lse is None else lse.stride()
    q_rope_t, q_rope_h = (0, 0) if q_rope is None else q_rope.stride()[:2]
    flags = 0 if offsets is None else HAS_CACHE_OFFSETS
    if starts is not None:
        flags |= HAS_START_POSITIONS
    if lengths is not None:
        flags |= HAS_KV_LENGTHS

    if cache is not None:
        rope, table, indptr, cached = cache.rope, cache.page_table, cache.page_indptr, cache.lengths
        rope_page, rope_t, _ = rope.stride()
        table_row, rope_length = table.stride(0), 0
        if cache.lengths_include_new:
            flags |= LENGTHS_INCLUDE_NEW
    else:
        assert args.rope is not None
        rope, table, indptr, cached = args.rope, None, None, index
        rope_t, table_row = rope.stride(-2), 0
        rope_page, rope_length = (rope.stride(0), rope.shape[1]) if problem.rope == "batched" else (0, 0)

    values: dict[str, Any] = {
        "output": output, "stride_output_t": output_t, "stride_output_h": output_h,
        "lse": lse, "stride_lse_t": lse_t, "stride_lse_h": lse_h,
        "q": q, "stride_q_t": q_t, "stride_q_h": q_h,
        "q_rope": q_rope, "stride_q_rope_t": q_rope_t, "stride_q_rope_h": q_rope_h,
        "k": k, "stride_k_t": k_t, "stride_k_h": k_h,
        "v": v, "stride_v_t": v_t, "stride_v_h": v_h,
        "rope": rope, "stride_rope_page": rope_page, "stride_rope_t": rope_t, "rope_length": rope_length,
        "page_table": table, "stride_table": table_row, "page_indptr": indptr, "lengths": cached,
        "cu_seqlens_q": index, "cu_seqlens_k": args.cu_seqlens_k,
        "cache_offsets": index if offsets is None else offsets,
        "start_positions": index if starts is None else starts,
        "kv_lengths": index if lengths is None else lengths,
        "sinks": args.sinks, "scale": scale, "softcap": args.softcap, "flags": flags,
        "batch_size": index.shape[0] - 1, "num_heads": q.shape[1],
        "c0": None, "c1": None, "c2": None, "c3": None,
    }  # fmt: skip
    if "v_transposed" in problem.features:
        values["stride_v_d"] = v_d
    if args.k_scales is not None:
        assert args.q_scale is not None
        values |= {"q_scale": args.q_scale, "stride_q_scale": args.q_scale.stride(0)}
        values |= {"k_scales": args.k_scales, "stride_k_scales": args.k_scales.stride(0)}
    if (v_scale := args.v_scale) is not None:
        values |= {"v_scale": v_scale, "stride_v_scale": v_scale.stride(0) if v_scale.shape[0] > 1 else 0}
        values["flags"] |= V_SCALE_OF_ROWS if v_scale.ndim == 2 else 0
    if problem.granularity:
        values |= _rope_scales(problem, args)
    for slot, capture in enumerate(args.mask.captures_on(q.device)):
        values[f"c{slot}"] = capture
    for slot, bias in enumerate(args.mask.biases):
        head = 0 if bias.shape[1] == 1 else bias.stride(1)
        values |= {f"bias{slot}": bias, f"stride_bias{slot}_b": bias.stride(0), f"stride_bias{slot}_h": head}
        values |= {f"stride_bias{slot}_q": bias.stride(2)}
        values |= {f"rows_bias{slot}": bias.shape[2], f"cols_bias{slot}": bias.shape[3]}
    return values


def _rope_scales(problem: Problem, args: PrefillArgs) -> dict[str, Any]:
    """Return the scale of each row of an fp8 rope: that of the block of columns which the rope lies in."""
    cache, granularity = args.cache, problem.granularity
    column, scales = (args.rope_scale_base, args.rope_scales) if cache is None else (KV_LORA_RANK, cache.scales)
    assert scales is not None
    page = scales.stride(0) if problem.rope != "ragged" else 0
    values: dict[str, Any] = {"stride_rope_scales_page": page, "stride_rope_scales_t": scales.stride(-2)}
    return values | {"rope_scales": scales[..., column // granularity]}


def memory_of(args: PrefillArgs, size: int) -> torch.Tensor:
    """Return memory for what one kernel of a call hands to the next: of the workspace, where there is one."""
    if args.workspace is None:
        return torch.empty(size // 4, dtype=torch.int32, device=args.q.device)
    return args.workspace[:size].view(torch.int32)


def schedule_batch(values: dict[str, Any], args: PrefillArgs, num_slots: int, schedule: Kernel) -> Launch | None:
    """Put into ``values["slots"]`` what each query tile of several sequences belongs to, worked out on the device."""
    batch = values["batch_size"]
    values["slots"] = values["cu_seqlens_q"]
    if batch == 1:
        return None
    values["slots"] = memory_of(args, slots_bytes(num_slots, batch))
    values["num_slots"], values["steps"] = num_slots, search_steps(batch)
    return schedule.launch(values, 1)


def again_with(
    before: Launch | None, attention: Launch | None, args: PrefillArgs, memory: torch.Tensor
) -> Again | None:
    """Return what launches once more a kernel that fills some memory and the attention that reads it.

    In the same workspace or else in new memory. None where a launch cannot be made again; without a kernel `before`,
    the attention alone.
    """
    if before is None or attention is None:
        return attention
    given = 0 if args.workspace is None else args.workspace.data_ptr()
    allocate = partial(torch.empty, memory.shape, dtype=memory.dtype, device=memory.device)

    def again() -> None:
        own = None if given else allocate()
        address = given if own is None else own.data_ptr()
        before(address)
        attention(address)

    return again


def slots_bytes(num_slots: int, batch_size: int) -> int:
    """Return the size of the slots, of what their making keeps behind them, and of a counter."""
    return 4 * (SLOT_FIELDS * num_slots + 2 * batch_size + 2)


def query_tiles(tokens: int, batch_size: int, block_m: int) -> int:
    """Return a bound of the query tiles of a batch, from what the host knows; exact for one sequence."""
    return -(-tokens // block_m) if batch_size == 1 else tokens // block_m + min(batch_size, tokens)
