"""CPU prefill beside torch's scaled_dot_product_attention on the same sequence, in one run.

    python benchmarks/cpu_prefill.py [--heads 16] [--tokens 2048] [--rounds 7]

The other side is given what it needs for its fast path, outside the clock: K with the rope part concatenated, V padded
to the width of K. Rounds alternate, so that the machine's other work falls on both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import mla
from mla import masks


def clock(call: Callable[[], object]) -> float:
    """Return milliseconds of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def compare(dtype: torch.dtype, heads: int, tokens: int, rounds: int) -> None:
    """Print one line: both times, their ratio, and how far the results are apart."""
    q = torch.randn(tokens, heads, 192).to(dtype)
    kv = torch.randn(tokens, heads, 256).to(dtype)
    k, v, rope = kv[..., :128], kv[..., 128:], torch.randn(tokens, 1, 64).to(dtype)
    offsets = torch.tensor([0, tokens], dtype=torch.int32)
    output = torch.empty(tokens, heads, 128, dtype=dtype)
    wide_k = torch.cat([k, rope.expand(tokens, heads, 64)], -1).transpose(0, 1)[None]
    wide_q, wide_v = q.transpose(0, 1)[None], F.pad(v, (0, 64)).transpose(0, 1)[None]
    mask = masks.CausalMask()

    def ours() -> torch.Tensor:
        mla.flare_mla_prefill(output, q, k, v, rope, mask, offsets, offsets, 192**-0.5, target="cpu")
        return output

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(wide_q, wide_k, wide_v, is_causal=True)

    difference = (ours().float() - theirs()[0, ..., :128].transpose(0, 1).float()).norm() / output.float().norm()
    pairs = [(clock(ours), clock(theirs)) for _ in range(rounds)]
    mine, other = (statistics.median(times) for times in zip(*pairs, strict=True))
    best = min(a for a, _ in pairs) / min(b for _, b in pairs)
    print(
        f"{str(dtype).removeprefix('torch.'):9} mla {mine:7.1f} ms  sdpa {other:7.1f} ms  "
        f"ratio {mine / other:.2f} (of the best {best:.2f})  relative difference {difference:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    for dtype in (torch.float32, torch.bfloat16):
        compare(dtype, args.heads, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
