"""The prefill entry: which tile a problem gets, and how a call becomes the arguments of the kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from mla.backends.triton import configs
from mla.backends.triton.compiler import ELEMENT_TYPES, KernelSpec
from mla.backends.triton.configs import Tile
from mla.backends.triton.runtime import arch_of, interpreted, load, shared_bytes
from mla.errors import ShapeError
from mla.masks import CausalMask, MaskProgram, NullMask
from mla.problem import QK_ROPE_HEAD_DIM, SUPPORTED_DIMS, PrefillArgs, Problem

#: Sequences that the schedule orders at a time.
SCHEDULE_BLOCK = 1024
_HAS_CACHE_OFFSETS, _HAS_START_POSITIONS, _HAS_KV_LENGTHS, _LENGTHS_INCLUDE_NEW = 1, 2, 4, 8
_BIAS_ARGUMENTS = 6


def specs(problem: Problem, arch: str, tile: Tile) -> tuple[KernelSpec, KernelSpec]:
    """Describe the kernels of a problem: the schedule of a batch, and attention."""
    assert problem.mask is not None
    element = "*" + ELEMENT_TYPES[problem.dtypes]
    index = dict.fromkeys(("order", "cu_seqlens_q", "cu_seqlens_k", "lengths", "cache_offsets", "start_positions", "kv_lengths"), "*i32")
    schedule = KernelSpec(
        "prefill.schedule",
        (*index.items(), ("flags", "i32"), ("rope_length", "i32"), ("batch_size", "i32")),
        (("ROPE", problem.rope), ("BLOCK_M", tile.block_m), ("BLOCK", SCHEDULE_BLOCK)),
    )
    paged, split = problem.rope == "paged", "split_q" in problem.features
    types: dict[str, str | None] = {"output": "*" + ELEMENT_TYPES[problem.out_dtype]}
    types["lse"] = "*fp32" if "lse" in problem.features else None
    types |= {"q": element, "q_rope": element if split else None, "k": element, "v": element, "rope": element}
    types |= {"page_table": "*i32" if paged else None, "page_indptr": "*i32" if problem.csr else None}
    types |= {name: kind for name, kind in index.items() if name != "order"}
    types |= {"sinks": "*fp32" if "sinks" in problem.features else None, "order": "*i32"}
    types |= {f"c{slot}": "*i32" if slot < len(problem.mask.captures) else None for slot in range(4)}
    biases = problem.mask.biases
    types |= {f"bias{i}": "*" + ELEMENT_TYPES[biases[i]] if i < len(biases) else None for i in range(2)}
    types |= dict.fromkeys(("batch_size", "num_heads", "flags", "rope_length"), "i32")
    for tensor in ("output", "lse", "q", "q_rope", "k", "v"):
        types |= {f"stride_{tensor}_t": "i32" if types[tensor] else None, f"stride_{tensor}_h": "i64" if types[tensor] else None}
    types |= {"stride_rope_page": "i64", "stride_rope_t": "i32", "stride_table": "i64" if paged and not problem.csr else None}
    for i in range(2):
        types |= {f"stride_bias{i}_{axis}": "i64" if i < len(biases) else None for axis in "bhq"}
        types |= {f"{extent}_bias{i}": "i32" if i < len(biases) else None for extent in ("rows", "cols")}
    types |= {"scale": "fp32", "softcap": "fp32" if "softcap" in problem.features else None}

    itemsize = 4 if problem.dtypes == "fp32" else 2
    divisible = {name: problem.alignment for name in ("output", "q", "q_rope", "k", "v", "rope") if types[name]}
    for name in ("output_t", "output_h", "q_t", "q_h", "q_rope_t", "q_rope_h", "k_t", "k_h", "v_t", "v_h", "rope_page", "rope_t"):
        if types[f"stride_{name}"]:
            size = 4 if name.startswith("output") and problem.out_dtype == "fp32" else itemsize
            divisible[f"stride_{name}"] = max(problem.alignment // size, 1)
    nope = problem.qk_nope_head_dim
    constants = {
        "BIASES": len(biases),
        "SOFTCAP": "softcap" in problem.features,
        "ROPE": problem.rope,
        "PAGE_SIZE": problem.page_size,
        "NOPE": min(nope, 128),
        "NOPE_TAIL": nope - min(nope, 128),
        "ROPE_DIM": QK_ROPE_HEAD_DIM,
        "V": problem.v_head_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "L2_BYTES": configs.L2_BYTES,
        "UPCAST": arch == "cpu",
    }
    attention = KernelSpec(
        "prefill.prefill", tuple(types.items()), tuple(constants.items()), problem.mask, tuple(divisible.items()),
        tile.num_warps, tile.num_stages,
    )  # fmt: skip
    return schedule, attention


class Prefill:
    """Attention over a ragged batch; a batch of several sequences is ordered by a kernel of its own before."""

    @staticmethod
    def check(problem: Problem, arch: str) -> str | None:
        """Return why a problem cannot be served, or None."""
        if arch == "cpu":
            return None if interpreted() else "CPU tensors need TRITON_INTERPRET=1 in the environment"
        limit = configs.shared_bytes(arch)
        if configs.choose(arch, problem.dims, problem.dtypes, limit) is None:
            smallest = min((configs.tile_bytes(tile, arch, problem.dims, 2) for tile in configs.tiles(arch, problem.dims[0], problem.dtypes)), default=0)
            return f"no tile for {arch}: the smallest takes {smallest} bytes of shared memory, a block may have {limit}"
        return None

    @staticmethod
    def workspace_bytes(problem: Problem, *, T: int, L: int, B: int, H: int) -> int:  # noqa: N803
        """Return the bytes of the schedule of a batch."""
        return 4 * (2 * B + 1) if B > 1 else 0

    @staticmethod
    def prepare(problem: Problem, device: torch.device) -> Callable[[PrefillArgs], None]:
        """Compile; return the callable that only launches."""
        arch = arch_of(device)
        tile = configs.choose("sm_80" if arch == "cpu" else arch, problem.dims, problem.dtypes, shared_bytes(device))
        if tile is None:
            raise ShapeError(f"no tile of {problem.dims} in {problem.dtypes} fits into {shared_bytes(device)} bytes of shared memory")
        schedule_spec, attention_spec = specs(problem, arch, tile)
        schedule, attention = load(schedule_spec, device), load(attention_spec, device)
        paged, split = problem.rope == "paged", "split_q" in problem.features
        softcapped = "softcap" in problem.features
        absent = (None,) * _BIAS_ARGUMENTS

        def run(args: PrefillArgs) -> None:
            q, q_rope, k, v, output, lse = args.q, args.q_rope, args.k, args.v, args.output, args.lse
            tokens, num_heads = q.shape[0], q.shape[1]
            batch = args.cu_seqlens_q.shape[0] - 1
            if batch == 0 or tokens == 0 or num_heads == 0:
                return
            scale = args.softmax_scale
            if scale < 0:  # the kernel takes the maximum before it scales
                q, q_rope, scale = -q, None if q_rope is None else -q_rope, -scale
            strides = [output.stride(0), output.stride(1)]
            strides += (None, None) if lse is None else (lse.stride(0), lse.stride(1))
            strides += [q.stride(0), q.stride(1)]
            strides += (None, None) if q_rope is None else (q_rope.stride(0), q_rope.stride(1))
            strides += [k.stride(0), k.stride(1), v.stride(0), v.stride(1)]
            if paged:
                cache = args.cache
                assert cache is not None
                rope, table, indptr, lengths = cache.rope, cache.page_table, cache.page_indptr, cache.lengths
                strides += [rope.stride(0), rope.stride(1), None if problem.csr else table.stride(0)]
                flags, rope_length = _LENGTHS_INCLUDE_NEW * cache.lengths_include_new, 0
            else:
                assert args.rope is not None
                rope, table, indptr, lengths = args.rope, None, None, args.cu_seqlens_k
                batched = problem.rope == "batched"
                strides += [rope.stride(0) if batched else 0, rope.stride(-2), None]
                flags, rope_length = 0, rope.shape[1] if batched else 0
            for stride in (output.stride(0), q.stride(0), k.stride(0), v.stride(0), rope.stride(-2)):
                if stride * tile.block_m >= 1 << 31:
                    raise ShapeError(f"a token stride of {stride} elements is too wide for this kernel")
            stand_in = args.cu_seqlens_q
            flags |= _HAS_CACHE_OFFSETS * (args.cache_offsets is not None)
            flags |= _HAS_START_POSITIONS * (args.start_positions is not None)
            flags |= _HAS_KV_LENGTHS * (args.kv_lengths is not None)
            index = (
                stand_in, args.cu_seqlens_k, lengths,
                stand_in if args.cache_offsets is None else args.cache_offsets,
                stand_in if args.start_positions is None else args.start_positions,
                stand_in if args.kv_lengths is None else args.kv_lengths,
            )  # fmt: skip

            order = stand_in
            programs = -(-tokens // tile.block_m)
            if batch > 1:
                programs = tokens // tile.block_m + min(batch, tokens)
                if args.workspace is None:
                    order = torch.empty(2 * batch + 1, dtype=torch.int32, device=q.device)
                else:
                    order = args.workspace[: 4 * (2 * batch + 1)].view(torch.int32)
                schedule.launch((order, *index, flags, rope_length, batch), 1)

            captures = args.mask.captures_on(q.device)
            biases = [_bias_arguments(bias) for bias in args.mask.biases]
            biases += [absent] * (2 - len(biases))
            attention.launch(
                (output, lse, q, q_rope, k, v, rope, table, indptr, *index, args.sinks, order,
                 *captures, *(None,) * (4 - len(captures)), biases[0][0], biases[1][0],
                 batch, num_heads, flags, rope_length, *strides, *biases[0][1:], *biases[1][1:],
                 scale, args.softcap if softcapped else None),
                programs * num_heads,
            )  # fmt: skip

        return run

    @staticmethod
    def problems(arch: str) -> Iterator[Problem]:
        """Yield what is compiled ahead for an architecture."""
        for dims in SUPPORTED_DIMS:
            for dtypes in ("bf16", "fp16"):
                for mask in (CausalMask().program, NullMask().program):
                    for page_size in (1, 64):
                        features = frozenset({"lse"})
                        yield Problem("prefill", dtypes, dtypes, dims, page_size, rope="paged", mask=mask, features=features)


def _bias_arguments(bias: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    head = 0 if bias.shape[1] == 1 else bias.stride(1)
    return bias, bias.stride(0), head, bias.stride(2), bias.shape[2], bias.shape[3]
