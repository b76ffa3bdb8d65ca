"""The prefill entry of sm_90: a persistent kernel with warps of different roles."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from mla.backends.triton import configs, runtime
from mla.backends.triton.arguments import (
    again_with,
    memory_of,
    query_tiles,
    schedule_batch,
    slots_bytes,
    values_of,
)
from mla.backends.triton.compiler import ELEMENT_TYPES, KernelSpec
from mla.backends.triton.configs import HopperConfig
from mla.backends.triton.prefill import (
    INDEX,
    Prefill,
    check_strides,
    divisible,
    has_work,
    reads_operands,
    schedule_spec,
    strides,
)
from mla.backends.triton.runtime import Kernel, TensorMap
from mla.masks import CausalMask, NullMask
from mla.problem import QK_ROPE_HEAD_DIM, Again, PrefillArgs, Problem

#: Rows after which a swizzle begins anew: a box of the copy engine holds whole such groups.
_LEAST_BOX = 8
_COUNTER_BYTES = 4
#: Columns of a box of fp8 values that lie as rows and are transposed, keys of one of columns that begin at any row.
_PIECE, _CHUNK = 32, 16
_LEAST_ROWS = 16  # whose stride, where they are columns of bytes, the copy engine takes
_SCALES = ("q_scale", "k_scales", "v_scale", "rope_scales")
#: Writes the zero from which items of one sequence are counted; of a batch the schedule does.
CLEAR = KernelSpec("prefill.clear", (("slots", "*i32"),), num_warps=1)


def _elements(problem: Problem) -> tuple[str, str]:
    """Return Triton's types of q, k and v, and of the rope on both sides."""
    data, _, rope = problem.dtypes.partition("+")
    element = configs.fp8_type("sm_90a") if data == "fp8" else ELEMENT_TYPES[data]
    return element, ELEMENT_TYPES["bf16"] if rope == "bf16_rope" else element


def attention_spec(problem: Problem, config: HopperConfig, v_scales: str | None) -> KernelSpec:
    """Describe the attention kernel. It takes every parameter; absent ones are null.

    `v_scales` tells what values are scaled by: "heads" (one for all of them is that, too), "rows", or None.
    """
    assert problem.mask is not None
    n, rows, features = config.block_n, configs.HOPPER_ROWS, problem.features
    nope, v_head_dim = problem.qk_nope_head_dim, problem.v_head_dim
    fp8, columns = problem.dtypes.startswith("fp8"), "v_transposed" in features
    # In fp8 every second row of keys and of rope comes by one map, the others by another.
    maps = 2 if fp8 else 1
    (element, rope), box = _elements(problem), max(math.gcd(problem.page_size, n), maps * _LEAST_BOX)
    k_map = f"map<{element}[1, {n // maps}, {nope}]>"
    rope_map = f"map<{rope}[1, {box // maps}, {QK_ROPE_HEAD_DIM}]>"
    v_map = f"[1, {v_head_dim}, {n}]" if columns else f"[{n}, 1, {_PIECE if fp8 else v_head_dim}]"
    v_chunk_map = f"map<{element}[1, {v_head_dim}, {_CHUNK}]>" if columns else None
    types: dict[str, str | None] = {"output": "*" + ELEMENT_TYPES[problem.out_dtype], "lse": "*fp32"}
    types |= {"q_map": f"map<{element}[{rows}, 1, {nope}]>"}
    types |= {"q_rope_map": f"map<{rope}[{rows}, 1, {QK_ROPE_HEAD_DIM}]>"}
    types |= {"k_map": k_map, "k_odd_map": k_map if fp8 else None, "v_map": f"map<{element}{v_map}>"}
    types |= {"v_chunk_map": v_chunk_map, "rope_map": rope_map, "rope_odd_map": rope_map if fp8 else None}
    types |= {"rope": "*" + rope}
    types |= dict.fromkeys(("page_table", "page_indptr", *INDEX), "*i32") | dict.fromkeys(("sinks", *_SCALES), "*fp32")
    types |= dict.fromkeys(("slots", "c0", "c1", "c2", "c3"), "*i32")
    types |= dict.fromkeys(("batch_size", "num_heads", "num_slots", "flags", "rope_length"), "i32")
    types |= strides(types, ("output", "lse")) | {"stride_table": "i64"}
    types |= dict.fromkeys(("stride_q_scale", "stride_k_scales", "stride_v_scale"), "i32")
    types |= {"stride_rope_scales_page": "i64", "stride_rope_scales_t": "i32", "scale": "fp32"}
    constants = {
        "ROPE": problem.rope,
        "CSR": problem.csr,
        "SPLIT_Q": "split_q" in features,
        "HAS_SINKS": "sinks" in features,
        "HAS_LSE": "lse" in features,
        "PRESCALED": "rope_prescaled" in features,
        "V_SCALES": v_scales,
        "PAGE_SIZE": max(problem.page_size, 1),
        "BOX": box,
        "NOPE": nope,
        "ROPE_DIM": QK_ROPE_HEAD_DIM,
        "V": v_head_dim,
        "V_COLUMNS": columns,
        **{name.upper(): value for name, value in asdict(config).items()},
        "L2_BYTES": configs.L2_BYTES,
    }
    return KernelSpec(
        "prefill_hopper.prefill", tuple(types.items()), tuple(constants.items()), problem.mask,
        divisible(problem, types), gluon=True,
    )  # fmt: skip


