"""Calls that were made before: what makes two calls the same, and when none is repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mla
from mla import dispatch, masks
from mla.kv_cache import PagedKVCacheCollection
from mla.problem import Again

T, H, B = 6, 2, 3
KEPT = ["anew", "anew", "again"]  # the second time that addresses come a call is kept


class Implementation:
    """Stands for every implementation of a GPU, on the CPU: counts what is launched anew and what again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.anew, self.again, self.capturing = 0, 0, False
        for name in ("dispatch", "plan", "gather", "store", "merge", "quantize"):
            monkeypatch.setattr(f"mla.{name}.resolve", lambda *_: self.run)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr("mla._repeat._can_repeat", lambda device: not self.capturing)
        monkeypatch.setattr("mla._prefill_call.is_capturing", lambda device: self.capturing)
        # As on a GPU, where no value is looked at.
        monkeypatch.setattr("mla._prefill_call._check_values", lambda call, device: None)
        monkeypatch.setattr("mla._chunk_buffer.check_offsets", lambda *_: None)
        dispatch.forget()

    def run(self, args: Any) -> Again:
        self.anew += 1
        return self._again

    def _again(self) -> None:
        self.again += 1

    def count(self, call: Callable[[], object]) -> str:
        before = self.anew, self.again
        call()
        return {(1, 0): "anew", (0, 1): "again"}[self.anew - before[0], self.again - before[1]]

    def first(self, call: Callable[[], object]) -> list[str]:
        """Say what becomes of the first three calls."""
        return [self.count(call) for _ in range(3)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    with torch.no_grad():
        yield Implementation(monkeypatch)
    dispatch.forget()


def pages() -> PagedKVCacheCollection:
    return PagedKVCacheCollection.from_pages(
        torch.zeros(4, 16, 576), torch.zeros(B, 2, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    )


def operands() -> dict[str, Any]:
    """Return the arguments of a prefill by name."""
    kv = torch.zeros(8, H, 256)
    return {
        "output": torch.zeros(T, H, 128), "q": torch.zeros(T, H, 192), "k": kv[..., :128], "v": kv[..., 128:],
        "k_rope": pages().layer(0), "mask_functor": masks.CausalMask(),
        "valid_length": torch.zeros(B + 1, dtype=torch.int32),
        "cache_row_offsets": torch.zeros(B + 1, dtype=torch.int32), "scale": 0.1,
    }  # fmt: skip


def prefill(given: dict[str, Any], **keywords: Any) -> Callable[[], None]:
    return lambda: mla.flare_mla_prefill(*given.values(), target="cpu", **keywords)


def of(tensor: torch.Tensor) -> torch.Tensor:
    """Return another view of the same elements."""
    return tensor.view(tensor.shape)


def test_equal_calls_are_launched_again(launched: Implementation) -> None:
    given, lse = operands(), torch.zeros(T, H)
    assert launched.first(prefill(given, lse=lse)) == KEPT
    views = {name: of(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    assert launched.count(prefill(views, lse=of(lse))) == "again"
    assert launched.count(prefill(given | {"mask_functor": masks.CausalMask()}, lse=lse)) == "again"


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "address": lambda o: {"q": torch.zeros(T, H, 192)},
    "stride": lambda o: {"k": o["k"].as_strided((8, H, 128), (256, 256, 1))},
    "rows": lambda o: {"output": o["output"][:5], "q": o["q"][:5]},
    "dtype": lambda o: {"valid_length": o["valid_length"].view(torch.uint32)},
    "number": lambda o: {"scale": 0.2},
    "mask": lambda o: {"mask_functor": masks.NullMask()},
    "pages": lambda o: {"k_rope": pages().layer(0)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_call_is_not(change: str, launched: Implementation) -> None:
    given = operands()
    assert launched.first(prefill(given)) == KEPT
    changed = prefill(given | CHANGES[change](given))
    assert launched.count(changed) == "anew"
    assert launched.count(prefill(given)) == ("anew" if change in ("stride", "rows") else "again")
    assert launched.count(changed) == "anew"


def test_numbers_of_other_types_are_other_numbers(launched: Implementation) -> None:
    given = operands() | {"scale": 1.0}
    assert launched.first(prefill(given)) == KEPT
    assert launched.count(prefill(given | {"scale": 1})) == "anew"
    with pytest.raises(mla.DTypeError, match="scale must be a Python float, got bool"):
        prefill(given | {"scale": True})()


@pytest.mark.parametrize("name", ["valid_length", "sinks", "check_indices"])
def test_what_is_copied_or_looked_at_is_launched_anew(name: str, launched: Implementation) -> None:
    given, keywords = operands(), {}
    if name == "valid_length":
        given[name] = given[name].long()
    else:
        keywords = {name: torch.zeros(2 * H)[::2] if name == "sinks" else True}
    assert launched.first(prefill(given, **keywords)) == ["anew"] * 3


def fp8_operands() -> dict[str, Any]:
    """Return the arguments of a prefill in fp8 by name, but for its scales."""
    given, fp8 = operands(), torch.float8_e4m3fn
    given |= {name: given[name].to(fp8) for name in ("q", "k", "v")}
    return given | {"output": given["output"].bfloat16(), "k_rope": torch.zeros(8, 1, 64).to(fp8)}


SCALES = {"q_scale": 1.0, "k_scales": 0.5, "v_scale": 2.0}


class Streams:
    """Stands for the streams of a GPU: which is current, and what numbers were written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, launched: Implementation) -> None:
        self.current, self.written = 0, []
        monkeypatch.setattr("mla._launch._numbers", {})
        monkeypatch.setattr("mla._launch._raw_stream", lambda device: self.current)
        monkeypatch.setattr("mla._launch.is_capturing", lambda device: launched.capturing)
        full, fill = torch.full, torch.Tensor.fill_

        def noted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def write(where: Any, value: float, **keywords: Any) -> torch.Tensor:
                self.written.append((self.current, value))
                return function(where, value, **keywords)

            return write

        monkeypatch.setattr(torch, "full", noted(full))
        monkeypatch.setattr(torch.Tensor, "fill_", noted(fill))

    def writes(self, call: Callable[[], object]) -> list[tuple[int, float]]:
        """Return (stream, number) of what a call writes."""
        self.written.clear()
        call()
        return list(self.written)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, launched: Implementation) -> Streams:
    return Streams(monkeypatch, launched)


def with_rope_scales(given: dict[str, Any], **scales: Any) -> Callable[[], None]:
    return prefill(given, k_rope_scales=torch.ones(8, 1, 1), **scales)


def test_scales_that_are_numbers_are_repeated(launched: Implementation, streams: Streams) -> None:
    given = fp8_operands()
    numbers = with_rope_scales(given, **SCALES)
    assert launched.first(numbers) == KEPT
    assert launched.count(with_rope_scales(given, **SCALES | {"v_scale": 3.0})) == "anew"
    assert launched.count(with_rope_scales(given, **SCALES | {"v_scale": torch.ones(1)})) == "anew"
    assert launched.count(numbers) == "again"


def test_numbers_are_written_once_on_every_stream(launched: Implementation, streams: Streams) -> None:
    numbers, written = with_rope_scales(fp8_operands(), **SCALES), sorted(SCALES.values())
    assert sorted(streams.writes(numbers)) == [(0, value) for value in written]
    assert not streams.writes(numbers)
    streams.current = 7
    assert sorted(streams.writes(numbers)) == [(7, value) for value in written], "a repeated call as well"
    assert (launched.anew, launched.again) == (2, 1)
    assert not streams.writes(numbers)
    streams.current = 0
    assert not streams.writes(numbers)


def test_numbers_of_a_captured_graph_are_written_by_it(launched: Implementation, streams: Streams) -> None:
    numbers = with_rope_scales(fp8_operands(), **SCALES)
    streams.current, launched.capturing = 7, True
    assert len(streams.writes(numbers)) == 3 and len(streams.writes(numbers)) == 3, "each graph has its own"
    streams.current, launched.capturing = 0, False
    assert launched.first(numbers) == KEPT
    streams.current, launched.capturing = 7, True
    assert sorted(streams.writes(numbers)) == sorted((7, value) for value in SCALES.values())
    launched.capturing = False
    assert len(streams.writes(numbers)) == 3, "what a graph would write is not written yet"


def test_more_numbers_than_are_kept(
    launched: Implementation, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla._launch._NUMBERS_MAX", 2)
    assert launched.first(with_rope_scales(fp8_operands(), **SCALES)) == ["anew"] * 3
    kept = with_rope_scales(fp8_operands(), **SCALES | {"v_scale": torch.ones(1)})
    assert launched.first(kept) == KEPT


def test_nothing_is_repeated_while_a_graph_is_captured(launched: Implementation) -> None:
    call = prefill(operands())
    launched.capturing = True
    assert launched.first(call) == ["anew"] * 3
    launched.capturing = False
    assert launched.first(call) == KEPT, "and nothing was kept"
    launched.capturing = True
    assert launched.count(call) == "anew"


def test_a_gradient_is_refused_after_a_call_without(launched: Implementation) -> None:
    given = operands()
    with torch.enable_grad():
        call = prefill(given)
        assert launched.first(call) == KEPT
        given["q"].requires_grad_()
        with pytest.raises(mla.ArgumentError, match="q requires a gradient"):
            call()
        given["q"].requires_grad_(False)
        given["k_rope"].rope.requires_grad_()
        with pytest.raises(mla.ArgumentError, match="k_rope requires a gradient"):
            call()


def test_tensors_of_other_classes_are_told_apart(launched: Implementation) -> None:
    given = operands()
    for name in ("output", "q", "k", "v", "valid_length", "cache_row_offsets"):
        given[name] = torch.nn.Parameter(given[name], requires_grad=False)
    assert launched.first(prefill(given)) == KEPT
    assert (
        launched.count(prefill(given | {"q": torch.nn.Parameter(given["q"][:5]), "output": given["output"][:5]}))
        == "anew"
    )


def test_a_watcher_sees_every_call(launched: Implementation) -> None:
    call = prefill(operands())
    assert launched.first(call) == KEPT
    dispatch.watch(None)  # as any change of what serves a call
    assert launched.count(call) == "anew"


def test_what_cannot_be_called_is_no_launch(launched: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "_again", torch.zeros(1))
    assert launched.first(prefill(operands())) == ["anew"] * 3


@pytest.mark.parametrize("returned", [torch.zeros(1), 0, lambda: None])
def test_what_another_implementation_returns_is_no_launch(returned: object, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def run(args: Any) -> object:
        done.append(args)
        return returned

    monkeypatch.setattr("mla.merge.resolve", lambda *_: run)
    if not callable(returned):  # as on a GPU: on the CPU nothing is repeated
        monkeypatch.setattr("mla._repeat._can_repeat", lambda device: True)
    dispatch.forget()
    x, lse = torch.zeros(T, H, 128), torch.zeros(T, H)
    for _ in range(4):
        mla.merge_attn_states(x, x, lse, x, lse, target="cpu")
    dispatch.forget()
    assert len(done) == 4


def test_every_operation_repeats(launched: Implementation) -> None:
    cache, offsets = pages(), torch.zeros(B + 1, dtype=torch.int32)
    tables = torch.zeros(2, B + 1, dtype=torch.int32), torch.zeros(2, B, dtype=torch.int32), torch.zeros(2).int()
    latent, rope = torch.zeros(8, 512), torch.zeros(8, 64)
    x, fp8, scale = torch.zeros(T, H, 128), torch.zeros(T, H, 128).to(torch.float8_e4m3fn), torch.zeros(T, H, 1)
    layer, mask, given, ops = cache.layer(0).operands, masks.CausalMask().operands, operands(), torch.ops.mla
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: mla.generic_flare_mla_prefill_ragged_paged_plan(offsets, cache, 0, 64, *tables, target="cpu"),
        "gather": lambda: mla.gather.gather_latent(offsets, tables[1][0], 5, cache, 0, latent, target="cpu"),
        "store": lambda: cache.store(0, offsets, latent, rope, target="cpu"),
        "merge": lambda: mla.merge_attn_states(x, x, scale[..., 0], x, scale[..., 0], target="cpu"),
        "quantize": lambda: mla.quantize.quantize_per_token(x, out=fp8, scale=scale[..., 0][:, :1], target="cpu"),
        "plan, operator": lambda: ops.plan(*tables, None, offsets, *layer, 64, "cpu"),
        "gather, operator": lambda: ops.gather(latent, offsets, tables[1][0], 5, None, *layer, "cpu"),
        "store, operator": lambda: ops.store(*layer, offsets, latent, rope, "cpu"),
        "merge, operator": lambda: ops.merge(given["output"], None, x, scale[..., 0], x, scale[..., 0], target="cpu"),
        "prefill, operator": lambda: ops.prefill(
            given["output"], given["q"], None, given["k"], given["v"], *given["k_rope"].operands, *mask, offsets,
            offsets, 0.1, target="cpu",
        ),
    }  # fmt: skip
    for name, call in calls.items():
        assert launched.first(call) == KEPT, name


def test_a_job_repeats_its_launches(launched: Implementation) -> None:
    cache, q, weight = pages(), torch.zeros(T, H, 192), torch.zeros(H * 256, 512)
    offsets, output = torch.tensor([0, 1, 3, T], dtype=torch.int32), torch.zeros(T, H, 128)
    plan = mla.prefill_plan(offsets, cache, 0, 64, seq_lens_cpu=[1, 2, 3], target="cpu")
    workspace = torch.zeros(mla.workspace_size("chunked_prefill", q, cache, 0, weight, plan=plan), dtype=torch.uint8)

    def call() -> None:
        mla.chunked_prefill(
            q, cache, 0, weight, offsets, masks.CausalMask(), 0.1, plan=plan, output=output, workspace=workspace,
            target="cpu",
        )  # fmt: skip

    for _ in range(2):
        call()
    anew, again = launched.anew, launched.again
    call()
    assert (launched.anew - anew, launched.again - again) == (1, 1), "the gather, and the attention"
