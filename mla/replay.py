"""Calls on file: what a kernel got and what it wrote, to be run again anywhere and compared with the oracle.

A recording holds the arguments of one launch in their canonical form (`mla.problem`), on the CPU, with their strides.
Of a paged cache it holds the pages that the call may read. It is a torch file of tensors, numbers and text, which
loads without executing anything.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch

from mla import reference
from mla._check import alignment
from mla._launch import stream_scope
from mla.dispatch import resolve
from mla.errors import ArgumentError
from mla.kv_cache import PagedKVCache
from mla.masks import Mask, MaskProgram
from mla.problem import GatherArgs, MergeArgs, PlanArgs, PrefillArgs, Problem, ProjectArgs, QuantizeArgs, StoreArgs
from mla.target import Target
from mla.tolerance import lse_error, output_error, precision_of

FORMAT = 1

Args = PlanArgs | GatherArgs | ProjectArgs | StoreArgs | PrefillArgs | MergeArgs | QuantizeArgs
_ARGS: dict[str, Callable[..., Args]] = {
    "plan": PlanArgs, "gather": GatherArgs, "project": ProjectArgs, "store": StoreArgs, "prefill": PrefillArgs,
    "merge": MergeArgs, "quantize": QuantizeArgs,
}  # fmt: skip
#: Arguments that a launch writes, by op. A store writes into the cache.
_WRITTEN: dict[str, tuple[str, ...]] = {
    "plan": ("buffer_row_offsets", "cache_offsets", "buffer_lengths", "required_chunks"),
    "gather": ("output",),
    "project": ("output",),
    "store": ("cache.latent", "cache.rope", "cache.scales"),
    "prefill": ("output", "lse"),
    "merge": ("output", "output_lse"),
    "quantize": ("output", "scale"),
}
_CACHE_FIELDS = (
    "latent", "rope", "scales", "quantization_granularity", "page_table", "page_indptr", "lengths",
    "lengths_include_new", "max_seq_length", "max_cache_length",
)  # fmt: skip
_CPU = torch.device("cpu")


def flatten(args: Args) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of every argument, those of a cache and a mask by names with a dot."""
    for one in dataclasses.fields(args):
        value = getattr(args, one.name)
        if isinstance(value, PagedKVCache):
            yield from ((f"{one.name}.{name}", part) for name, part in zip(_CACHE_FIELDS, value.operands, strict=True))
        elif isinstance(value, Mask):
            text, captures, biases = value.operands
            yield f"{one.name}.text", text
            yield from ((f"{one.name}.capture{i}", tensor) for i, tensor in enumerate(captures))
            yield from ((f"{one.name}.bias{i}", tensor) for i, tensor in enumerate(biases))
        else:
            yield one.name, value


def written(op: str, args: Args) -> dict[str, torch.Tensor]:
    """Return the arguments that a launch writes."""
    return {name: value for name, value in flatten(args) if name in _WRITTEN[op] and value is not None}