class PrefillHopper(Prefill):
    """The same for sm_90, with warps of different roles; as many programs as the device has multiprocessors."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return why a problem cannot be served, or None."""
        try:
            import triton.experimental.gluon  # noqa: F401
        except ImportError as error:
            return f"this Triton has no Gluon ({error})"
        return None

    @staticmethod
    def workspace_bytes(problem: Problem, *, T: int, L: int, B: int, H: int) -> int:
        """Return the bytes of the schedule of a batch and of the counter of items."""
        lowest = min(config.block_m for config in configs.hopper(problem))
        return slots_bytes(query_tiles(T, B, lowest), B) if B > 1 else _COUNTER_BYTES

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Describe the kernels, for both heights of query tiles; for the lower also where rows of v have scales."""
        low, first = configs.hopper(problem)[0], _kinds_of_v_scales(problem)[0]
        specs = [
            spec
            for config in configs.hopper(problem)
            for spec in (schedule_spec(problem, config.block_m), attention_spec(problem, config, first))
        ]
        specs += [attention_spec(problem, low, v_scales) for v_scales in _kinds_of_v_scales(problem)[1:]]
        return (*specs, CLEAR)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PrefillArgs], Again | None]:
        """Compile for short sequences; return the callable that launches.

        Taller query tiles are compiled when a call comes whose sequences are long enough for them, and a kernel for
        scales of rows of v when a call brings some.
        """
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        low, *tall = configs.hopper(problem)
        absent = _absent()

        @functools.cache
        def kernels(config: HopperConfig, v_scales: str | None) -> tuple[Kernel, Kernel]:
            specs = schedule_spec(problem, config.block_m), attention_spec(problem, config, v_scales)
            return runtime.load(specs[0], device), runtime.load(specs[1], device)

        kernels(low, _kinds_of_v_scales(problem)[0])
        clear = runtime.load(CLEAR, device)

        def run(args: PrefillArgs) -> Again | None:
            if not has_work(args):
                return None
            values = absent | values_of(problem, args)
            tokens, batch = args.q.shape[0], values["batch_size"]
            config = tall[0] if tall and tokens >= configs.HOPPER_TALL_TOKENS * batch else low
            v_scales = None if args.v_scale is None else "rows" if args.v_scale.ndim == 2 else "heads"
            schedule, attention = kernels(config, v_scales)
            check_strides(values, config.block_n)
            values |= _maps(problem, values)
            if args.q_scale is None:
                # Hidden scores are minus infinity before they are scaled, and minus infinity times zero is no number.
                values["scale"] = max(values["scale"], 1e-30)
            num_slots = query_tiles(tokens, batch, config.block_m)
            before = schedule_batch(values, args, num_slots, schedule)
            items = num_slots * values["num_heads"]
            if batch == 1:
                values["num_slots"] = num_slots
                if items > multiprocessors:
                    values["slots"] = memory_of(args, _COUNTER_BYTES)
                    before = clear.launch(values, 1)
            launch = attention.launch(values, min(items, multiprocessors))
            return again_with(before, launch, args, values["slots"]) if reads_operands(values, args) else None

        return run

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield the usual problems, and some with everything that the kernel can do."""
        if arch != "sm_90a":
            return
        causal, features = CausalMask().program, frozenset({"lse", "batch_invariant"})
        usual: dict[str, Any] = {"page_size": 64, "rope": "paged"}
        yield Problem("prefill", "bf16", "bf16", mask=causal, features=features, **usual)
        yield Problem("prefill", "fp16", "fp16", mask=NullMask().program, features=features, **usual)
        yield Problem("prefill", "bf16", "bf16", page_size=1, csr=True, rope="paged", mask=NullMask().program)
        everything = features | {"sinks", "split_q"}
        yield Problem("prefill", "bf16", "fp32", rope="ragged", mask=causal, features=everything)
        fp8 = features | {"q_scale", "k_scales", "v_transposed"}
        scaled, split = fp8 | {"scales", "v_scale"}, fp8 - {"v_transposed"} | {"split_q", "rope_prescaled"}
        yield Problem("prefill", "fp8", "bf16", mask=causal, features=scaled, granularity=576, **usual)
        yield Problem("prefill", "fp8+bf16_rope", "bf16", mask=causal, features=split, **usual)


