"""Builders of prefill problems: ragged, paged, batched, poisoned, strided, quantised, on any device.

A `Case` is a readable description; `build` makes its tensors; the result runs through the public functions and
through the oracle with the very same arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import mla
from mla import dispatch, masks, reference
from mla.kv_cache import PagedKVCache
from mla.masks import Mask
from mla.problem import SUPPORTED_DIMS, Problem
from mla.target import device_arch
from tests.support.paged import PagedData, make_paged, offsets_of, on, settle

NAN = math.nan
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class MaskContext:
    """What a mask may be made of."""

    batch: int
    heads: int
    new: tuple[int, ...]
    totals: tuple[int, ...]
    device: torch.device
    random: torch.Generator


def fetch(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors on the CPU, and wait once for all of them: of many processes each waits for the turns of all."""
    here = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return here


def _bias(ctx: MaskContext, heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    bias = torch.randn(ctx.batch, heads, max((*ctx.new, 1)), max((*ctx.totals, 1)), generator=ctx.random)
    return on(bias.masked_fill(torch.rand(bias.shape, generator=ctx.random) < 0.2, -math.inf).to(dtype), ctx.device)


def _documents(ctx: MaskContext) -> Mask:
    starts = on(torch.tensor([total // 3 for total in ctx.totals], dtype=torch.int32), ctx.device)
    return Mask.from_function(lambda b, h, q, k: (k <= q) & (k >= starts[b]))


def _windows_of_heads(ctx: MaskContext) -> Mask:
    window = on(torch.tensor([8 + 40 * h for h in range(ctx.heads)], dtype=torch.int32), ctx.device)
    return Mask.from_function(lambda b, h, q, k: (k <= q) & (q - k < window[h]))


#: Every kind of mask, by the name that test ids have.
MASKS: dict[str, Callable[[MaskContext], Mask]] = {
    "none": lambda ctx: masks.NullMask(),
    "causal": lambda ctx: masks.CausalMask(),
    "chunked": lambda ctx: masks.ChunkedMask(48),
    "chunked_causal": lambda ctx: masks.ChunkedCausalMask(100),
    "sliding": lambda ctx: masks.SlidingWindowCausalMask(70),
    "sliding_both": lambda ctx: masks.SlidingWindowNonCausalMask(33),
    "padding": lambda ctx: masks.CausalPaddingMask(
        on(torch.tensor([total * 2 // 3 for total in ctx.totals], dtype=torch.int32), ctx.device)
    ),
    "sink_window": lambda ctx: Mask.from_function(lambda b, h, q, k: (k <= q) & ((q - k < 64) | (k < 4))),
    "checkered": lambda ctx: Mask.from_function(lambda b, h, q, k: (k + h + q) % 3 != 0),
    "documents": _documents,
    "windows_of_heads": _windows_of_heads,
    "either": lambda ctx: masks.SlidingWindowCausalMask(9) | masks.ChunkedCausalMask(64),
    "bias": lambda ctx: masks.MaterializedMask(_bias(ctx, 1)),
    "causal_bias": lambda ctx: masks.CausalMask() & masks.MaterializedMask(_bias(ctx, ctx.heads, torch.bfloat16)),
}


@dataclass(frozen=True)
class Case:
    """One prefill problem in words. The defaults are a small DeepSeek step."""

    lengths: tuple[tuple[int, int], ...] = ((37, 70), (0, 129), (200, 1))  # (cached, new) of each sequence
    heads: int = 4
    dims: tuple[int, int] = (192, 128)
    dtypes: str = "bf16"
    out_dtype: str = ""  # "" for the usual one
    rope: str = "paged"
    overrides: bool = True  # tensor rope: positions by start_positions and kv_lengths, not by the rope's extent
    rope_width: int = 64  # D of batched rope
    page_size: int = 64
    csr: bool = False
    layout: str = "pages"
    order: str = "scattered"
    granularity: int = 128
    mask: str = "causal"
    chunk: tuple[int, int] | None = None  # keys [first, first + count) of every sequence
    lse_layout: str = "TH"
    sinks: bool = False
    softcap: float = 0.0
    scale: float = 192**-0.5
    prescaled: bool = True
    k_scale: str = "row"  # row; one: of all keys; runs: the same for a hundred rows each
    v_scale: str = "head"  # "", number, head or row
    v_transposed: bool = False
    v_mean: float = 0.0
    strided: bool = True
    poison: float = NAN
    index_dtype: torch.dtype = torch.int32
    spare_rows: tuple[int, int] = (2, 3)  # rows of q before and behind the sequences

    def __str__(self) -> str:
        default = Case()
        changed = {name: value for name, value in vars(self).items() if repr(value) != repr(getattr(default, name))}
        words = []
        for name, value in changed.items():
            if name == "lengths":
                value = "+".join(f"{cached}.{new}" for cached, new in value)
            elif isinstance(value, tuple):
                value = "x".join(map(str, value))
            words.append(f"{name}={str(value).removeprefix('torch.')}")
        return ",".join(words) or "default"


@dataclass
class PrefillProblem:
    """The tensors of a case: arguments of `mla.prefill` and of the oracle alike."""

    case: Case
    operands: dict[str, Any]  # q, k, v, k_rope, mask, valid_length, cache_row_offsets, scale
    keywords: dict[str, Any]  # what both take
    device: torch.device
    paged: PagedData | None = None
    n_keys: list[int] = field(default_factory=list)

    def outputs(self) -> dict[str, Any]:
        """Return NaN-filled outputs as the case wants them."""
        case, q = self.case, self.operands["q"]
        dtype = DTYPES.get(case.out_dtype or case.dtypes.split("+")[0], torch.bfloat16)
        width = case.dims[1]
        output = torch.full((q.shape[0], q.shape[1], width * (2 if case.strided else 1)), NAN, device=self.device)
        shape = q.shape[:2] if case.lse_layout == "TH" else (q.shape[1], q.shape[0])
        lse = torch.full(shape, NAN, device=self.device)
        return {"output": output.to(dtype)[..., :width], "lse": lse, "lse_layout": case.lse_layout}

    def run(self, target: str, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and LSE [T, H] of the public function; rows that it did not write are NaN."""
        outputs = self.outputs()
        mla.prefill(**self.operands, **self.keywords, **outputs, target=target, **more)
        return outputs["output"], outputs["lse"] if self.case.lse_layout == "TH" else outputs["lse"].T

    def expect(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the oracle's answer."""
        return reference.prefill(**self.operands, **self.keywords)

    def with_one_key_scale(self) -> PrefillProblem:
        """Give all keys of an fp8 problem, and what is roped of them, one scale; return the problem."""
        self.keywords["k_scales"].fill_(1.25)
        if self.paged is not None and (scales := self.operands["k_rope"].scales) is not None:
            scales.fill_(1.25)
        return self

    def to(self, device: torch.device) -> PrefillProblem:
        """Return a copy on a device, in the order of the current stream, with the same strides and overlaps."""
        memory: dict[int, torch.Tensor] = {}  # by address here

        def copied(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in memory:
                    memory[storage.data_ptr()] = on(torch.empty(0, dtype=torch.uint8).set_(storage), device)
                there = memory[storage.data_ptr()].untyped_storage()
                empty = torch.empty(0, dtype=value.dtype, device=device)
                return empty.set_(there, value.storage_offset(), value.shape, value.stride())
            if isinstance(value, PagedKVCache):
                return PagedKVCache.of(*map(copied, value.operands))
            if isinstance(value, Mask):
                text, *data = value.operands
                return Mask.from_text(text, *([copied(tensor) for tensor in tensors] for tensors in data))
            return value

        operands, keywords = (
            {name: copied(x) for name, x in given.items()} for given in (self.operands, self.keywords)
        )
        return PrefillProblem(self.case, operands, keywords, device)


def problem_of(case: Case) -> Problem:
    """Return what a call of a case asks of an implementation."""
    asked: list[Problem] = []

    def resolve(problem: Problem, target: object, device: torch.device) -> Callable[[Any], None]:
        asked.append(problem)
        return lambda args: None

    dispatch.forget()
    with mock.patch.object(dispatch, "resolve", resolve):
        build(case).run("cpu")
    dispatch.forget()
    return asked[0]


def fp8_dtype(device: torch.device) -> torch.dtype:
    """Return the fp8 format that a device computes in."""
    return torch.float8_e4m3fnuz if device_arch(device).startswith("gfx94") else torch.float8_e4m3fn


def build(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> PrefillProblem:
    """Make the tensors of a case; the data depend on `seed` and on the case's sizes, not on the device."""
    device = torch.device(device)
    random = torch.Generator().manual_seed(seed)
    cached, new = [c for c, _ in case.lengths], [n for _, n in case.lengths]
    totals = [c + n for c, n in case.lengths]
    data_dtype = DTYPES.get(case.dtypes.split("+")[0], fp8_dtype(device))
    split = case.dtypes == "fp8+bf16_rope"
    rope_dtype = torch.bfloat16 if split else fp8_dtype(device) if "fp8" in case.dtypes else data_dtype

    padded = [-(-total // case.page_size) * case.page_size for total in totals]
    natural_ragged = case.rope == "ragged" and not case.overrides
    held = totals if natural_ragged else padded
    firsts = [0] * len(held) if case.chunk is None else [min(case.chunk[0], rows) for rows in held]
    counts = held if case.chunk is None else [
        min(rows - first, case.chunk[1]) for rows, first in zip(held, firsts, strict=True)
    ]  # fmt: skip
    n_keys = [min(c, max(0, t - f)) for c, t, f in zip(counts, totals, firsts, strict=True)]
    rows, total_q = sum(counts), sum(new) + sum(case.spare_rows)

    nope, v_dim = case.dims[0] - 64, case.dims[1]
    assert case.dims in SUPPORTED_DIMS
    keys = torch.full((rows, case.heads, nope), case.poison)
    values = torch.full((rows, case.heads, v_dim), case.poison)
    for first, count in zip(offsets_of(counts), n_keys, strict=False):
        keys[first : first + count] = torch.randn(count, case.heads, nope, generator=random)
        values[first : first + count] = torch.randn(count, case.heads, v_dim, generator=random) + case.v_mean
    queries = torch.randn(total_q, case.heads, case.dims[0], generator=random)

    ctx = MaskContext(len(new), case.heads, tuple(new), tuple(totals), device, random)

    def as_index(values: list[int]) -> torch.Tensor:
        return _index(torch.tensor(values, dtype=torch.int64), case.index_dtype, device)

    keywords: dict[str, Any] = {"softcap": case.softcap}
    if case.sinks:
        keywords["sinks"] = on(torch.randn(case.heads, generator=random), device)
    if case.chunk is not None:
        keywords["cache_offsets"] = as_index(firsts)

    paged = None
    k_rope: PagedKVCache | torch.Tensor
    if case.rope == "paged":
        paged = make_paged(
            cached, new, case.page_size, device=device, dtype=rope_dtype, layout=case.layout, order=case.order,
            poison=case.poison, granularity=case.granularity, csr=case.csr, index_dtype=case.index_dtype, seed=seed,
        )  # fmt: skip
        k_rope = paged.cache.layer(paged.layer_idx)
    else:
        width = case.rope_width if case.rope == "batched" else 64
        shape = (len(new), max(totals), 1, width) if case.rope == "batched" else (rows, 1, width)
        rope = torch.full(shape, case.poison)
        for b, count in enumerate(n_keys):
            where = (b, slice(firsts[b], firsts[b] + count)) if case.rope == "batched" else (
                slice(offsets_of(counts)[b], offsets_of(counts)[b] + count)
            )  # fmt: skip
            rope[where] = torch.randn(count, 1, width, generator=random)
        k_rope = on(rope.to(rope_dtype), device)
        if "fp8" in case.dtypes and not split:
            blocks = -(-width // case.granularity)
            keywords["k_rope_scales"] = on(_scales((*shape[:-1], blocks), random), device)
        if case.overrides:
            keywords.update(start_positions=as_index(cached), kv_lengths=as_index(totals))

    q = _cast(queries[..., :nope] if split else queries, data_dtype, device, case.strided)
    if split:
        keywords["q_rope"] = _cast(queries[..., nope:], torch.bfloat16, device, case.strided)
        keywords["rope_prescaled"] = case.prescaled
    if case.dtypes.startswith("fp8"):
        keywords["q_scale"] = on(_scales((total_q, 1), random), device)
        k_scales = _scales((1,) if case.k_scale == "one" else (rows, 1), random)
        if case.k_scale == "runs":
            k_scales = k_scales[torch.arange(rows) // 100 * 100]
        keywords["k_scales"] = on(k_scales, device)
        v_scale: Any = {"": None, "number": 0.75, "head": _scales((case.heads,), random)}.get(case.v_scale)
        if case.v_scale == "row":
            v_scale = _scales((rows, 1), random)
        if v_scale is not None:
            keywords["v_scale"] = on(v_scale, device) if isinstance(v_scale, torch.Tensor) else v_scale
    k, v = _key_value(keys, values, data_dtype, device, case)
    operands = {
        "q": q,
        "k": k,
        "v": v,
        "k_rope": k_rope,
        "mask": MASKS[case.mask](ctx),
        "valid_length": as_index(offsets_of(new, case.spare_rows[0])),
        "cache_row_offsets": as_index(offsets_of(counts)),
        "scale": case.scale,
    }
    settle(device)
    return PrefillProblem(case, operands, keywords, device, paged, n_keys)


def _scales(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=random) + 0.5


def _index(values: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return on(values.to(torch.int32).view(dtype) if dtype == torch.uint32 else values.to(dtype), device)


def _cast(data: torch.Tensor, dtype: torch.dtype, device: torch.device, strided: bool) -> torch.Tensor:
    """Return data in a dtype; `strided`: as the front of wider rows whose tails are NaN."""
    if not strided:
        return on(data.to(dtype), device)
    wide = torch.full((*data.shape[:-1], data.shape[-1] + 64), NAN)
    wide[..., : data.shape[-1]] = data
    return on(wide.to(dtype), device)[..., : data.shape[-1]]


def _key_value(
    keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype, device: torch.device, case: Case
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v: views of one up-projection, or tensors of their own; V^T where the case says so."""
    nope = keys.shape[-1]
    if case.strided:
        both = on(torch.cat((keys, values), -1).to(dtype), device)
        k, v = both[..., :nope], both[..., nope:]
    else:
        k, v = on(keys.to(dtype), device), on(values.to(dtype), device)
    if case.v_transposed:
        v = on(values.permute(1, 2, 0).contiguous().to(dtype), device).permute(2, 0, 1)
    return k, v
