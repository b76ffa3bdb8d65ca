"""The prefill entries: which kernels and tile a problem gets, and their launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from mla.backends.triton import configs, runtime
from mla.backends.triton.arguments import (
    BIASES,
    CAPTURES,
    again_with,
    query_tiles,
    schedule_batch,
    slots_bytes,
    values_of,
)
from mla.backends.triton.compiler import ELEMENT_TYPES, ITEMSIZE, KernelSpec
from mla.backends.triton.configs import Tile
from mla.backends.triton.entry import Entry
from mla.backends.triton.runtime import TensorMap
from mla.errors import DTypeError, ShapeError, UnsupportedError
from mla.masks import CausalMask, NullMask
from mla.problem import QK_ROPE_HEAD_DIM, SUPPORTED_DIMS, Again, PrefillArgs, Problem

#: Sequences that the schedule orders at a time.
SCHEDULE_BLOCK = 1024

INDEX = ("cu_seqlens_q", "cu_seqlens_k", "lengths", "cache_offsets", "start_positions", "kv_lengths")


def schedule_spec(problem: Problem, block_m: int) -> KernelSpec:
    """Describe the kernel that orders a batch."""
    numbers = ("flags", "rope_length", "batch_size", "num_slots", "steps")
    types = dict.fromkeys(("slots", *INDEX), "*i32") | dict.fromkeys(numbers, "i32")
    constants = (("ROPE", problem.rope), ("BLOCK_M", block_m), ("BLOCK", SCHEDULE_BLOCK))
    return KernelSpec("prefill.schedule", tuple(types.items()), constants)


def _elements(problem: Problem, arch: str) -> dict[str, str]:
    """Return Triton's pointer types of q, k and v (``data``), of q_rope and of rope."""
    data, _, rope = problem.dtypes.partition("+")
    fp8 = "*" + configs.fp8_type(arch)
    element = fp8 if data == "fp8" else "*" + ELEMENT_TYPES[data]
    if rope == "bf16_rope":
        return {"data": element, "q_rope": "*bf16", "rope": "*bf16"}
    return {"data": element, "q_rope": element, "rope": fp8 if rope else element}


def _pointers(problem: Problem, arch: str, keys: dict[str, str | None]) -> dict[str, str | None]:
    """Return the pointer parameters that both attention kernels begin with; `keys` stands between q_rope and rope."""
    elements = _elements(problem, arch)
    assert problem.mask is not None
    types: dict[str, str | None] = {"output": "*" + ELEMENT_TYPES[problem.out_dtype]}
    types["lse"] = "*fp32" if "lse" in problem.features else None
    types |= {"q": elements["data"], "q_rope": elements["q_rope"] if "split_q" in problem.features else None}
    types |= {**keys, "rope": elements["rope"]}
    types |= {"page_table": "*i32" if problem.rope == "paged" else None, "page_indptr": "*i32" if problem.csr else None}
    types |= dict.fromkeys(INDEX, "*i32")
    types |= {"sinks": "*fp32" if "sinks" in problem.features else None, "slots": "*i32"}
    return types | {f"c{slot}": "*i32" if slot < len(problem.mask.captures) else None for slot in range(CAPTURES)}


def _has_value_map(problem: Problem, arch: str) -> bool:
    """Tell whether values that lie as columns come by the copy engine: they begin at any row, which loads do badly."""
    return "v_transposed" in problem.features and problem.alignment >= 16 and arch.startswith(("sm_9", "sm_1"))


def strides(types: dict[str, str | None], tensors: tuple[str, ...]) -> dict[str, str | None]:
    strides: dict[str, str | None] = {}
    for tensor in tensors:
        strides |= {
            f"stride_{tensor}_t": "i32" if types[tensor] else None,
            f"stride_{tensor}_h": "i64" if types[tensor] else None,
        }
    table = "i64" if types["page_table"] and not types["page_indptr"] else None
    return strides | {"stride_rope_page": "i64", "stride_rope_t": "i32", "stride_table": table}


