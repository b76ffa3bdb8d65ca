"""Doubles and arguments for tests of launches that are made again: they get what a call made anew would give them.

Kernels are neither compiled nor run: launches end in a double of the driver that keeps what it was given.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mla
from mla import _repeat, chunked, dispatch, gather, masks, plan, quantize, registry, store
from mla._prefill_call import Call
from mla.kv_cache import PagedKVCache, PagedKVCacheCollection
from mla.plan import PrefillPlan
from mla.problem import Problem
from mla.registry_file import Implementation

T, H, B, PAGES, P = 6, 2, 3, 4, 16
BF16, INT32 = {"dtype": torch.bfloat16}, {"dtype": torch.int32}


class Driver:
    """What stands for the driver: the launches it was asked for, and a stream that can be another one."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.launches: list[tuple[Any, ...]] = []
        self.stream = 1
        self.prepared = 0  # launches that were prepared anew

    def choose(self, problem: Problem, target: Any, device: torch.device) -> Implementation:
        """Return what serves a problem on the driver's own target, whichever is asked for."""
        explanation = dispatch.explain(problem.op, problem, target=self.target)
        if explanation.chosen is None:
            raise mla.UnsupportedError("refused", explanation)
        return registry.default()[explanation.chosen]

    def resolve(self, problem: Problem, target: Any, device: torch.device) -> dispatch.Runner:
        """Return what launches, and counts that it was asked to."""
        run = self.choose(problem, target, device).load().prepare(problem, device)

        def count(args: Any) -> Any:
            self.prepared += 1
            return run(args)

        return count

    def of(self, call: Callable[[], object]) -> list[tuple[Any, ...]] | str:
        """Return what a call launches, or what it raises."""
        first = len(self.launches)
        try:
            call()
        except (mla.MlaError, TypeError, ValueError) as error:
            return repr(error)
        return self.launches[first:]

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand for the driver of a GPU, on which no value of an index tensor is looked at."""
        for name in ("dispatch", "plan", "gather", "store", "merge", "quantize"):
            monkeypatch.setattr(f"mla.{name}.resolve", self.resolve)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.stream, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(_repeat, "_can_repeat", lambda device: True)
        monkeypatch.setattr("mla._prefill_call._check_values", lambda call, device: None)
        monkeypatch.setattr("mla.chunked.readable", lambda tensor: False)
        for name in ("gather", "plan", "_chunk_buffer"):
            monkeypatch.setattr(f"mla.{name}.check_offsets", lambda *_: None)
        monkeypatch.setattr(PagedKVCache, "check_indices", lambda self, offsets: None)


def anew(driver: Driver, call: Callable[[], object]) -> list[tuple[Any, ...]] | str:
    """Return what a call launches that remembers nothing, and remember nothing of it."""
    kept = dict(_repeat._launches)
    _repeat._launches.clear()
    launches = driver.of(call)
    _repeat._launches.clear()
    _repeat._launches.update(kept)
    return launches


class Given:
    """The arguments of calls; a step exchanges one, or changes it in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.pool = [torch.zeros(2 * T * H * 192, **BF16) for _ in range(2)]
        self.memory, self.kpe = torch.zeros(PAGES, P, 512, **BF16), torch.zeros(PAGES, P, 64, **BF16)
        self.table, self.lengths, self.numbers = (torch.zeros(*n, **INT32) for n in ((B, 2), (B,), (2, B + 1)))
        self.tables = torch.zeros(2, B + 1, **INT32), torch.zeros(2, B, **INT32), torch.zeros(2, **INT32)
        self.captured, self.bias = torch.zeros(B, **INT32), torch.zeros(B, 2, 4, 8)
        self.latent, self.rope = torch.zeros(8, 512, **BF16), torch.zeros(8, 64, **BF16)
        self.fp8, self.fp8_scale = torch.zeros(T, H, 192).to(torch.float8_e4m3fn), torch.zeros(T, 1, 1)
        self.q, self.output, self.parts = self.rows(0, 192), self.rows(1, 128), torch.zeros(2, T, H, 128, **BF16)
        kv = torch.zeros(8, H, 256, **BF16)
        self.k, self.v = kv[..., :128], kv[..., 128:]
        self.cache, self.mask, self.scale = self.layer(), masks.CausalMask(), 0.1
        self.offsets, self.rows_of_chunk, self.size = self.numbers[0], 8, 64
        self.weight, self.workspace = torch.zeros(H * 256, 512, **BF16), torch.zeros(1 << 18, dtype=torch.uint8)
        self.plan = PrefillPlan(*self.tables, torch.zeros(1, **INT32), 64, P)
        known = {"seq_lens_cpu": torch.tensor([40, 30, 20]), "row_offsets_cpu": torch.tensor([0, 1, 3, T])}
        self.plan_by_groups = dataclasses.replace(self.plan, total_rows=48 + 32 + 32, **known)
        self.keywords: dict[str, Any] = {"lse": torch.zeros(T, H)}

    def rows(self, pool: int, width: int) -> torch.Tensor:
        return self.pool[pool][: T * H * width].view(T, H, width)

    def layer(self, lengths: str = "cache_lengths", **more: Any) -> PagedKVCache:
        more |= {lengths: self.lengths, "kpe_cache": self.kpe}
        return PagedKVCacheCollection.from_pages(self.memory, self.table, **more).layer(0)

    def traced(self, *more: Any) -> PagedKVCache:
        """Return a layer as `torch.compile` leaves one behind that was made in traced code."""
        with self.monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            return self.layer(*more)

    def calls(self) -> dict[str, Callable[[], object]]:
        lse = torch.zeros(T, H)
        return {
            "prefill": lambda: mla.flare_mla_prefill(
                self.output, self.q, self.k, self.v, self.cache, self.mask, self.offsets, self.offsets, self.scale,
                **self.keywords,
            ),
            "gather": lambda: gather._gather_layer(
                self.latent, self.offsets, self.numbers[1][:B], self.rows_of_chunk, self.cache
            ),
            "store": lambda: store._store_layer(self.cache, self.offsets, self.latent, self.rope),
            "plan": lambda: plan._write_plan(self.offsets, self.cache, self.size, (*self.tables, None)),
            "job": lambda: self.job(self.plan),
            "job, lengths known": lambda: self.job(self.plan_by_groups),
            "merge": lambda: mla.merge_attn_states(self.output, self.parts[0], lse, self.parts[1], lse),
            "quantize": lambda: quantize.launch(self.fp8, self.fp8_scale, self.q, 0, False),
        }  # fmt: skip

    def job(self, plan: PrefillPlan) -> None:
        mask = masks.as_mask(self.mask, "mask")
        call = Call(
            self.output, self.q, None, self.q, self.q, self.cache, None, mask, self.offsets, self.offsets,
            self.scale, **{name: self.keywords.get(name, 0.0) for name in ("lse", "sinks", "softcap")},
        )  # fmt: skip
        extents = chunked.find_extents(self.q, self.cache, self.weight, 0, plan)
        chunked.run_job(call, self.weight, extents, plan, None, None, self.workspace, True)

    def copies(self) -> bool:
        """Return whether something is copied before a launch, so that addresses differ from call to call."""
        sinks = self.keywords.get("sinks")
        offsets_in_place = self.offsets.dtype != torch.int64 and self.offsets.is_contiguous()
        return not offsets_in_place or not (sinks is None or sinks.is_contiguous())

    def changed(self, name: str) -> Given:
        """Return these arguments with another one."""
        CHANGES[name](self)
        return self


