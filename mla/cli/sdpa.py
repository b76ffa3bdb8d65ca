"""CPU attention beside torch's scaled_dot_product_attention on one sequence, in one run.

The other side gets what its fast path needs, made outside the clock: K with the rope part concatenated, V padded to the
width of K. Rounds alternate, so that the machine's other work falls on both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mla.cli.clock import summarise
from mla.masks import CausalMask
from mla.prefill import flare_mla_prefill


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of both in milliseconds, and how far the results are apart (relative Frobenius)."""

    dtype: str
    tokens: int
    heads: int
    mla_ms: float
    sdpa_ms: float
    ratio: float
    difference: float

    def __str__(self) -> str:
        return (
            f"1 sequence of {self.tokens:,} causal tokens, {self.heads} heads, {self.dtype}: mla {self.mla_ms:.0f} ms, "
            f"torch SDPA {self.sdpa_ms:.0f} ms, ratio {self.ratio:.2f}, difference {self.difference:.1e}"
        )


def compare(tokens: int = 2048, heads: int = 16, rounds: int = 7) -> list[Comparison]:
    """Compare in float32 and in bfloat16."""
    return [_compare(dtype, tokens, heads, rounds) for dtype in (torch.float32, torch.bfloat16)]


def _compare(dtype: torch.dtype, tokens: int, heads: int, rounds: int) -> Comparison:
    q, kv = torch.randn(tokens, heads, 192).to(dtype), torch.randn(tokens, heads, 256).to(dtype)
    k, v, rope = kv[..., :128], kv[..., 128:], torch.randn(tokens, 1, 64).to(dtype)
    offsets, output = torch.tensor([0, tokens], dtype=torch.int32), torch.empty(tokens, heads, 128, dtype=dtype)
    wide_q, wide_k = (x.transpose(0, 1)[None] for x in (q, torch.cat([k, rope.expand(tokens, heads, 64)], -1)))
    wide_v, mask = F.pad(v, (0, 64)).transpose(0, 1)[None], CausalMask()

    def ours() -> torch.Tensor:
        flare_mla_prefill(output, q, k, v, rope, mask, offsets, offsets, 192**-0.5, target="cpu")
        return output

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(wide_q, wide_k, wide_v, is_causal=True)

    expected = theirs()[0, ..., :128].transpose(0, 1).float()  # the first calls are the warm-up too
    difference = ((ours().float() - expected).norm() / expected.norm()).item()
    mine, other = zip(*((_milliseconds(ours), _milliseconds(theirs)) for _ in range(rounds)), strict=True)
    medians = summarise(list(mine)).median, summarise(list(other)).median
    return Comparison(str(dtype).removeprefix("torch."), tokens, heads, *medians, medians[0] / medians[1], difference)


def _milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