def divisible(problem: Problem, types: dict[str, str | None]) -> tuple[tuple[str, int], ...]:
    """Return what `Problem.alignment` says about addresses, in bytes, and strides, in elements."""
    divisible = {name: problem.alignment for name in ("output", "q", "q_rope", "k", "v", "rope") if types.get(name)}
    for tensor in tuple(divisible):
        elements = max(problem.alignment // ITEMSIZE[str(types[tensor])[1:]], 1)
        strides = (f"stride_{tensor}_{axis}" for axis in ("t", "h", "d", "page"))
        divisible |= {name: elements for name in strides if types.get(name)}
    return tuple(divisible.items())


def attention_spec(problem: Problem, arch: str, tile: Tile) -> KernelSpec:
    """Describe the attention kernel of any architecture."""
    assert problem.mask is not None
    biases, features = problem.mask.biases, problem.features
    transposed = "v_transposed" in features
    element = _elements(problem, arch)["data"]
    mapped = _has_value_map(problem, arch)
    v_map = f"tensordesc<{element[1:]}[1, {problem.v_head_dim}, {tile.block_n}]>" if mapped else None
    types = _pointers(problem, arch, {"k": element, "v": element, "v_map": v_map})
    types |= {f"bias{i}": "*" + ELEMENT_TYPES[biases[i]] if i < len(biases) else None for i in range(BIASES)}
    scales = {name: name in features for name in ("q_scale", "k_scales", "v_scale")}
    scales["rope_scales"] = problem.granularity > 0
    types |= {name: "*fp32" if given else None for name, given in scales.items()}
    types |= dict.fromkeys(("batch_size", "num_heads", "flags", "rope_length"), "i32")
    types |= strides(types, ("output", "lse", "q", "q_rope", "k", "v"))
    types |= {"stride_v_t": None, "stride_v_d": "i32"} if transposed else {"stride_v_d": None}
    types |= {f"stride_{name}": "i32" if scales[name] else None for name in ("q_scale", "k_scales", "v_scale")}
    types |= {"stride_rope_scales_page": "i64" if problem.granularity else None}
    types |= {"stride_rope_scales_t": "i32" if problem.granularity else None}
    for i in range(BIASES):
        types |= {f"stride_bias{i}_{axis}": "i64" if i < len(biases) else None for axis in "bhq"}
        types |= {f"{extent}_bias{i}": "i32" if i < len(biases) else None for extent in ("rows", "cols")}
    types |= {"scale": "fp32", "softcap": "fp32" if "softcap" in features else None}
    nope = problem.qk_nope_head_dim
    constants = {
        "BIASES": len(biases),
        "SOFTCAP": "softcap" in features,
        "PRESCALED": "rope_prescaled" in features,
        "ROPE": problem.rope,
        "PAGE_SIZE": problem.page_size,
        "NOPE": min(nope, 128),
        "NOPE_TAIL": nope - min(nope, 128),
        "ROPE_DIM": QK_ROPE_HEAD_DIM,
        "V": problem.v_head_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "L2_BYTES": configs.L2_BYTES,
        "FNUZ": configs.is_fnuz(arch),
        "PV_FP8": transposed and configs.fp8_type(arch) != "u8",
        "INTERPRETED": arch == "cpu",
    }
    return KernelSpec(
        "prefill.prefill", tuple(types.items()), tuple(constants.items()), problem.mask, divisible(problem, types),
        tile.num_warps, tile.num_stages,
    )  # fmt: skip


class Prefill(Entry):
    """Attention over a ragged batch on any architecture; a batch of several sequences is ordered by a kernel before."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return why a problem cannot be served, or None."""
        if arch == "cpu":
            return Entry.check(problem, arch)
        limit = configs.shared_bytes(arch)
        if configs.choose(arch, problem, limit) is None:
            needs = [configs.tile_bytes(tile, arch, problem) for tile in configs.tiles(arch, problem)]
            return f"tiles for {arch} need {needs} bytes of shared memory; a block may have {limit}"
        return None

    @staticmethod
    def workspace_bytes(problem: Problem, *, T: int, L: int, B: int, H: int) -> int:
        """Return the bytes of the schedule of a batch, for the lowest query tile there is."""
        return slots_bytes(query_tiles(T, B, configs.LEAST_BLOCK_M), B) if B > 1 else 0

    @staticmethod
    def specs(problem: Problem, arch: str) -> tuple[KernelSpec, ...]:
        """Describe the kernels, for a device with the usual shared memory of its architecture."""
        tile = configs.choose(arch, problem, configs.shared_bytes(arch))
        assert tile is not None
        return schedule_spec(problem, tile.block_m), attention_spec(problem, arch, tile)

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PrefillArgs], Again | None]:
        """Compile; return the callable that only launches."""
        arch, limit = runtime.arch_of(device), runtime.shared_bytes(device)
        tile = configs.choose(arch, problem, limit)
        if tile is None:
            raise UnsupportedError(
                f"no tile for {arch} fits into the {limit} bytes of shared memory that {device} reports"
            )
        return Prefill.prepare_tile(problem, device, tile)

    @staticmethod
    def prepare_tile(problem: Problem, device: torch.device, tile: Tile) -> Callable[[PrefillArgs], Again | None]:
        """Compile for a tile; return the callable that only launches."""
        arch = runtime.arch_of(device)
        schedule = runtime.load(schedule_spec(problem, tile.block_m), device)
        attention = runtime.load(attention_spec(problem, arch, tile), device)
        block_m, rows = tile.block_m, max(tile.block_m, tile.block_n, problem.v_head_dim)
        mapped = _has_value_map(problem, arch)

        def run(args: PrefillArgs) -> Again | None:
            if not has_work(args):
                return None
            if arch == "cpu":
                _check_format(args)
            values = values_of(problem, args)
            check_strides(values, rows)
            if mapped:
                values["v_map"] = TensorMap.of(args.v.permute(1, 2, 0))
            num_slots = query_tiles(args.q.shape[0], values["batch_size"], block_m)
            before = schedule_batch(values, args, num_slots, schedule)
            launch = attention.launch(values, num_slots * values["num_heads"])
            return again_with(before, launch, args, values["slots"]) if reads_operands(values, args) else None

        return run

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield the usual problems, and some with everything that a kernel can do."""
        causal, features = CausalMask().program, frozenset({"lse", "batch_invariant"})
        for dims in SUPPORTED_DIMS:
            for dtypes in ("bf16", "fp16", "fp32"):
                yield Problem("prefill", dtypes, dtypes, dims, 64, rope="paged", mask=causal, features=features)
        yield Problem("prefill", "bf16", "bf16", page_size=1, csr=True, rope="paged", mask=NullMask().program)
        scaled = features | {"scales"}
        paged = partial(Problem, page_size=64, rope="paged", mask=causal)
        yield paged("prefill", "bf16+fp8_rope", "bf16", features=scaled, granularity=128)
        scaled |= {"q_scale", "k_scales", "v_scale", "v_transposed"}
        yield paged("prefill", "fp8", "bf16", features=scaled, granularity=576)
        scaled = features | {"split_q", "q_scale", "k_scales"}
        yield Problem("prefill", "fp8+bf16_rope", "bf16", rope="ragged", mask=causal, features=scaled)
        for rope in ("batched", "ragged"):
            everything = features | {"sinks", "softcap", "split_q"}
            yield Problem("prefill", "fp16", "fp32", rope=rope, mask=causal, features=everything)


def has_work(args: PrefillArgs) -> bool:
    return args.cu_seqlens_q.shape[0] > 1 and args.q.shape[0] > 0 and args.q.shape[1] > 0


def reads_operands(values: dict[str, Any], args: PrefillArgs) -> bool:
    """Tell whether kernels read what the call brought and no copy: queries that were not turned, keys to map."""
    return values["q"] is args.q and args.k.shape[0] > 0 and values["rope"].numel() > 0


def _check_format(args: PrefillArgs) -> None:
    """Refuse what the interpreter would decode wrongly; devices have one 8-bit format, which is checked before."""
    rope = args.rope if args.cache is None else args.cache.rope
    for name, tensor in (("k", args.k), ("k_rope", rope)):
        if tensor is not None and tensor.dtype == torch.float8_e4m3fnuz:
            raise DTypeError(f"{name} is {tensor.dtype}; under Triton's interpreter fp8 is {torch.float8_e4m3fn}")


def check_strides(values: dict[str, Any], rows: int) -> None:
    """Refuse what the kernels' 32-bit offsets inside a tile cannot reach."""
    names = ["stride_output_t", "stride_q_t", "stride_k_t", "stride_v_t", "stride_rope_t"]
    if "stride_v_d" in values:
        names[3] = "stride_v_d"
    if max(map(values.__getitem__, names)) * rows >= 1 << 31:
        name = max(names, key=values.__getitem__)
        tensor = name.removeprefix("stride_")[:-2]
        raise ShapeError(f"{tensor}: a row stride of {values[name]} elements is too wide for this kernel")
