"""Prefill attention on the six shapes of mla/data/shapes.yaml, beside FlashAttention-4 and cuDNN in the same run.

    python benchmarks/prefill_h200.py --json result.json [--shapes 8k,ragged] [--peers fa4,cudnn]

Ours reads what the specification gives it: k and v as strided views of one up-projection, roped keys from pages in
random order, nothing concatenated. The peers get their 192-wide K ready-made (``fa4``; ``cudnn``, its ragged attention)
and, in a row more, FlashAttention-4 has to make it (``fa4+concat``). Medians of events with the L2 cache flushed
between calls; FLOPs = 2 * (192 + 128) * H * visible pairs. All are checked first and then timed in turn, several
rounds: at the power limit an implementation that comes after heavy work reads 2 to 4 % low.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import environment

import mla
from mla.cli.steps import Step, find_shapes

PAGE_SIZE = 64
NOPE, ROPE, V_DIM = 128, 64, 128
SHAPES = find_shapes("gpu")


class Inputs:
    """The tensors of one shape, on the GPU."""

    def __init__(self, shape: Step, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.shape = shape
        heads, new, keys = shape.heads, list(shape.new), list(shape.lengths)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)

        def offsets(counts: list[int]) -> torch.Tensor:
            return torch.tensor([0, *counts], device="cuda").cumsum(0).int()

        self.q = normal(sum(new), heads, NOPE + ROPE)
        self.kv = normal(sum(keys), heads, NOPE + V_DIM)
        self.k, self.v = self.kv[..., :NOPE], self.kv[..., NOPE:]
        pages = [-(-k // PAGE_SIZE) for k in keys]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed))
        table = torch.zeros(len(keys), max(pages), dtype=torch.int32)
        for row, first, count in zip(table, torch.tensor([0, *pages]).cumsum(0).tolist(), pages, strict=False):
            row[:count] = order[first : first + count]
        cache = normal(sum(pages), PAGE_SIZE, 576)
        sequences = zip(table.cuda(), pages, keys, strict=True)
        self.rope = torch.cat([cache[row[:count]].reshape(-1, 576)[:k, 512:] for row, count, k in sequences])
        cached = torch.tensor(shape.cached, dtype=torch.int32, device="cuda")
        self.cache = mla.PagedKVCacheCollection.from_pages(cache, table.cuda(), cached).layer(0)
        self.offsets_q, self.offsets_k = offsets(new), offsets(keys)
        self.longest = max(new), max(keys)
        self.mask = shape.make_mask()
        self.scale = (NOPE + ROPE) ** -0.5
        self.output = torch.empty(sum(new), heads, V_DIM, device="cuda", dtype=torch.bfloat16)
        self.lse = torch.empty(sum(new), heads, device="cuda")

    def wide_keys(self) -> torch.Tensor:
        return torch.cat([self.k, self.rope[:, None].expand(-1, self.shape.heads, -1)], -1)

    def error(self, output: torch.Tensor) -> float:
        """Relative Frobenius error of the first and last head against float64."""
        difference = norm = 0.0
        first_q = first_k = 0
        for new, keys in zip(self.shape.new, self.shape.lengths, strict=True):
            here = slice(first_k, first_k + keys)
            for head in {0, self.shape.heads - 1}:
                k = torch.cat([self.k[here, head], self.rope[here]], -1).double()
                v = self.v[here, head].double()
                for start in range(0, new, 2048):
                    rows = slice(first_q + start, first_q + min(new, start + 2048))
                    scores = self.q[rows, head].double() @ k.T * self.scale
                    if self.shape.causal:
                        position = torch.arange(start, min(new, start + 2048), device="cuda")[:, None] + keys - new
                        scores.masked_fill_(torch.arange(keys, device="cuda") > position, -math.inf)
                    expected = torch.softmax(scores, -1) @ v
                    difference += (output[rows, head].double() - expected).square().sum().item()
                    norm += expected.square().sum().item()
            first_q, first_k = first_q + new, first_k + keys
        return math.sqrt(difference / norm)


def ours(inputs: Inputs, target: str = "cuda") -> Callable[[], torch.Tensor]:
    """Return a call of the library with everything as a serving engine has it."""

    def call() -> torch.Tensor:
        mla.prefill(
            inputs.q, inputs.k, inputs.v, inputs.cache, inputs.mask, inputs.offsets_q, inputs.offsets_k, inputs.scale,
            output=inputs.output, lse=inputs.lse, target=target,
        )  # fmt: skip
        return inputs.output

    return call


def fa4(inputs: Inputs, *, concat: bool) -> Callable[[], torch.Tensor]:
    """Return a call of FlashAttention-4's kernel, with its wide K made before or in the call."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    v = inputs.v.contiguous()
    ready = None if concat else inputs.wide_keys()

    def call() -> torch.Tensor:
        out = flash_attn_varlen_func(
            inputs.q, inputs.wide_keys() if ready is None else ready, v,
            cu_seqlens_q=inputs.offsets_q, cu_seqlens_k=inputs.offsets_k,
            max_seqlen_q=inputs.longest[0], max_seqlen_k=inputs.longest[1],
            softmax_scale=inputs.scale, causal=inputs.shape.causal,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return call


def cudnn(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Return a call of cuDNN's ragged attention, with its wide K and its plan made before."""
    import cudnn as library

    bf16, heads, batch = library.data_type.BFLOAT16, inputs.shape.heads, len(inputs.shape.new)
    handle = library.create_handle()
    library.set_stream(handle, torch.cuda.current_stream().cuda_stream)
    graph = library.pygraph(
        io_data_type=bf16, intermediate_data_type=library.data_type.FLOAT, compute_data_type=library.data_type.FLOAT,
        handle=handle,
    )  # fmt: skip
    buffers: dict[Any, torch.Tensor] = {}

    def operand(tensor: torch.Tensor) -> Any:
        name = graph.tensor_like(tensor)
        buffers[name] = tensor
        return name

    def layout(rows: torch.Tensor, longest: int, width: int) -> tuple[list[int], list[int], Any]:
        """Return dim, stride and the first element of each sequence, which replaces the batch's stride."""
        stride = [longest * heads * width, width, heads * width, 1]
        return [batch, heads, longest, width], stride, operand((rows * (heads * width)).view(-1, 1, 1, 1))

    def ragged(tensor: torch.Tensor, rows: torch.Tensor, longest: int) -> Any:
        dim, stride, first = layout(rows, longest, tensor.shape[-1])
        name = graph.tensor(dim=dim, stride=stride, data_type=bf16)
        name.set_ragged_offset(first)
        buffers[name] = tensor
        return name

    cached = any(inputs.shape.cached)
    corner = library.diagonal_alignment.BOTTOM_RIGHT if cached else library.diagonal_alignment.TOP_LEFT
    out, _ = graph.sdpa(
        q=ragged(inputs.q, inputs.offsets_q, inputs.longest[0]),
        k=ragged(inputs.wide_keys(), inputs.offsets_k, inputs.longest[1]),
        v=ragged(inputs.v.contiguous(), inputs.offsets_k, inputs.longest[1]),
        generate_stats=False, attn_scale=inputs.scale, use_padding_mask=True,
        seq_len_q=operand(inputs.offsets_q.diff().view(-1, 1, 1, 1)),
        seq_len_kv=operand(inputs.offsets_k.diff().view(-1, 1, 1, 1)),
        diagonal_alignment=corner, diagonal_band_right_bound=0 if inputs.shape.causal else None,
    )  # fmt: skip
    dim, stride, first = layout(inputs.offsets_q, inputs.longest[0], V_DIM)
    out.set_output(True).set_dim(dim).set_stride(stride).set_data_type(bf16).set_ragged_offset(first)
    buffers[out] = torch.empty_like(inputs.output)
    graph.build([library.heur_mode.A, library.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)

    def call() -> torch.Tensor:
        graph.execute(buffers, workspace, handle=handle)
        return buffers[out]

    return call


def check(inputs: Inputs, call: Callable[[], torch.Tensor]) -> float:
    """Return the relative error of an implementation; NaN or one beyond the specification's bound raises."""
    inputs.output.fill_(math.nan)
    error = inputs.error(call())
    if not error <= 4e-3:
        raise ArithmeticError(f"relative error {error:.1e}")
    return error


def milliseconds(call: Callable[[], torch.Tensor], seconds: float = 0.35) -> list[float]:
    """Time calls by events, L2 flushed before each, which takes longer than a call's host side: the GPU never waits."""
    flush = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")

    def times(repeats: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    return times(min(1000, max(20, int(seconds * 1e3 / (min(times(10)) + 0.15)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--peers", default="", help="of fa4 and cudnn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wanted = args.shapes.split(",")
    results: dict[str, dict[str, dict[str, object]]] = {}
    for shape in (shape for shape in SHAPES if shape.name in wanted):
        inputs = Inputs(shape, args.seed)
        calls: dict[str, Callable[[], torch.Tensor]] = {"mla": ours(inputs)}
        if "fa4" in args.peers.split(","):
            calls |= {"fa4": fa4(inputs, concat=False), "fa4+concat": fa4(inputs, concat=True)}
        if "cudnn" in args.peers.split(","):
            calls["cudnn"] = cudnn(inputs)
        errors = {name: check(inputs, call) for name, call in calls.items()}
        rounds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.rounds):
            for name, call in calls.items():
                rounds[name].append(statistics.median(milliseconds(call)))
        results[shape.name] = {}
        for name, times in rounds.items():
            ms = statistics.median(times)
            tflops = shape.flops / ms / 1e9
            results[shape.name][name] = {"ms": ms, "rounds": times, "tflops": tflops, "error": errors[name]}
            spread = (max(times) - min(times)) / ms
            row = f"{shape.name:8}{name:12}{ms:9.4f} ms {tflops:6.0f} TFLOP/s"
            print(f"{row}  rounds {spread:5.1%}  error {errors[name]:.1e}")
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