def _kinds_of_v_scales(problem: Problem) -> tuple[str | None, ...]:
    return ("heads", "rows") if "v_scale" in problem.features else (None,)


def _absent() -> dict[str, Any]:
    """Return values for what a call without scales does not bring."""
    strides = ("q_scale", "k_scales", "v_scale", "rope_scales_page", "rope_scales_t")
    return dict.fromkeys(_SCALES) | {f"stride_{name}": 0 for name in strides}


def _maps(problem: Problem, values: dict[str, Any]) -> dict[str, TensorMap]:
    """Return the tensors that the copy engine reads. A map is never empty: zeros stand for no rows."""
    q, k, v, rope = (values[name] for name in ("q", "k", "v", "rope"))
    if k.shape[0] == 0:
        k, v = k.new_zeros(_LEAST_ROWS, *k.shape[1:]), v.new_zeros(*v.shape[1:], _LEAST_ROWS).permute(2, 0, 1)
        v = v if "v_transposed" in problem.features else v.contiguous()
    if problem.rope == "ragged":
        rope = rope[None]
    if rope.numel() == 0:
        rope = rope.new_zeros(1, 1, QK_ROPE_HEAD_DIM)
    maps = {"q_map": TensorMap.of(q), "q_rope_map": TensorMap.of(q if values["q_rope"] is None else values["q_rope"])}
    maps["v_map"] = TensorMap.of(v.permute(1, 2, 0) if "v_transposed" in problem.features else v)
    maps["v_chunk_map"] = maps["v_map"]
    (rows, heads, width), (stride_t, stride_h, _) = k.shape, k.stride()
    maps["k_map"] = TensorMap(k.data_ptr(), (heads, rows, width), (stride_h, stride_t, 1))
    maps["rope_map"] = TensorMap.of(rope)
    if problem.dtypes.startswith("fp8"):
        maps["k_map"], maps["k_odd_map"] = _every_second_row(maps["k_map"], k.element_size())
        maps["rope_map"], maps["rope_odd_map"] = _every_second_row(maps["rope_map"], rope.element_size())
    return maps


def _every_second_row(whole: TensorMap, itemsize: int) -> tuple[TensorMap, TensorMap]:
    """Return maps of the even and of the odd rows; of a single row, the even one stands for the odd."""
    (outer, rows, width), (stride, stride_t, _) = whole.shape, whole.strides
    strides = (stride, 2 * stride_t, 1)
    even = TensorMap(whole.address, (outer, (rows + 1) // 2, width), strides)
    odd = TensorMap(whole.address + stride_t * itemsize, (outer, rows // 2, width), strides)
    return even, odd if rows > 1 else even
