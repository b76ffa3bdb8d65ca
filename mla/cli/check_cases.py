"""The random batches of ``mla check``: made once on the CPU, run on any target, and what the oracle says of them.

Each operation is a class: made for a case and a random batch, ``run`` answers on a target and ``expect`` by the oracle.
An answer is a pair of output and LSE, or, where `precision` is ``exact``, tensors that have to be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from mla import reference
from mla.chunked import chunked_prefill
from mla.cli.batches import Batch, make_batch
from mla.gather import gather_latent
from mla.kv_cache import PagedKVCacheCollection
from mla.masks import CausalMask, ChunkedCausalMask, Mask, MaterializedMask, NullMask, SlidingWindowCausalMask
from mla.merge import merge_attn_states
from mla.plan import prefill_plan
from mla.prefill import prefill
from mla.problem import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from mla.tolerance import precision_of

Answer = tuple[torch.Tensor, ...]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_CPU = torch.device("cpu")
_MAX_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked of a random batch."""

    op: str  # a key of OPERATIONS
    dtypes: str = "bf16"
    page_size: int = 64
    mask: str = "causal"
    dims: tuple[int, int] = (192, 128)
    sinks: bool = False
    softcap: float = 0.0

    @property
    def name(self) -> str:
        """The operation and what differs from the usual."""
        usual, words = Case(self.op), [self.op] if self.op == "plan" else [self.op, self.dtypes]
        words += [f"pages of {self.page_size}"] * (self.page_size != usual.page_size or self.op == "plan")
        words += [self.mask] * (self.mask != usual.mask) + [f"q_depth {self.dims[0]}"] * (self.dims != usual.dims)
        words += ["sinks"] * self.sinks + ["softcap"] * bool(self.softcap)
        return ", ".join(words)


CASES: tuple[Case, ...] = (
    *(Case("plan", page_size=size) for size in (1, 64, 256)),
    *(Case("gather", dtypes, size) for dtypes, size in (("bf16", 1), ("fp16", 16), ("fp32", 64), ("fp8", 128))),
    *(Case("merge", dtypes) for dtypes in _DTYPES),
    *(Case("prefill", page_size=size) for size in (1, 16, 32, 64, 128, 256)),
    *(Case("prefill", dtypes) for dtypes in ("fp16", "fp32", "bf16+fp8_rope", "fp8", "fp8+bf16_rope")),
    *(Case("prefill", mask=mask) for mask in ("none", "chunked", "window", "window or sink", "documents", "bias")),
    Case("prefill", sinks=True),
    Case("prefill", softcap=20.0),
    Case("prefill", "fp16", 16, "window", sinks=True, softcap=20.0),
    Case("prefill", dims=(256, 256)),
    Case("whole job"),
    Case("whole job", "fp16", 16, "window", sinks=True),
    Case("whole job", "bf16+fp8_rope"),
)


class Plan:
    """The tables of a plan."""

    precision = "exact"

    def __init__(self, case: Case, random: torch.Generator, fnuz: bool) -> None:
        self.case, self.random = case, random
        batch_size = 1 + int(torch.randint(6, (), generator=random))
        self.cached, self.new = (_ragged(batch_size, random) for _ in range(2))
        self.totals = [c + n for c, n in zip(self.cached, self.new, strict=True)]
        self.heads = 1 + int(torch.randint(5, (), generator=random))
        self.buffer_rows = 32 + int(torch.randint(300, (), generator=random))
        fp8 = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
        quantised = case.dtypes == "fp8" or "fp8_rope" in case.dtypes.removeprefix("fp8+")
        dtype = fp8 if quantised else torch.bfloat16 if case.dtypes == "fp8+bf16_rope" else _DTYPES[case.dtypes]
        self.data_dtype = fp8 if case.dtypes.startswith("fp8") else _DTYPES[case.dtypes.split("+")[0]]
        seed = int(torch.randint(2**31, (), generator=random))
        self.batch: Batch = make_batch(
            self.cached, self.new, case.page_size, dtype=dtype, device=_CPU, target="cpu", seed=seed
        )
        self.scale = float(case.dims[0] ** -0.5)
        self.tensors: dict[str, Any] = {}

    def run(self, target: str, device: torch.device) -> Answer:
        """Return the answer of a target."""
        plan = prefill_plan(*self._on(device), 0, self.buffer_rows, max_chunks=_MAX_CHUNKS, target=target)
        return plan.buffer_row_offsets, plan.cache_offsets, plan.buffer_lengths, plan.required_chunks

    def expect(self) -> Answer:
        """Return the oracle's answer."""
        *tables, required = reference.plan(self.cached, self.new, self.case.page_size, self.buffer_rows, _MAX_CHUNKS)
        return tuple(torch.tensor(table) for table in (*tables, [required]))

    def _on(self, device: torch.device) -> tuple[torch.Tensor, PagedKVCacheCollection]:
        """Return row offsets and cache on a device."""
        cache = self.batch.collection.layer(0)
        rows = torch.cat((cache.latent, cache.rope), -1).to(device)
        scales = None if cache.scales is None else cache.scales.to(device)
        collection = PagedKVCacheCollection.from_pages(
            rows, cache.page_table.to(device), cache.lengths.to(device), scales=scales,
            quantization_granularity=cache.quantization_granularity or None,
        )  # fmt: skip
        return self.batch.input_row_offsets.to(device), collection

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def _moved(self, device: torch.device) -> dict[str, Any]:
        # A strided view is moved as its storage is laid out, so that a kernel meets the strides of the original.
        return {name: _move(tensor, device) for name, tensor in self.tensors.items()}


