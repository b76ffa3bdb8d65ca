"""What stands between the public prefill functions and a kernel: checks, canonical form, choice.

`Call` holds one call as the caller wrote it. All that follows from shapes, dtypes, strides, flags and the mask's
program is worked out once into a `Form` and found again by the call's signature; values that change from step to step
are looked at on the CPU only, where that is free.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla import dispatch
from mla._check import as_index, check_non_negative, check_offsets, is_capturing, readable, require_no_grad
from mla._launch import Stream, behind_numbers, number_on, stream_scope, traced_target
from mla._prefill_check import describe
from mla.errors import ArgumentError, ShapeError
from mla.kv_cache import PagedKVCache
from mla.masks import Mask, as_mask
from mla.problem import QK_ROPE_HEAD_DIM, Again, PrefillArgs, Problem
from mla.target import Target

Scale = torch.Tensor | float | None

_forms = dispatch.Memo()
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Form:
    """What the calls of one signature have in common."""

    problem: Problem
    run: dispatch.Runner
    indices_ready: bool  # every index tensor is contiguous int32 on the device of the call
    indices_on_cpu: bool  # one of them can be read without a sync
    captures: bool  # a cache or a mask brings tensors that may have been copied before the call
    reads_operands: bool  # the kernel reads the call's own tensors and numbers, nothing that was made for the call
    numbers: bool  # a scale is a Python number


@dataclass(slots=True)
class Call:
    """One call as it was written; the fields are the arguments of `mla.prefill`."""

    output: torch.Tensor
    q: torch.Tensor
    q_rope: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    k_rope: PagedKVCache | torch.Tensor
    k_rope_scales: torch.Tensor | None
    mask: Mask
    valid_length: torch.Tensor
    cache_row_offsets: torch.Tensor
    scale: float
    q_max_seq_len: int | None = None
    cache_offsets: torch.Tensor | None = None
    start_positions: torch.Tensor | None = None
    kv_lengths: torch.Tensor | None = None
    q_scale: Scale = None
    k_scales: Scale = None
    v_scale: Scale = None
    rope_prescaled: bool = True
    lse: torch.Tensor | None = None
    lse_layout: str = "TH"
    sinks: torch.Tensor | None = None
    softcap: float = 0.0
    workspace: torch.Tensor | None = None
    check_indices: bool = False
    batch_invariant: bool = True
    target: str | Target = "gpu"

    @property
    def indices(self) -> dict[str, torch.Tensor | None]:
        """The index tensors that were given, by name."""
        return {
            "valid_length": self.valid_length,
            "cache_row_offsets": self.cache_row_offsets,
            "cache_offsets": self.cache_offsets,
            "start_positions": self.start_positions,
            "kv_lengths": self.kv_lengths,
        }

    @property
    def numbers(self) -> tuple[float, ...]:
        """The scales that are Python numbers."""
        scales = self.q_scale, self.k_scales, self.v_scale
        return tuple(scale for scale in scales if isinstance(scale, (float, int)))


def launch(call: Call, stream: Stream | None) -> Again | None:
    """Check the call, choose its kernel and launch it; see `mla._repeat.repeating` for what is returned.

    Raises
    ------
    MlaError
        As the public functions document; nothing has been launched then.
    """
    if torch.compiler.is_compiling():
        _trace(call, stream)
        return None
    form = judge(call)
    with stream_scope(call.q.device, stream):
        return attend(call, form)


def attend(call: Call, form: Form) -> Again | None:
    """Launch a call that was judged, on the current stream; see `mla._repeat.repeating` for what is returned."""
    again = form.run(canonical(call, form))
    if again is None or not form.reads_operands or call.check_indices:
        return None
    return behind_numbers(again, call.numbers, call.q.device) if form.numbers else again


def judge(call: Call) -> Form:
    """Return the form of a call; raise whatever is wrong with it, as far as that costs no look at values.

    A form also serves calls that differ in the rows of their tensors alone.
    """
    form = find_form(call)
    if torch.is_grad_enabled():
        _refuse_gradients(call)
    if form.captures and is_capturing(call.q.device):
        _check_capturable(call)
    _require_float32(call.scale, "scale")
    _require_float32(call.softcap, "softcap", least=0)
    return form


def _require_float32(value: float, name: str, least: float = -_LARGEST) -> None:
    """Raise unless a Python number is one that float32 holds: kernels compute in it."""
    if not least <= value <= _LARGEST:
        raise ArgumentError(f"{name} must be a finite float32 number{' >= 0' * (least == 0)}, got {value!r:.40}")


def _trace(call: Call, stream: Stream | None) -> None:
    """Put the call into a graph that is being traced, as one operator."""
    _refuse_gradients(call)
    rope, mask = call.k_rope, as_mask(call.mask, "mask_functor")
    if isinstance(rope, PagedKVCache):
        rope_operands = rope.operands
    else:
        rope_operands = (None, rope, call.k_rope_scales, 0, None, None, None, False, 0, 0)
    scales = [
        torch.full((1,), float(scale), dtype=torch.float32, device=call.q.device)
        if isinstance(scale, (int, float))
        else scale
        for scale in (call.q_scale, call.k_scales, call.v_scale)
    ]
    torch.ops.mla.prefill(
        call.output, call.q, call.q_rope, call.k, call.v, *rope_operands, *mask.operands, call.valid_length,
        call.cache_row_offsets, call.scale, call.q_max_seq_len, call.cache_offsets, call.start_positions,
        call.kv_lengths, *scales, call.rope_prescaled, call.lse, call.lse_layout, call.sinks, call.softcap,
        call.workspace, call.check_indices, call.batch_invariant, traced_target(call.target, stream),
    )  # fmt: skip


def _refuse_gradients(call: Call) -> None:
    rope = call.k_rope.rope if isinstance(call.k_rope, PagedKVCache) else call.k_rope
    require_no_grad(q=call.q, q_rope=call.q_rope, k=call.k, v=call.v, k_rope=rope, sinks=call.sinks)
    require_no_grad(output=call.output, lse=call.lse, k_rope_scales=call.k_rope_scales)
    for name, scale in (("q_scale", call.q_scale), ("k_scales", call.k_scales), ("v_scale", call.v_scale)):
        if isinstance(scale, torch.Tensor):
            require_no_grad(**{name: scale})
    for bias in call.mask.biases:
        require_no_grad(bias=bias)


def _check_capturable(call: Call) -> None:
    if isinstance(call.k_rope, PagedKVCache):
        call.k_rope.check_capturable()
    call.mask.check_capturable()


def find_form(call: Call) -> Form:
    """Return the form of a call, remembered or made; raises whatever is wrong with it."""
    try:
        key = _signature(call)
        form: Form | None = _forms.get(key)
    except (AttributeError, TypeError, RuntimeError):  # an argument of the wrong type or layout: describe() names it
        describe(call)
        raise
    if form is None:
        problem = describe(call)
        device = call.q.device
        if call.workspace is not None and call.workspace.numel() < (need := workspace_bytes(call)):
            raise ArgumentError(f"workspace: this call needs {need} bytes, got {call.workspace.numel()}")
        given = [index for index in call.indices.values() if index is not None]
        form = Form(
            problem,
            dispatch.resolve(problem, call.target, device),
            _are_ready(given, device),
            any(i.device.type == "cpu" for i in given),
            isinstance(call.k_rope, PagedKVCache) or bool(call.mask.program.captures),
            _reads_operands(call, given),
            bool(call.numbers),
        )
        _forms.remember(key, form)
    return form


def _are_ready(indices: list[torch.Tensor], device: torch.device) -> bool:
    return all(i.dtype == torch.int32 and i.device == device and i.is_contiguous() for i in indices)


def _reads_operands(call: Call, indices: list[torch.Tensor]) -> bool:
    device = call.q.device
    return (
        _are_ready(indices, device)
        and (call.sinks is None or call.sinks.is_contiguous())
        and all(capture.device == device for capture in call.mask.captures)
    )


def workspace_bytes(call: Call) -> int:
    """Return the bytes of workspace that the chosen implementation needs for a call."""
    problem = describe(call)
    entry = dispatch.chosen(problem, call.target, call.q.device).load()
    batch = call.valid_length.shape[0] - 1
    return int(entry.workspace_bytes(problem, T=call.q.shape[0], L=call.k.shape[0], B=batch, H=call.q.shape[1]))


def canonical(call: Call, form: Form) -> PrefillArgs:
    """Return the arguments as backends take them; see `mla.problem.PrefillArgs`."""
    device, problem = call.q.device, form.problem
    cu_q, cu_k = call.valid_length, call.cache_row_offsets
    offsets, starts, lengths = call.cache_offsets, call.start_positions, call.kv_lengths
    if form.indices_on_cpu or call.check_indices:
        _check_values(call, device)
    if not form.indices_ready:
        batch = cu_q.shape[0] - 1
        cu_q = as_index(cu_q, "valid_length", batch + 1, device)
        cu_k = as_index(cu_k, "cache_row_offsets", batch + 1, device)
        offsets, starts, lengths = (
            None if index is None else as_index(index, name, batch, device)
            for name, index in (("cache_offsets", offsets), ("start_positions", starts), ("kv_lengths", lengths))
        )
    cache, rope, rope_scales, rope_column = None, None, None, 0
    if isinstance(call.k_rope, PagedKVCache):
        cache = call.k_rope
    else:
        rope_column = call.k_rope.shape[-1] - QK_ROPE_HEAD_DIM
        rope = call.k_rope.squeeze(-2)
        if rope_column:
            rope = rope[..., rope_column:]
        if call.k_rope_scales is not None:
            rope_scales = call.k_rope_scales.squeeze(-2)
    total = call.q.shape[0]
    longest = call.q_max_seq_len
    if longest is None:
        longest = total if cache is None else cache.max_seq_length
    lse = call.lse
    return PrefillArgs(
        call.output,
        call.q,
        call.q_rope,
        call.k,
        call.v,
        problem.rope,  # type: ignore[arg-type]
        cache,
        rope,
        rope_scales,
        rope_column,
        cu_q,
        cu_k,
        offsets,
        starts,
        lengths,
        float(call.scale),
        call.mask,
        min(total, longest),
        None if call.q_scale is None else _column(call.q_scale, "q_scale", total, device),
        None if call.k_scales is None else _column(call.k_scales, "k_scales", call.k.shape[0], device),
        None if call.v_scale is None else _value_scale(call.v_scale, call.k.shape[0], device),
        call.rope_prescaled and call.q_rope is not None,
        lse if lse is None or call.lse_layout == "TH" else lse.T,
        None if call.sinks is None else call.sinks.contiguous(),
        float(call.softcap),
        call.workspace,
        call.batch_invariant,
    )


def _signature(call: Call) -> Hashable:
    rope, mask = call.k_rope, call.mask
    own = mask.captures + mask.biases if mask.program.captures or mask.biases else ()
    return (
        *_looks((
            call.output, call.q, call.q_rope, call.k, call.v, rope, call.k_rope_scales, call.valid_length,
            call.cache_row_offsets, call.cache_offsets, call.start_positions, call.kv_lengths, call.q_scale,
            call.k_scales, call.v_scale, call.lse, call.sinks, call.workspace, *own,
        )),
        mask.program,
        call.rope_prescaled,
        call.lse_layout,
        type(call.softcap),
        call.softcap != 0,
        type(call.scale),
        type(call.q_max_seq_len),
        call.q_max_seq_len is None or call.q_max_seq_len > 0,
        call.batch_invariant,
        call.target,
    )  # fmt: skip


def _looks(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a kernel can depend on of some arguments, their data aside."""
    return tuple([
        (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15) if type(x) is Tensor else x if x is None
        else _look(x) for x in values
    ])  # fmt: skip