@dataclasses.dataclass
class Recording:
    """One launch.

    Attributes
    ----------
    op, implementation : str
    problem : dict
        Fields of `Problem`, the mask aside.
    arguments : dict
        By the names of `flatten`, on the CPU.
    results : dict of torch.Tensor
        What the launch wrote, by the same names; empty where it did not end.
    """

    op: str
    implementation: str
    problem: dict[str, Any]
    arguments: dict[str, Any]
    results: dict[str, torch.Tensor]

    @classmethod
    def of(cls, implementation: str, problem: Problem, args: Args) -> Recording:
        """Copy what a launch is about to get. Synchronises with the device."""
        fields = {one.name: getattr(problem, one.name) for one in dataclasses.fields(problem) if one.name != "mask"}
        fields.update(features=sorted(problem.features), dims=list(problem.dims))
        cache = getattr(args, "cache", None)
        if cache is not None:
            args = _with_cache(args, cache)
        arguments = {
            name: _copied(value) if isinstance(value, torch.Tensor) else value for name, value in flatten(args)
        }
        return cls(problem.op, implementation, fields, arguments, {})

    def add_results(self, args: Args) -> None:
        """Copy what the launch wrote. Synchronises with the device."""
        cache = getattr(args, "cache", None)
        if self.op == "store" and cache is not None:
            args = _with_cache(args, cache)
        self.results = {name: _copied(tensor) for name, tensor in written(self.op, args).items()}

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        torch.save({"format": FORMAT, **vars(self)}, beside)
        os.replace(beside, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read a file.

        Raises
        ------
        ArgumentError
            It is no recording, or one of another version.
        OSError
            It cannot be read.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            found = content.pop("format")
        except OSError:
            raise
        except Exception as error:
            raise ArgumentError(f"{os.fspath(path)} is no recording of this library: {error}") from error
        if found != FORMAT:
            raise ArgumentError(f"{os.fspath(path)} has format {found}, this version reads {FORMAT}")
        return cls(**content)

    def run(self, target: str | Target, device: torch.device) -> dict[str, torch.Tensor]:
        """Launch it again on a target; return what was written, on the CPU.

        Raises
        ------
        UnsupportedError, DeviceError, CompileError
            As any call.
        """
        args = self.args(device)
        with stream_scope(device, None):
            resolve(self.problem_on(args), target, device)(args)
        return {name: tensor.cpu() for name, tensor in written(self.op, args).items()}

    def expect(self) -> dict[str, torch.Tensor]:
        """Return what the oracle says of the same arguments."""
        args = self.args(_CPU)
        if self.op in _EXPECT:
            return cast("dict[str, torch.Tensor]", _EXPECT[self.op](args))
        resolve(self.problem_on(args), "cpu", _CPU)(args)  # quantised bytes are the same on every backend
        return written(self.op, args)

    def errors(self, results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return each result's error as a share of its bound: up to 1 is within it."""
        precision = precision_of(self.problem["dtypes"].removesuffix("_fnuz"))
        if self.op in ("gather", "project"):
            precision = self.problem["out_dtype"]
        shares = {}
        for name, tensor in expected.items():
            if self.op in ("plan", "store", "quantize"):
                same = torch.equal(_bits(results[name]), _bits(tensor.to(results[name].dtype)))
                shares[name] = 0.0 if same else float("inf")
            elif "lse" in name:
                shares[name] = lse_error(results[name], tensor, precision)
            else:
                shares[name] = output_error(results[name], tensor, precision)
        return shares

    def args(self, device: torch.device) -> Args:
        """Return the arguments as the launch got them, on a device."""
        values: dict[str, Any] = {
            name: _copied(value, device) if isinstance(value, torch.Tensor) else value
            for name, value in self.arguments.items()
        }
        groups: dict[str, dict[str, Any]] = {"cache": {}, "mask": {}}
        for name in list(values):
            group, _, part = name.partition(".")
            if part:
                groups[group][part] = values.pop(name)
        if groups["cache"]:
            values["cache"] = PagedKVCache.of(*(groups["cache"][name] for name in _CACHE_FIELDS))
        if groups["mask"]:
            text = groups["mask"].pop("text")
            parts = [[v for n, v in groups["mask"].items() if n.startswith(kind)] for kind in ("capture", "bias")]
            values["mask"] = Mask.from_text(text, *parts)
        return _ARGS[self.op](**values)

    def problem_on(self, args: Args) -> Problem:
        """Return the problem that the arguments pose, aligned as they are."""
        cache = getattr(args, "cache", None)
        fields = {**self.problem, "features": frozenset(self.problem["features"]), "dims": tuple(self.problem["dims"])}
        tensors = [v for n, v in flatten(args) if isinstance(v, torch.Tensor) and v.ndim > 1 and "." not in n]
        if self.op != "plan":
            fields["alignment"] = min(alignment(*tensors), cache.alignment if cache is not None else 16)
        mask = self.arguments.get("mask.text")
        return Problem(**fields, mask=None if mask is None else MaskProgram.from_text(mask))


def _copied(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a copy with the same strides, unless they leave most of the memory out."""
    shape, strides = tensor.shape, tensor.stride()
    extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if tensor.numel() else 0
    broadcast = [s == 0 and n > 1 for n, s in zip(shape, strides, strict=True)]
    if any(broadcast):
        once = tensor[tuple(slice(1) if b else slice(None) for b in broadcast)]
        return _copied(once, device).expand(shape)
    if extent > 4 * tensor.numel():
        return tensor.detach().to(device, copy=True).contiguous()
    copy = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
    return copy.copy_(tensor.detach())


def _with_cache(args: Any, cache: PagedKVCache) -> Any:
    return dataclasses.replace(args, cache=_compact(cache, _tokens(args)))


def _tokens(args: Args) -> torch.Tensor:
    """Return how many tokens of each sequence a launch may read or write: int64 [B]."""
    cache = cast(PagedKVCache, args.cache)  # type: ignore[union-attr]
    if isinstance(args, GatherArgs):
        return args.cache_offsets.long() + args.buffer_row_offsets.long().diff()
    if isinstance(args, StoreArgs):
        return cache.total_lengths(args.input_row_offsets)
    if isinstance(args, PrefillArgs):
        tokens = cache.total_lengths(args.cu_seqlens_q)
        return tokens if args.kv_lengths is None else tokens.maximum(args.kv_lengths.long())
    return torch.zeros_like(cache.lengths, dtype=torch.int64)  # a plan reads lengths alone


def _compact(cache: PagedKVCache, tokens: torch.Tensor) -> PagedKVCache:
    """Return a cache of the pages that hold these tokens, numbered anew; other entries of the table become -1."""
    table, needed = cache.page_table, -(-tokens // cache.page_size)
    if cache.page_indptr is None:
        live = torch.arange(table.shape[1], device=table.device) < needed[:, None]
    else:
        starts = cache.page_indptr.long()
        entry = torch.arange(table.shape[0], device=table.device)
        owner = torch.searchsorted(starts[1:], entry, right=True).clamp(max=cache.batch_size - 1)
        live = (entry >= starts[0]) & (entry - starts[owner] < needed[owner]) & (entry < starts[owner + 1])
    ids, places = table[live].long().unique(return_inverse=True)
    numbered = torch.full_like(table, -1)
    numbered[live] = places.to(torch.int32)
    parts = (None if part is None else part[ids] for part in (cache.latent, cache.rope, cache.scales))
    latent, rope, scales = parts
    assert latent is not None and rope is not None
    return PagedKVCache.of(latent, rope, scales, cache.operands[3], numbered, *cache.operands[5:])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _expect_plan(args: PlanArgs) -> dict[str, torch.Tensor]:
    new = args.input_row_offsets.diff().tolist()
    cached = args.cache.cached_lengths(args.input_row_offsets).tolist()
    chunks = args.buffer_lengths.shape[0]
    *tables, required = reference.plan(cached, new, args.cache.page_size, args.buffer_token_size, chunks)
    answer = (*(torch.tensor(table, device="cpu") for table in tables), torch.tensor([required], device="cpu"))
    names = _WRITTEN["plan"] if new else _WRITTEN["plan"][2:]
    return {
        name: table
        for name, table in zip(_WRITTEN["plan"], answer, strict=True)
        if name in names and getattr(args, name) is not None
    }


def _expect_gather(args: GatherArgs) -> dict[str, torch.Tensor]:
    length = max(0, int(args.buffer_length))
    rows = reference.gather(args.buffer_row_offsets, args.cache_offsets, args.cache)[:length]
    output = args.output.double()
    output[:length] = 0
    output[: rows.shape[0]] = rows
    return {"output": output}


def _expect_project(args: ProjectArgs) -> dict[str, torch.Tensor]:
    output, most = args.a.double() @ args.b.double().T, torch.finfo(args.output.dtype).max
    each = args.scale.double().repeat_interleave(-(-len(output) // len(args.scale)))[: len(output), None]
    return {"output": (output / each).clamp(-most, most)}


def _expect_prefill(args: PrefillArgs) -> dict[str, torch.Tensor]:
    k_rope: PagedKVCache | torch.Tensor
    scales = None
    if args.cache is not None:
        k_rope = args.cache
    else:
        assert args.rope is not None
        k_rope = torch.nn.functional.pad(args.rope.float(), (args.rope_scale_base, 0)).to(args.rope.dtype).unsqueeze(-2)
        scales = None if args.rope_scales is None else args.rope_scales.unsqueeze(-2)
    output, lse = reference.prefill(
        args.q, args.k, args.v, k_rope, args.mask, args.cu_seqlens_q, args.cu_seqlens_k, args.softmax_scale,
        q_rope=args.q_rope, k_rope_scales=scales, cache_offsets=args.cache_offsets,
        start_positions=args.start_positions, kv_lengths=args.kv_lengths, q_scale=args.q_scale,
        k_scales=args.k_scales, v_scale=args.v_scale, rope_prescaled=args.rope_prescaled, sinks=args.sinks,
        softcap=args.softcap,
    )  # fmt: skip
    first, last = int(args.cu_seqlens_q[0]), int(args.cu_seqlens_q[-1])
    expected = {"output": _rows(args.output, output, first, last)}
    if args.lse is not None:
        expected["lse"] = _rows(args.lse, lse, first, last)
    return expected


def _rows(before: torch.Tensor, answer: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return an answer with what was there before in the rows that nobody writes."""
    result = before.double()
    result[first:last] = answer[first:last]
    return result


def _expect_merge(args: MergeArgs) -> dict[str, torch.Tensor]:
    output, lse = reference.merge(args.prefix_output, args.prefix_lse, args.suffix_output, args.suffix_lse)
    return {"output": output} if args.output_lse is None else {"output": output, "output_lse": lse}


_EXPECT: dict[str, Any] = {
    "plan": _expect_plan, "gather": _expect_gather, "project": _expect_project, "prefill": _expect_prefill,
    "merge": _expect_merge,
}  # fmt: skip