class Gather(Plan):
    """The latent rows of all chunks of a plan; NaN, which fills pages behind a sequence's end, reads as a number."""

    def run(self, target: str, device: torch.device) -> Answer:
        offsets, collection = self._on(device)
        plan = prefill_plan(offsets, collection, 0, self.buffer_rows, max_chunks=_MAX_CHUNKS, target=target)
        plan.check()
        parts = [torch.empty(0, KV_LORA_RANK, device=device)]
        for chunk in plan.chunks():
            latent = torch.empty(self.buffer_rows, KV_LORA_RANK, dtype=_DTYPES.get(self.case.dtypes), device=device)
            tables = chunk.buffer_row_offsets, chunk.cache_offsets, chunk.buffer_length
            gather_latent(*tables, collection, 0, latent, target=target)
            parts.append(latent[: chunk.max_length].float())
        return (torch.cat(parts).nan_to_num(_STALE),)

    def expect(self) -> Answer:
        size = self.case.page_size
        offsets = [0, *accumulate(-(-total // size) * size for total in self.totals)]
        first = torch.zeros(len(self.new), dtype=torch.int32)
        return (
            reference.gather(torch.tensor(offsets), first, self.batch.collection.layer(0)).float().nan_to_num(_STALE),
        )


class Merge(Plan):
    """Two results merged, some sides of them empty."""

    def __init__(self, case: Case, random: torch.Generator, fnuz: bool) -> None:
        super().__init__(case, random, fnuz)
        self.precision = precision_of(case.dtypes)
        for side in ("prefix", "suffix"):
            output, lse = self._normal(77, self.heads, case.dims[1]), self._normal(77, self.heads) * 3
            empty = torch.rand(lse.shape, generator=random) < 0.2
            self.tensors[f"{side}_output"] = output.masked_fill(empty[..., None], math.nan).to(_DTYPES[case.dtypes])
            self.tensors[f"{side}_lse"] = lse.masked_fill(empty, -math.inf)

    def run(self, target: str, device: torch.device) -> Answer:
        sides = self._moved(device)
        output, lse = torch.empty_like(sides["prefix_output"]), torch.empty_like(sides["prefix_lse"])
        merge_attn_states(output, output_lse=lse, target=target, **sides)
        return output, lse

    def expect(self) -> Answer:
        return reference.merge(**self.tensors)


class Prefill(Plan):
    """Attention over all keys at once, NaN in the rows of k and v that are page padding."""

    def __init__(self, case: Case, random: torch.Generator, fnuz: bool) -> None:
        super().__init__(case, random, fnuz)
        self.precision = precision_of(case.dtypes)
        size, (depth, v_dim), tokens = case.page_size, case.dims, sum(self.new)
        nope, split = depth - QK_ROPE_HEAD_DIM, case.dtypes == "fp8+bf16_rope"
        padded = [-(-total // size) * size for total in self.totals]
        kv = torch.full((sum(padded), self.heads, nope + v_dim), math.nan)
        starts = [0, *accumulate(padded)]
        for start, total in zip(starts, self.totals, strict=False):
            kv[start : start + total] = self._normal(total, self.heads, nope + v_dim)
        q, kv = self._normal(tokens, self.heads, depth), kv.to(self.data_dtype)
        self.tensors |= {
            "q": q[..., : nope if split else depth].to(self.data_dtype),
            "k": kv[..., :nope],
            "v": kv[..., nope:],
            "cache_row_offsets": torch.tensor(starts, dtype=torch.int32),
        }
        if split:
            self.tensors["q_rope"] = q[..., nope:].to(torch.bfloat16)
        if case.dtypes.startswith("fp8"):
            for name, shape in (("q_scale", (tokens, 1)), ("k_scales", (len(kv), 1)), ("v_scale", (self.heads,))):
                self.tensors[name] = torch.rand(shape, generator=random) + 0.5
        if case.sinks:
            self.tensors["sinks"] = self._normal(self.heads)
        self.numbers: dict[str, Any] = {"scale": self.scale, "softcap": case.softcap}
        if split:
            self.numbers["rope_prescaled"] = False
        self.bias = self._normal(len(self.new), self.heads, max(1, *self.new), max(1, *self.totals))

    def run(self, target: str, device: torch.device) -> Answer:
        offsets, collection = self._on(device)
        output, lse = prefill(
            k_rope=collection.layer(0), mask=self._mask(device), valid_length=offsets, return_lse=True, target=target,
            **self.numbers, **self._moved(device),
        )  # fmt: skip
        return output, lse

    def expect(self) -> Answer:
        cache = self.batch.collection.layer(0)
        offsets = self.batch.input_row_offsets
        return reference.prefill(
            k_rope=cache, mask=self._mask(_CPU), valid_length=offsets, **self.numbers, **self.tensors
        )

    def _mask(self, device: torch.device) -> Mask:
        starts = torch.tensor([total // 3 for total in self.totals], dtype=torch.int32, device=device)
        makers: dict[str, Callable[[], Mask]] = {
            "none": NullMask,
            "causal": CausalMask,
            "chunked": lambda: ChunkedCausalMask(96),
            "window": lambda: SlidingWindowCausalMask(70),
            "window or sink": lambda: Mask.from_function(lambda b, h, q, k: (k <= q) & ((q - k < 64) | (k < 4))),
            "documents": lambda: Mask.from_function(lambda b, h, q, k: (k <= q) & (k >= starts[b])),
            "bias": lambda: CausalMask() & MaterializedMask(self.bias.to(device)),
        }
        return makers[self.case.mask]()


class WholeJob(Prefill):
    """`chunked_prefill`: plan, gather, up-projection, attention and merge.

    The up-projection is a callable in float64: every target and the oracle then attend to the same rounded keys.
    """

    def __init__(self, case: Case, random: torch.Generator, fnuz: bool) -> None:
        super().__init__(case, random, fnuz)
        width = self.heads * (case.dims[0] - QK_ROPE_HEAD_DIM + case.dims[1])
        self.weight = (self._normal(width, KV_LORA_RANK) * KV_LORA_RANK**-0.5).to(self.data_dtype)

    def run(self, target: str, device: torch.device) -> Answer:
        offsets, collection = self._on(device)
        moved = self._moved(device)
        output, lse = chunked_prefill(
            moved["q"], collection, 0, self._project, offsets, self._mask(device), self.scale,
            buffer_token_size=self.buffer_rows, return_lse=True, sinks=moved.get("sinks"), target=target,
        )  # fmt: skip
        return output, lse

    def expect(self) -> Answer:
        cache, parts = self.batch.collection.layer(0), []
        for b, total in enumerate(self.totals):
            latent = reference.cache_rows(cache, b, torch.arange(total))[0].to(self.data_dtype)
            parts.append(self._project(latent))
        kv = torch.cat(parts).view(sum(self.totals), self.heads, -1)
        nope = self.case.dims[0] - QK_ROPE_HEAD_DIM
        offsets = torch.tensor([0, *accumulate(self.totals)])
        self.tensors |= {"k": kv[..., :nope], "v": kv[..., nope:], "cache_row_offsets": offsets}
        return super().expect()

    def _project(self, latent: torch.Tensor) -> torch.Tensor:
        return (latent.double() @ self.weight.to(latent.device, torch.float64).T).to(self.data_dtype)


OPERATIONS: dict[str, type[Plan]] = {
    "plan": Plan, "gather": Gather, "merge": Merge, "prefill": Prefill, "whole job": WholeJob,
}  # fmt: skip
#: What a page holds behind a sequence's end, for comparison.
_STALE = 12345.0


def _ragged(count: int, random: torch.Generator) -> tuple[int, ...]:
    """Return token counts of which one in four is 0 and one in four is 1; the last is a long one."""
    counts = torch.randint(2, 300, (count,), generator=random)
    kinds = torch.randint(4, (count,), generator=random)
    counts = torch.where(kinds < 2, kinds, counts)
    counts[-1] = torch.randint(200, 800, (), generator=random)
    return tuple(counts.tolist())


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.is_contiguous() or not tensor._is_view():
        return tensor.to(device)
    base = tensor._base
    assert base is not None
    return base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
