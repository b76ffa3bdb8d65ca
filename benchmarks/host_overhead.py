"""Microseconds of Python that a repeated call costs.

    python benchmarks/host_overhead.py [--target cpu|cuda|triton] [--compiled inductor|aot_eager] [--json FILE]

On the CPU with kernels that do nothing, so that only what stands before a backend counts; no value of an index tensor
is checked there, as none is on a GPU. On a GPU with sequences of no tokens, in two columns: the whole call, and the
call with a launch that does nothing in the place of the driver's (of Triton in the place of its launcher in C, which
takes the arguments apart and calls the driver). Nothing is projected. Then the call as an operator of torch.ops.mla,
which is what compiled code calls, and with --compiled what a call more costs in a graph that torch.compile has made
with that backend.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import functools
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import host_clock
import torch
from environment import environment

import mla
from mla import dispatch, masks
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection

microseconds = functools.partial(host_clock.microseconds, calls=20, rounds=50)
HEADS, TOKENS, BATCH = 1, 8, 4
MODULES = ("dispatch", "plan", "gather", "store", "merge")


Calls = dict[str, tuple[Callable[[], object], Callable[[], object]]]


def in_graph(call: Callable[[], object], backend: str) -> float:
    """Return microseconds of a call more in a compiled graph: of twelve calls less two, by ten."""

    def graph(count: int) -> float:
        def calls() -> None:
            for _ in range(count):
                call()

        torch._dynamo.reset()
        return microseconds(torch.compile(calls, fullgraph=True, backend=backend))

    return (graph(12) - graph(2)) / 10


@contextlib.contextmanager
def without(patches: list[Any]) -> Iterator[None]:
    """Apply patches, and let nothing that was prepared before or within be used across."""
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        dispatch.forget()
        yield
    dispatch.forget()


def no_kernels() -> list[Any]:
    """Let no backend be asked, and no value of a CPU tensor be looked at."""

    def nothing(problem: object, target: object, device: object) -> Callable[[object], None]:
        return lambda args: None

    return [
        *(mock.patch(f"mla.{name}.resolve", nothing) for name in MODULES),
        *(mock.patch(f"mla.{name}.readable", lambda tensor: False) for name in ("_check", "gather")),
        mock.patch.object(PagedKVCache, "check_indices", lambda self, offsets: None),
        mock.patch("mla._prefill_call._check_values", lambda call, device: None),
    ]


def no_launches(target: str) -> list[Any]:
    """Let kernels be launched by a function that takes anything and does nothing."""
    runtime = importlib.import_module(f"mla.backends.{target}.runtime")
    nothing = ctypes.CDLL("libm.so.6").fegetround
    load = runtime.load

    def load_idle(spec: Any, device: torch.device) -> Any:
        kernel = copy.copy(load(spec, device))
        if target == "cuda":
            nothing.argtypes = runtime.driver().cuLaunchKernelEx.argtypes
            kernel._launch_kernel = nothing
        else:
            kernel._launcher = kernel._launcher._replace(function=lambda *arguments: None)
        return kernel

    return [mock.patch.object(runtime, "load", load_idle)]


def make_calls(target: str) -> Calls:
    """Return each function's call and its operator's."""
    device = "cpu" if target == "cpu" else "cuda"
    place = {"dtype": torch.bfloat16, "device": device}
    index = {"dtype": torch.int32, "device": device}
    lengths = torch.zeros(BATCH, **index)
    table = torch.zeros(BATCH, 16, **index)
    pages = PagedKVCacheCollection.from_pages(torch.zeros(64, 64, 576, **place), table, lengths)
    cache, offsets = pages.layer(0), torch.zeros(BATCH + 1, **index)
    q, kv = torch.zeros(TOKENS, HEADS, 192, **place), torch.zeros(TOKENS, HEADS, 256, **place)
    k, v, output = kv[..., :128], kv[..., 128:], torch.zeros(TOKENS, HEADS, 128, **place)
    many = torch.zeros(16384, HEADS, 256, **place)  # enough for a kernel to ask for a workspace
    lse = torch.zeros(TOKENS, HEADS, device=device)
    latent, rope = torch.zeros(TOKENS, 512, **place), torch.zeros(TOKENS, 64, **place)
    weight = torch.zeros(HEADS * 256, 512, **place)
    mask, ops, on = masks.CausalMask(), torch.ops.mla, {"target": target}
    plan = mla.prefill_plan(offsets, pages, 0, 128, max_chunks=4, **on)
    tables = plan.buffer_row_offsets, plan.cache_offsets, plan.buffer_lengths, plan.required_chunks
    first = tables[0][0], tables[1][0], tables[2][:1]
    return {
        "generic_..._plan": (
            lambda: mla.generic_flare_mla_prefill_ragged_paged_plan(
                offsets, pages, 0, 128, *tables[:3], required_chunks=tables[3], **on
            ),
            lambda: ops.plan(*tables, offsets, *cache.operands, 128, target),
        ),
        "gather (of the decompression)": (
            lambda: mla.gather.gather_latent(*first, pages, 0, latent, **on),
            lambda: ops.gather(latent[:128], *first[:2], None, first[2], *cache.operands, target),
        ),
        "store": (
            lambda: pages.store(0, offsets, latent, rope, **on),
            lambda: ops.store(*cache.operands, offsets, latent, rope, target),
        ),
        "flare_mla_prefill": (
            lambda: mla.flare_mla_prefill(output, q, k, v, cache, mask, offsets, offsets, 0.07, lse=lse, **on),
            lambda: ops.prefill(
                output, q, None, k, v, *cache.operands, *mask.operands, offsets, offsets, 0.07, lse=lse, **on
            ),
        ),
        "flare_mla_prefill, 16,384 keys": (
            lambda: mla.flare_mla_prefill(
                output, q, many[..., :128], many[..., 128:], cache, mask, offsets, offsets, 0.07, lse=lse, **on
            ),
            lambda: ops.prefill(
                output, q, None, many[..., :128], many[..., 128:], *cache.operands, *mask.operands, offsets, offsets,
                0.07, lse=lse, **on
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
                1 << 12, None, 1, None, None, None, 0.0, True, target,
            ),
        ),
        "chunked_prefill, 4 chunks": (
            lambda: mla.chunked_prefill(
                q, pages, 0, weight, offsets, mask, 0.07, output=output, buffer_token_size=128, max_chunks=4, **on
            ),
            lambda: ops.chunked_prefill(
                output, None, None, q, *cache.operands, weight, offsets, *mask.operands, 0.07, None, None, None, None,
                128, None, 4, None, None, None, 0.0, True, target,
            ),
        ),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("cpu", "cuda", "triton"), default="cpu")
    parser.add_argument("--compiled", choices=("inductor", "aot_eager"), help="backend of torch.compile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    columns: dict[str, dict[str, float]] = {}
    without_launch = ("without launch", functools.partial(no_launches, args.target))
    settings = [("function", no_kernels)] if args.target == "cpu" else [("function", list), without_launch]
    for title, patches in settings:
        with without([*patches(), mock.patch("mla._chunk_buffer.up_project", lambda latent, weight, output: None)]):
            calls = make_calls(args.target)
            columns[title] = {name: microseconds(function) for name, (function, _) in calls.items()}
            if title == "function":
                last = {"operator": {name: microseconds(operator) for name, (_, operator) in calls.items()}}
                if args.compiled:
                    last["in a graph"] = {name: in_graph(call, args.compiled) for name, (call, _) in calls.items()}
    columns |= last
    print(f"{'target ' + args.target + ', us':32}" + "".join(f"{title:>16}" for title in columns))
    for name in columns["function"]:
        print(f"{name:32}" + "".join(f"{column[name]:16.1f}" for column in columns.values()), flush=True)
    if args.json:
        about = environment(torch.device("cpu") if args.target == "cpu" else None)
        args.json.write_text(json.dumps({"environment": about, "us": columns}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
