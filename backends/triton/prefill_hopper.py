"""The prefill entry of sm_90: a persistent kernel with warps of different roles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mla.backends.triton import configs, runtime
from mla.backends.triton.arguments import query_tiles, schedule_batch, slots_bytes, values_of
from mla.backends.triton.compiler import ELEMENT_TYPES, KernelSpec
from mla.backends.triton.prefill import INDEX, Prefill, check_strides, divisible, has_work, schedule_spec, strides
from mla.backends.triton.runtime import TensorMap
from mla.masks import CausalMask, NullMask
from mla.problem import QK_ROPE_HEAD_DIM, PrefillArgs, Problem

#: Rows of a core matrix, which swizzles repeat after: a box of the copy engine holds whole ones.
_LEAST_BOX = 8
_COUNTER_BYTES = 4


def attention_spec(problem: Problem) -> KernelSpec:
    """Describe the attention kernel. It takes every parameter; absent ones are null."""
    assert problem.mask is not None
    element, rows, n = ELEMENT_TYPES[problem.dtypes], configs.HOPPER_ROWS, configs.HOPPER["BLOCK_N"]
    nope, v_head_dim = problem.qk_nope_head_dim, problem.v_head_dim
    box = max(math.gcd(problem.page_size, n), _LEAST_BOX)
    types: dict[str, str | None] = {"output": "*" + ELEMENT_TYPES[problem.out_dtype], "lse": "*fp32"}
    types |= {
        "q_map": f"map<{element}[{rows}, 1, {nope}]>",
        "q_rope_map": f"map<{element}[{rows}, 1, {QK_ROPE_HEAD_DIM}]>",
    }
    types |= {"k_map": f"map<{element}[{n}, 1, {nope}]>", "v_map": f"map<{element}[{n}, 1, {v_head_dim}]>"}
    types |= {"rope_map": f"map<{element}[1, {box}, {QK_ROPE_HEAD_DIM}]>", "v": "*" + element, "rope": "*" + element}
    types |= dict.fromkeys(("page_table", "page_indptr", *INDEX), "*i32") | {"sinks": "*fp32"}
    types |= dict.fromkeys(("slots", "c0", "c1", "c2", "c3"), "*i32")
    types |= dict.fromkeys(("batch_size", "num_heads", "num_slots", "flags", "rope_length"), "i32")
    types |= strides(types, ("output", "lse", "v")) | {"stride_table": "i64", "scale": "fp32"}
    constants = {
        "ROPE": problem.rope,
        "CSR": problem.csr,
        "SPLIT_Q": "split_q" in problem.features,
        "HAS_SINKS": "sinks" in problem.features,
        "HAS_LSE": "lse" in problem.features,
        "PAGE_SIZE": max(problem.page_size, 1),
        "BOX": box,
        "NOPE": nope,
        "ROPE_DIM": QK_ROPE_HEAD_DIM,
        "V": v_head_dim,
        **configs.HOPPER,
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
        return slots_bytes(query_tiles(T, B, configs.HOPPER["BLOCK_M"]), B) if B > 1 else _COUNTER_BYTES

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Describe the kernels."""
        return schedule_spec(problem, configs.HOPPER["BLOCK_M"]), attention_spec(problem)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PrefillArgs], None]:
        """Compile; return the callable that only launches."""
        schedule, attention = (
            runtime.load(spec, device) for spec in PrefillHopper.specs(problem, runtime.arch_of(device))
        )
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        block_m, block_n = configs.HOPPER["BLOCK_M"], configs.HOPPER["BLOCK_N"]

        def run(args: PrefillArgs) -> None:
            if not has_work(args):
                return
            values = values_of(problem, args)
            check_strides(values, block_n)
            values |= _maps(problem, values)
            # Hidden scores are minus infinity before they are scaled, and minus infinity times zero is no number.
            values["scale"] = max(values["scale"], 1e-30)
            num_slots = query_tiles(args.q.shape[0], values["batch_size"], block_m)
            schedule_batch(values, args, num_slots, schedule)
            items = num_slots * values["num_heads"]
            if values["batch_size"] == 1:
                values["num_slots"] = num_slots
                if items > multiprocessors:
                    values["slots"] = _counter(args)
            attention.launch(values, min(items, multiprocessors))

        return run

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield the usual problems, and one with everything that the kernel can do."""
        if arch != "sm_90a":
            return
        features = frozenset({"lse", "batch_invariant"})
        for dtypes in ("bf16", "fp16"):
            for mask in (CausalMask().program, NullMask().program):
                yield Problem("prefill", dtypes, dtypes, page_size=64, rope="paged", mask=mask, features=features)
        yield Problem("prefill", "bf16", "bf16", page_size=1, csr=True, rope="paged", mask=NullMask().program)
        everything = features | {"sinks", "split_q"}
        for rope in ("batched", "ragged"):
            yield Problem("prefill", "bf16", "fp32", rope=rope, mask=CausalMask().program, features=everything)


def _maps(problem: Problem, values: dict[str, Any]) -> dict[str, TensorMap]:
    """Return the tensors that the copy engine reads. A map has at least one row: zeros stand for none."""
    q, k, v, rope = (values[name] for name in ("q", "k", "v", "rope"))
    if k.shape[0] == 0:
        k, v = k.new_zeros(1, *k.shape[1:]), v.new_zeros(1, *v.shape[1:])
    if problem.rope == "ragged":
        rope = rope[None]
    if rope.numel() == 0:
        rope = rope.new_zeros(1, 1, QK_ROPE_HEAD_DIM)
    tensors = {"q_map": q, "q_rope_map": q if values["q_rope"] is None else values["q_rope"]}
    tensors |= {"k_map": k, "v_map": v, "rope_map": rope}
    return {name: TensorMap(tensor) for name, tensor in tensors.items()}


def _counter(args: PrefillArgs) -> torch.Tensor:
    if args.workspace is None:
        return torch.zeros(1, dtype=torch.int32, device=args.q.device)
    return args.workspace[:_COUNTER_BYTES].view(torch.int32).zero_()