def put(name: str, make: Callable[[Given], Any]) -> Callable[[Given], None]:
    return lambda given: setattr(given, name, make(given))


def keyword(name: str, make: Callable[[Given], Any]) -> Callable[[Given], None]:
    return lambda given: given.keywords.update({name: make(given)})


def move(name: str) -> Callable[[Given], None]:
    """Let a tensor's memory be elsewhere, as an engine does that gives it back for a while."""

    def moved(given: Given) -> None:
        memory = getattr(given, name).untyped_storage()
        address = memory.data_ptr()
        memory.resize_(2 * memory.nbytes())
        assert memory.data_ptr() != address

    return moved


def fewer_rows(given: Given) -> None:
    given.q, given.output, given.parts = given.q[:5], given.output[:5], given.parts[:, :5]
    given.keywords["lse"] = None


CHANGES: dict[str, Callable[[Given], object]] = {
    "q elsewhere": put("q", lambda g: torch.zeros(T, H, 192, **BF16)),
    "q with gaps": put("q", lambda g: g.pool[0].view(2 * T, H, 192)[::2]),
    "q by heads": put("q", lambda g: g.rows(0, 192).view(H, T, 192).transpose(0, 1)),
    "q as it was": put("q", lambda g: g.rows(0, 192)),
    "q a parameter": put("q", lambda g: torch.nn.Parameter(g.q.detach(), requires_grad=False)),
    "q wants a gradient": put("q", lambda g: g.q.detach().requires_grad_()),
    "q fp16": put("q", lambda g: g.q.detach().view(torch.float16)),
    "all fp16": lambda g: [setattr(g, name, getattr(g, name).detach().view(torch.float16)) for name in "qkv"],
    "output fp16": put("output", lambda g: g.rows(1, 128).view(torch.float16)),
    "output fp32": put("output", lambda g: g.pool[1].view(torch.float32)[: T * H * 128].view(T, H, 128)),
    "output as it was": put("output", lambda g: g.rows(1, 128)),
    "fewer rows": fewer_rows,
    "another layer": put("cache", Given.layer),
    "a bound": put("cache", lambda g: g.layer(max_seq_length=1)),
    "a longer bound": put("cache", lambda g: g.layer(max_seq_length=2)),
    "lengths with the new": put("cache", lambda g: g.layer("seq_lens")),
    "a layer of traced code": put("cache", Given.traced),
    "lengths with the new in traced code": put("cache", lambda g: g.traced("seq_lens")),
    "other pages": put("memory", lambda g: torch.zeros(PAGES, P, 512, **BF16)),
    "other ropes": put("kpe", lambda g: torch.zeros(PAGES, P, 64, **BF16)),
    "wider ropes": put("kpe", lambda g: torch.zeros(PAGES, P, 128, **BF16)[..., :64]),
    "pages moved": move("memory"),
    "ropes moved": move("kpe"),
    "table moved": move("table"),
    "lengths moved": move("lengths"),
    "other offsets": put("offsets", lambda g: g.numbers[1]),
    "offsets uint32": put("offsets", lambda g: g.numbers[0].view(torch.uint32)),
    "offsets int64": put("offsets", lambda g: torch.zeros(B + 1, dtype=torch.int64)),
    "offsets with gaps": put("offsets", lambda g: torch.zeros(B + 1, 2, **INT32)[:, 0]),
    "rows": put("rows_of_chunk", lambda g: 7),
    "no rows": put("rows_of_chunk", lambda g: 0),
    "rows a bool": put("rows_of_chunk", lambda g: True),
    "one row": put("rows_of_chunk", lambda g: 1),
    "size 1": put("size", lambda g: 1),
    "size a bool": put("size", lambda g: True),
    "scale": put("scale", lambda g: 0.2),
    "scale 1.0": put("scale", lambda g: 1.0),
    "scale a bool": put("scale", lambda g: True),
    "scale NaN": put("scale", lambda g: float("nan")),
    "scale below 0": put("scale", lambda g: -0.1),
    "scale a tensor": put("scale", lambda g: torch.tensor(0.1)),
    "no mask": put("mask", lambda g: masks.NullMask()),
    "text of the mask": put("mask", lambda g: getattr(g.mask, "text", g.mask)),
    "mask of a tensor": put("mask", lambda g: masks.CausalPaddingMask(g.captured)),
    "mask of a copy": put("mask", lambda g: masks.CausalPaddingMask(g.captured.long())),
    "captured moved": move("captured"),
    "bias": put("mask", lambda g: masks.MaterializedMask(g.bias)),
    "bias for all heads": put("mask", lambda g: masks.MaterializedMask(g.bias[:, :1])),
    "bias for all rows": put("mask", lambda g: masks.MaterializedMask(g.bias[:, :, :1].expand(B, 2, 4, 8))),
    "bias fp16": put("mask", lambda g: masks.MaterializedMask(g.bias.view(torch.float16)[..., :8])),
    "no lse": keyword("lse", lambda g: None),
    "lse with gaps": keyword("lse", lambda g: torch.zeros(T, 2 * H)[:, ::2]),
    "lse HT": lambda g: g.keywords.update(lse=torch.zeros(H, T), lse_layout="HT"),
    "softcap": keyword("softcap", lambda g: 30.0),
    "sinks": keyword("sinks", lambda g: torch.zeros(H)),
    "sinks with gaps": keyword("sinks", lambda g: torch.zeros(2 * H)[::2]),
    "cache_offsets": keyword("cache_offsets", lambda g: g.numbers[1][:B]),
    "starts in their place": lambda g: g.keywords.update(start_positions=g.keywords.pop("cache_offsets", None)),
    "start_positions": keyword("start_positions", lambda g: g.numbers[1][:B]),
    "kv_lengths": keyword("kv_lengths", lambda g: g.numbers[1][:B]),
    "q_max_seq_len": keyword("q_max_seq_len", lambda g: 1),
    "batch_invariant": keyword("batch_invariant", lambda g: False),
    "rope_prescaled": keyword("rope_prescaled", lambda g: False),
    "target": keyword("target", lambda g: "cuda"),
}