def _look(value: Any) -> Any:
    if isinstance(value, PagedKVCache):
        return value.signature
    if isinstance(value, (float, int)):
        return type(value)
    return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15


def _check_values(call: Call, device: torch.device) -> None:
    """Look at the values of index tensors: of those on the CPU, of all when `check_indices` was asked for."""
    queries, keys = call.valid_length, call.cache_row_offsets
    if call.check_indices:
        if is_capturing(device):
            raise ArgumentError("check_indices=True synchronises, which is not possible while a graph is captured")
        queries, keys = queries.cpu(), keys.cpu()
    check_offsets(queries, "valid_length", call.q.shape[0], "q")
    check_offsets(keys, "cache_row_offsets", call.k.shape[0], "k")
    if isinstance(call.k_rope, PagedKVCache) and (call.check_indices or device.type == "cpu"):
        call.k_rope.check_indices(as_index(queries, "valid_length", None, queries.device))
    offsets, lengths = (
        index.cpu() if index is not None and call.check_indices else index
        for index in (call.cache_offsets, call.kv_lengths)
    )
    if offsets is not None:
        check_non_negative(offsets, "cache_offsets")
    if lengths is not None:
        _check_last_positions(call, device, keys, lengths, offsets)


def _check_last_positions(
    call: Call, device: torch.device, keys: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor | None
) -> None:
    """Raise if `kv_lengths` name keys whose rope part is not there; only as far as tensors are on the CPU."""
    rope = call.k_rope
    if not all(readable(index) for index in (keys, lengths, offsets) if index is not None):
        return
    first = torch.zeros_like(lengths, dtype=torch.int64) if offsets is None else offsets.to(torch.int64)
    count = torch.minimum(keys.to(torch.int64).diff(), (lengths.to(torch.int64) - first).clamp(min=0))
    end = torch.where(count > 0, first + count, 0)
    if isinstance(rope, PagedKVCache):
        if call.check_indices or device.type == "cpu":
            rope.check_pages(end)
    elif rope.ndim == 4 and bool((end > rope.shape[1]).any()):
        raise ShapeError(
            f"kv_lengths names keys up to position {int(end.max())}, but k_rope has shape {tuple(rope.shape)}"
        )


def _column(scale: torch.Tensor | float, name: str, rows: int, device: torch.device) -> torch.Tensor:
    """Return a scale as f32 [rows, 1], by strides where one number serves all rows."""
    if not isinstance(scale, torch.Tensor):
        scale = _number(scale, name, device)
    return scale if scale.ndim == 2 and scale.shape[0] == rows else scale.reshape(-1, 1).expand(rows, 1)


def _value_scale(scale: torch.Tensor | float, rows: int, device: torch.device) -> torch.Tensor:
    """Return a scale of values as f32 [1], [H] or [rows, 1]."""
    if not isinstance(scale, torch.Tensor):
        return _number(scale, "v_scale", device)
    return scale if scale.ndim == 2 and scale.shape[0] == rows else scale.reshape(-1)


def _number(value: float, name: str, device: torch.device) -> torch.Tensor:
    _require_float32(value, name)
    return number_on(value, device)
