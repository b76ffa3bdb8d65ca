"""What fp8 costs in accuracy: the tables of docs/numerics.md, on the CPU reference or by the kernels of a GPU.

    python benchmarks/fp8_error.py [--target cpu|cuda|triton] [--cases NAME ...]

Each result is held against the float64 oracle twice: on the dequantised inputs, which leaves the error of the
arithmetic, and on the inputs before quantisation, which is what a model sees.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

import mla
from mla import reference
from mla.masks import CausalMask, Mask, NullMask

DN, DR, DV, RANK = 128, 64, 128, 512
SCALE = (DN + DR) ** -0.5
PAGE_SIZE = 64
ROW = "| {:38} | {:36} | {:>7} | {:>7} | {:>8} | {:>7} |"


@dataclass
class Inputs:
    """One sequence, bf16: the last T of its L tokens are new."""

    name: str
    q: torch.Tensor  # [T, H, 192]
    latent: torch.Tensor  # [L, 512]
    rope: torch.Tensor  # [L, 64]
    weight: torch.Tensor  # [H * 256, 512]
    mask: Mask
    target: str = "cpu"

    def on(self, target: str) -> Inputs:
        """Move to where a target runs."""
        device = "cpu" if target == "cpu" else "cuda"
        moved = (getattr(self, name).to(device) for name in ("q", "latent", "rope", "weight"))
        return Inputs(self.name, *moved, self.mask, target)

    @property
    def offsets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cumulative rows of q, and of k and v."""
        rows = torch.tensor([[0, self.q.shape[0]], [0, self.latent.shape[0]]], device=self.q.device)
        return rows[0], rows[1]

    def project(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of latent rows, in their dtype."""
        up = (latent @ self.weight.to(latent.dtype).T).view(latent.shape[0], -1, DN + DV)
        return up[..., :DN], up[..., DN:]


@dataclass(frozen=True)
class Errors:
    """Relative Frobenius errors of the output, its gain less 1 (projection on the oracle), error of the LSE."""

    dequantised: float
    unquantised: float
    gain: float
    lse: float


def normal(keys: int, heads: int, queries: int, seed: int = 0) -> Inputs:
    """q, k, v and rope of N(0, 1); k and v have halves of the latent of their own, so that they are independent."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).bfloat16()

    weight = draw(heads, DN + DV, RANK) * (RANK / 2) ** -0.5
    weight[:, :DN, RANK // 2 :] = weight[:, DN:, : RANK // 2] = 0.0
    name = f"N(0, 1), {keys:,} keys"
    return Inputs(
        name, draw(queries, heads, DN + DR), draw(keys, RANK), draw(keys, DR), weight.view(-1, RANK), CausalMask()
    )


def outliers(keys: int, heads: int, queries: int) -> Inputs:
    """Eight channels of the latent, of each key and of each value 20 times as large as the others.

    The weight takes the latent's back, and q those of k, so that scores stay N(0, 1).
    """
    inputs = normal(keys, heads, queries)
    inputs.name = f"8 channels 20x, {keys:,} keys"
    inputs.latent[:, ::64] *= 20
    inputs.weight[:, ::64] /= 20
    inputs.weight.view(heads, DN + DV, RANK)[:, ::16] *= 20
    inputs.q[..., :DN:16] /= 20
    return inputs


def dominant(tiny: int, heads: int, queries: int) -> Inputs:
    """One key that weighs as much as all the others, each of which has about exp(-log(tiny)) of it."""
    inputs = normal(tiny + 1, heads, queries)
    inputs.name, inputs.mask = f"1 dominant key, {tiny:,} tiny ones", NullMask()
    inputs.weight.view(heads, DN + DV, RANK)[:, :DN] *= 0.01
    inputs.rope *= 0.01
    direction = inputs.q[0, 0, DN:].clone()
    inputs.q[..., DN:] = direction
    inputs.rope[0] = direction * (math.log(tiny) / (SCALE * direction.float().square().sum()))
    return inputs


def shifted(keys: int, heads: int, queries: int) -> Inputs:
    """V = 1 + N(0, 1): what a sum over many keys loses shows in the gain."""
    inputs = normal(keys, heads, queries)
    inputs.name = f"V = 1 + N(0, 1), {keys:,} keys"
    weight = inputs.weight.view(heads, DN + DV, RANK)
    inputs.latent[:, 0] = 1.0
    weight[:, :DN, 0], weight[:, DN:, 0] = 0.0, 1.0
    return inputs


def errors_of_operands(inputs: Inputs, v_scale: Literal["head", "token"]) -> Errors:
    """q_nope, k and v in fp8, the ropes in bf16, by `mla.quantize_for_prefill`."""
    k, v = inputs.project(inputs.latent)
    rope = inputs.rope[:, None]
    made = mla.quantize_for_prefill(inputs.q, k, v, rope, v_scale=v_scale, target=inputs.target)
    how = {"q_rope": made.q_rope, "q_scale": made.q_scale, "k_scales": made.k_scales, "v_scale": made.v_scale}
    call = (made.q_nope, made.k, made.v, made.k_rope, inputs.mask, *inputs.offsets, SCALE)
    result = mla.prefill(*call, **how, return_lse=True, target=inputs.target)
    dequantised = reference.prefill(*call, **how)
    plain = reference.prefill(inputs.q, k, v, rope, inputs.mask, *inputs.offsets, SCALE)
    return _errors(result, dequantised, plain)


def cache_of(inputs: Inputs, granularity: int | None) -> mla.PagedKVCacheCollection:
    """Store all tokens in pages, fp8 with a granularity or bf16, as a step finds them whose last T are new."""
    keys, queries, device = inputs.latent.shape[0], inputs.q.shape[0], inputs.q.device
    pages, scales = -(-keys // PAGE_SIZE), None
    blocks = torch.zeros(pages, PAGE_SIZE, RANK + DR, dtype=torch.bfloat16, device=device)
    if granularity is not None:
        blocks = blocks.to(torch.float8_e4m3fn)
        scales = torch.zeros(pages, PAGE_SIZE, -(-(RANK + DR) // granularity), device=device)
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]

    def collection(cached: int) -> mla.PagedKVCacheCollection:
        lengths = torch.tensor([cached], device=device)
        return mla.PagedKVCacheCollection.from_pages(
            blocks, table, lengths, scales=scales, quantization_granularity=granularity
        )

    collection(0).store(0, inputs.offsets[1], inputs.latent, inputs.rope, target=inputs.target)
    return collection(keys - queries)


def errors_of_cache(inputs: Inputs, granularity: int) -> Errors:
    """An fp8 cache of latent and rope, q and the up-projection in bf16, by `mla.chunked_prefill`."""
    rows, all_rows = inputs.offsets
    cache = cache_of(inputs, granularity)
    result = mla.chunked_prefill(
        inputs.q, cache, 0, inputs.weight, rows, inputs.mask, SCALE, return_lse=True, target=inputs.target
    )
    stored = reference.cache_rows(cache.layer(0), 0, torch.arange(inputs.latent.shape[0], device=inputs.q.device))
    oracles = []
    for latent, rope in (stored, (inputs.latent.double(), inputs.rope.double())):
        k, v = inputs.project(latent)
        oracles.append(reference.prefill(inputs.q, k, v, rope[:, None], inputs.mask, rows, all_rows, SCALE))
    return _errors(result, *oracles)


def errors_of_attention(inputs: Inputs, granularity: int | None) -> Errors:
    """`mla.chunked_prefill` with `attention_dtype`, one chunk, over a bf16 cache or an fp8 one."""
    rows, all_rows = inputs.offsets
    cache, keys = cache_of(inputs, granularity), inputs.latent.shape[0]
    one_chunk = -(-keys // PAGE_SIZE) * PAGE_SIZE
    result = mla.chunked_prefill(
        inputs.q, cache, 0, inputs.weight, rows, inputs.mask, SCALE, buffer_token_size=one_chunk,
        return_lse=True, attention_dtype=torch.float8_e4m3fn, target=inputs.target,
    )  # fmt: skip
    latent, _ = reference.cache_rows(cache.layer(0), 0, torch.arange(keys, device=inputs.q.device))
    k, v = inputs.project(latent.to(torch.bfloat16))
    q8, q_scale = mla.quantize_per_token(inputs.q, target=inputs.target)
    lengths = inputs.weight.double().norm(dim=1).view(-1, DN + DV)  # scales are bounds: see mla/_chunk_buffer.py
    bounds = latent.to(torch.bfloat16).double().norm(dim=1).max() * torch.stack(
        (lengths[:, :DN].amax(1), lengths[:, DN:].amax(1))
    )
    k_scales, v_scale = (bounds[0].max() / 448).float().view(1), (bounds[1] / 448).float()
    v8 = mla.quantize_with_scale(v, v_scale, target=inputs.target)
    q_rope = None
    if granularity is not None:
        k8, k_scales = mla.quantize_per_token(k, target=inputs.target)
    else:
        k8 = mla.quantize_with_scale(k, k_scales, target=inputs.target)
        q8, q_rope = q8[..., :DN], (inputs.q[..., DN:] / (q_scale * k_scales).unsqueeze(2)).bfloat16()
    dequantised = reference.prefill(
        q8, k8, v8, cache.layer(0), inputs.mask, rows, all_rows, SCALE, q_rope=q_rope, q_scale=q_scale,
        k_scales=k_scales, v_scale=v_scale,
    )  # fmt: skip
    k, v = inputs.project(inputs.latent)
    plain = reference.prefill(inputs.q, k, v, inputs.rope[:, None], inputs.mask, rows, all_rows, SCALE)
    return _errors(result, dequantised, plain)


def _errors(
    result: tuple[torch.Tensor, ...], dequantised: tuple[torch.Tensor, ...], plain: tuple[torch.Tensor, ...]
) -> Errors:
    output, lse = (tensor.double() for tensor in result)
    expected = plain[0]
    return Errors(
        ((output - dequantised[0]).norm() / dequantised[0].norm()).item(),
        ((output - expected).norm() / expected.norm()).item(),
        ((output * expected).sum() / expected.square().sum()).item() - 1,
        (lse - plain[1]).abs().max().item(),
    )


def rows(cases: list[Inputs]) -> Iterator[tuple[str, str, Errors]]:
    """Yield (inputs, what is fp8, errors)."""
    for inputs in cases:
        yield inputs.name, "q, k, v; v scaled by head", errors_of_operands(inputs, "head")
        yield inputs.name, "q, k, v; v scaled by token", errors_of_operands(inputs, "token")
        for granularity in (64, 128, 576):
            yield inputs.name, f"cache, granularity {granularity}", errors_of_cache(inputs, granularity)
        yield inputs.name, "chunked_prefill, bf16 cache", errors_of_attention(inputs, None)
        yield inputs.name, "chunked_prefill, cache, g 128", errors_of_attention(inputs, 128)


CASES: dict[str, Callable[[], Inputs]] = {
    "normal": lambda: normal(2048, 4, 256),
    "outliers": lambda: outliers(2048, 4, 256),
    "dominant": lambda: dominant(4096, 4, 64),
    "normal-32k": lambda: normal(32768, 2, 64),
    "shifted-32k": lambda: shifted(32768, 2, 64),
    "shifted-128k": lambda: shifted(131072, 2, 16),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    print(ROW.format("inputs", "fp8", "deq.", "unq.", "gain", "LSE"))
    print("|---|---|---:|---:|---:|---:|")
    for name, way, found in rows([CASES[name]().on(args.target) for name in args.cases]):
        figures = (f"{found.dequantised:.1e}", f"{found.unquantised:.1e}", f"{found.gain:+.2%}", f"{found.lse:.1e}")
        print(ROW.format(name, way, *figures), flush=True)


if __name__ == "__main__":
    main()