#: Changes one after the other that are not seen beside what was given first.
PAIRS = (
    ("other pages", "another layer"), ("other ropes", "another layer"), ("wider ropes", "another layer"),
    ("a layer of traced code", "lengths with the new in traced code"), ("mask of a tensor", "captured moved"),
    ("scale 1.0", "scale a bool"), ("one row", "rows a bool"), ("size 1", "size a bool"),
    ("bias", "bias for all rows"), ("cache_offsets", "starts in their place"),
)  # fmt: skip


def check(driver: Driver, given: Given, done: object) -> int:
    """Make each call as if it were the first, and three times more; return how many were repeated."""
    repeated = 0
    for name, call in given.calls().items():
        expected = anew(driver, call)
        for _ in range(3):
            prepared = driver.prepared
            launches = driver.of(call)
            if not given.copies() or isinstance(expected, str):
                assert launches == expected, (name, done)
            repeated += driver.prepared == prepared and not isinstance(launches, str)
    return repeated


def check_nothing_is_kept_alive(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat calls and let go of their arguments; what remembers the launches must hold none of them."""
    given = Given(monkeypatch).changed("mask of a copy").changed("sinks")
    with torch.no_grad():
        check(driver, given, "nothing")
    tensors = [value for value in vars(given).values() if isinstance(value, torch.Tensor)]
    tensors += [given.cache.latent, *given.tables, *given.keywords.values()]
    alive = [weakref.ref(x) for x in (*tensors, given.mask)]
    del given, tensors
    gc.collect()
    assert not [x for x in alive if x() is not None]
