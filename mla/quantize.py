"""fp8 rows and the scales that undo them, and the operands of an fp8 prefill in one call.

Everywhere ``scale = max(amax / largest, 2**-126)`` and ``stored = round(clamp(x / scale))`` in f32, to nearest even;
``largest`` is 448 for float8_e4m3fn and 240 for float8_e4m3fnuz. Elements of zero stay zero. Infinite elements have no
meaningful scale. Nothing synchronises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from mla._check import (
    FP8_DTYPES,
    alignment,
    require_device,
    require_dtype,
    require_last_dim_contiguous,
    require_no_grad,
    require_no_overlap,
    require_shape,
    require_tensor,
    short_dtype,
    signature,
)
from mla._launch import Stream, number_on, stream_scope, traced_target
from mla._repeat import repeating
from mla.dispatch import Memo, Runner, resolve
from mla.errors import ArgumentError, DTypeError, ShapeError
from mla.problem import QK_ROPE_HEAD_DIM, Again, Problem, QuantizeArgs

if TYPE_CHECKING:
    from mla.target import Target

Quantized = tuple[torch.Tensor, torch.Tensor]
GRANULARITIES = (64, 128, 576)
#: Where a row is next to nothing, the rope beside it is still a number when divided by its scale. What is stored then
#: stands for elements of up to 4e-10, whatever they were.
LEAST_SCALE_BESIDE_ROPE = 2.0**-40

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHUNK = 8  # elements that a kernel moves at once
_runs = Memo()


def quantize_per_token(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> Quantized:
    """Quantise with one scale a token, over all its heads: the ``q_scale`` and ``k_scales`` of a prefill.

    Parameters
    ----------
    x : torch.Tensor
        [T, D] or [T, H, D], bf16, fp16 or fp32; D a multiple of 8, the last dimension contiguous, other strides any.
    dtype : torch.dtype
        float8_e4m3fn, or float8_e4m3fnuz for gfx942.
    out : torch.Tensor, optional
        Shaped as `x`, of `dtype`, the last dimension contiguous; allocated when missing.
    scale : torch.Tensor, optional
        float32 [T, 1]; allocated when missing.
    target : str or Target
    stream : torch.cuda.Stream or int, optional
        torch's current stream when missing.

    Returns
    -------
    tuple of torch.Tensor
        The fp8 rows and their scales, [T, 1].

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        Before anything is launched, naming the argument, what came and what is allowed.
    """
    out = _output(x, dtype, out)
    scale = _scales(x, (x.shape[0], 1), scale)
    narrow = x.ndim == 2 and x.shape[1] <= max(GRANULARITIES)  # a row is one block
    _write(x, out, scale.unsqueeze(2), max(GRANULARITIES) if narrow else 0, False, target, stream)
    return out, scale


def quantize_per_block(
    x: torch.Tensor,
    granularity: int,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> Quantized:
    """Quantise with one scale for each `granularity` columns of a row, as a quantised cache has them.

    Parameters
    ----------
    x : torch.Tensor
        [T, D] or [T, H, D], as for `quantize_per_token`.
    granularity : int
        64, 128 or 576. The last block of a row is as short as D makes it.
    dtype, out, target, stream
        As for `quantize_per_token`.
    scale : torch.Tensor, optional
        float32 [T, ceil(D / g)] or [T, H, ceil(D / g)], as `x`; allocated when missing.

    Returns
    -------
    tuple of torch.Tensor
        The fp8 rows and their scales.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        Before anything is launched.
    """
    if granularity not in GRANULARITIES:
        raise ArgumentError(f"granularity must be one of {', '.join(map(str, GRANULARITIES))}, got {granularity!r}")
    out = _output(x, dtype, out)
    scale = _scales(x, (*x.shape[:-1], -(-x.shape[-1] // granularity)), scale)
    _write(x, out, scale if x.ndim == 3 else scale.unsqueeze(1), granularity, False, target, stream)
    return out, scale


def quantize_per_head(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> Quantized:
    """Quantise [L, H, D] with one scale a head, [H], over all rows: a ``v_scale``.

    Every row counts: rows that no key has, as page padding, have to be finite. The other arguments, results and errors
    are those of `quantize_per_token`.
    """
    require_tensor(x, "x", 3)
    return _quantize_all(x, (0, 2), (x.shape[1],), dtype, out, scale, target, stream)


def quantize_per_tensor(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> Quantized:
    """Quantise [T, D] or [T, H, D] with one scale, [1]. Else as `quantize_per_head`."""
    require_tensor(x, "x", (2, 3))
    return _quantize_all(x, tuple(range(x.ndim)), (1,), dtype, out, scale, target, stream)


def quantize_with_scale(
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: torch.Tensor | None = None,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> torch.Tensor:
    """Quantise with scales that are given, for example calibrated ones; what is out of range saturates.

    Parameters
    ----------
    x : torch.Tensor
        [T, D] or [T, H, D], as for `quantize_per_token`.
    scale : torch.Tensor
        float32, each from 2**-126 to 2**125: [1], [H], or [T, 1].
    dtype, out, target, stream
        As for `quantize_per_token`.

    Returns
    -------
    torch.Tensor
        The fp8 rows.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        Before anything is launched.
    """
    out = _output(x, dtype, out)
    require_tensor(scale, "scale", (1, 2))
    heads = x.shape[1] if x.ndim == 3 else 1
    if scale.ndim == 1 and scale.shape[0] not in (1, heads):
        raise ShapeError(f"scale must have shape (1,), ({heads},) or ({x.shape[0]}, 1), got {tuple(scale.shape)}")
    _require_scale(x, (x.shape[0], 1) if scale.ndim == 2 else tuple(scale.shape), scale)
    _write(x, out, scale.view(1, -1, 1) if scale.ndim == 1 else scale.unsqueeze(2), 0, True, target, stream)
    return out


class PrefillOperands(NamedTuple):
    """Operands of an fp8 prefill in the order in which `mla.flare_mla_prefill` takes them with a split q.

    ``flare_mla_prefill(output, *operands[:7], mask, ..., v_scale=operands.v_scale)``.
    """

    q_nope: torch.Tensor  # fp8 [T, H, dn]
    q_rope: torch.Tensor  # bf16 [T, H, dr]
    q_scale: torch.Tensor  # f32 [T, 1]
    k: torch.Tensor  # fp8 [L, H, dn]
    k_scales: torch.Tensor  # f32 [L, 1]
    v: torch.Tensor  # fp8 [L, H, dv]
    k_rope: torch.Tensor | None  # bf16 [L, 1, dr]; None: the paged cache or a batched rope, as it is
    v_scale: torch.Tensor  # f32 [H], [1] or [L, 1]


def quantize_for_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: torch.Tensor | None = None,
    *,
    v_scale: Literal["head", "tensor", "token"] = "head",
    dtype: torch.dtype = torch.float8_e4m3fn,
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> PrefillOperands:
    """Make the operands of a prefill with split q: fp8 q_nope, k and v with their scales, and the rope that fits them.

    With `rope` both ropes are divided by the scales of their rows, ``q_rope / q_scale`` and ``rope / k_scales``, as
    ``rope_prescaled=True`` (the default of a prefill) undoes it: ``s = scale q_scale k_scales (nope + rope)``. These
    scales are at least 2**-40, so that the rope beside a row of zeros stays finite. Without `rope` q_rope is left as it
    is, for a call with the cache or a batched rope and ``rope_prescaled=False``.

    Parameters
    ----------
    q : torch.Tensor
        [T, H, dn + dr], bf16, fp16 or fp32; the rope is its last 64 columns.
    k, v : torch.Tensor
        [L, H, dn] and [L, H, dv], views of the up-projection will do.
    rope : torch.Tensor, optional
        [L, 1, 64], rows as `k`.
    v_scale : {"head", "tensor", "token"}
        What shares a scale of v. A head and a tensor count every row: rows past the keys, as page padding, have to be
        finite. A token's scale depends on its own row alone.
    dtype, target, stream
        As for `quantize_per_token`.

    Returns
    -------
    PrefillOperands

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        Before anything is launched for the argument that is at fault.
    """
    for tensor, name in ((q, "q"), (k, "k"), (v, "v")):
        _require_input(tensor, name, 3)
        require_device(tensor, name, q.device)
    rows, heads, width = k.shape
    require_shape(q, "q", (None, heads, width + QK_ROPE_HEAD_DIM), f"k has shape {tuple(k.shape)}")
    require_shape(v, "v", (rows, heads, None), f"k has shape {tuple(k.shape)}")
    if rope is not None:
        require_tensor(rope, "rope", 3)
        require_shape(rope, "rope", (rows, 1, QK_ROPE_HEAD_DIM), f"k has shape {tuple(k.shape)}")
        require_dtype(rope, "rope", _INPUT_DTYPES)
        require_device(rope, "rope", q.device)
        require_no_grad(rope=rope)
    ways = {"head": quantize_per_head, "tensor": quantize_per_tensor, "token": quantize_per_token}
    if v_scale not in tuple(ways):
        raise ArgumentError(f"v_scale must be one of {', '.join(map(repr, ways))}, got {v_scale!r}")

    q_nope, q_scale = quantize_per_token(q[..., :width], dtype=dtype, target=target, stream=stream)
    k_fp8, k_scales = quantize_per_token(k, dtype=dtype, target=target, stream=stream)
    v_fp8, v_scales = ways[v_scale](v, dtype=dtype, target=target, stream=stream)
    with stream_scope(q.device, stream):
        q_rope = q[..., width:]
        if rope is None:
            return PrefillOperands(q_nope, q_rope.to(torch.bfloat16), q_scale, k_fp8, k_scales, v_fp8, None, v_scales)
        for scale in (q_scale, k_scales):
            scale.clamp_(min=LEAST_SCALE_BESIDE_ROPE)
        divided = (_rope_over(q_rope, q_scale), _rope_over(rope, k_scales))
    return PrefillOperands(q_nope, divided[0], q_scale, k_fp8, k_scales, v_fp8, divided[1], v_scales)


def _rope_over(rope: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divide in f32 and round to bf16 once."""
    out = torch.empty(rope.shape, dtype=torch.bfloat16, device=rope.device)
    return torch.div(rope, scale.unsqueeze(2), out=out)


def _quantize_all(
    x: torch.Tensor,
    reduced: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    out: torch.Tensor | None,
    scale: torch.Tensor | None,
    target: str | Target,
    stream: Stream | None,
) -> Quantized:
    """Quantise with scales over whole dimensions: a maximum by torch, then the kernel with those scales."""
    out = _output(x, dtype, out)
    scale = _scales(x, shape, scale)
    with stream_scope(x.device, stream):
        write_scales(x, reduced, dtype, scale)
    quantize_with_scale(x, scale, dtype=dtype, out=out, target=target, stream=stream)
    return out, scale


def write_scales(
    x: torch.Tensor, reduced: tuple[int, ...], dtype: torch.dtype, scale: torch.Tensor, least: float = 2.0**-126
) -> None:
    """Write the f32 scales, at least `least`, of what shares one over whole dimensions of x; `scale` has the others."""
    if x.numel():
        amax = torch.linalg.vector_norm(x, float("inf"), dim=reduced, dtype=torch.float32).view(scale.shape)
    else:
        amax = torch.zeros(scale.shape, dtype=torch.float32, device=x.device)
    write_scales_of(amax, dtype, scale, least)


def write_scales_of(amax: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, least: float = 2.0**-126) -> None:
    """Write the f32 scales, at least `least`, of elements of at most `amax` f32, shaped as they are."""
    # By a tensor: torch divides by a number on a GPU by multiplying with its rounded reciprocal.
    most = torch.finfo(dtype).max
    largest = torch.full_like(amax, most) if torch.compiler.is_compiling() else number_on(most, amax.device)
    torch.div(amax, largest, out=scale).clamp_(min=least)


def _require_input(x: torch.Tensor, name: str, ndim: int | tuple[int, ...]) -> None:
    """Raise unless a tensor can be quantised."""
    require_tensor(x, name, ndim)
    require_dtype(x, name, _INPUT_DTYPES)
    require_last_dim_contiguous(x, name)
    require_no_grad(**{name: x})
    if x.shape[-1] % _CHUNK or x.shape[-1] == 0:
        raise ShapeError(f"{name} must have a last dimension that is a multiple of {_CHUNK}, got {tuple(x.shape)}")
    if x.shape[1] == 0:
        raise ShapeError(f"{name} must have at least one head, got {tuple(x.shape)}")


def _output(x: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """Check the input; check or allocate the output."""
    _require_input(x, "x", (2, 3))
    if dtype not in FP8_DTYPES:
        raise DTypeError(f"dtype must be float8_e4m3fn or float8_e4m3fnuz, got {dtype}")
    if out is None:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    require_tensor(out, "out", x.ndim)
    require_shape(out, "out", x.shape, f"x has shape {tuple(x.shape)}")
    require_dtype(out, "out", (dtype,))
    require_device(out, "out", x.device)
    require_last_dim_contiguous(out, "out")
    require_no_overlap(out, "out")
    return out


def _scales(x: torch.Tensor, shape: tuple[int, ...], scale: torch.Tensor | None) -> torch.Tensor:
    """Check or allocate the scales."""
    if scale is None:
        return torch.empty(shape, dtype=torch.float32, device=x.device)
    _require_scale(x, shape, scale)
    require_no_overlap(scale, "scale")
    return scale


def _require_scale(x: torch.Tensor, shape: tuple[int, ...], scale: torch.Tensor) -> None:
    require_tensor(scale, "scale", len(shape))
    require_shape(scale, "scale", shape, f"x has shape {tuple(x.shape)}")
    require_dtype(scale, "scale", (torch.float32,))
    require_device(scale, "scale", x.device)
    require_last_dim_contiguous(scale, "scale")


def _write(
    x: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    granularity: int,
    static: bool,
    target: str | Target,
    stream: Stream | None,
) -> None:
    """Quantise checked tensors; `scale` has three dimensions, as in `QuantizeArgs`."""
    if x.ndim == 2:
        x, out = x.unsqueeze(1), out.unsqueeze(1)
    if torch.compiler.is_compiling():
        torch.ops.mla.quantize(out, scale, x, granularity, static, traced_target(target, stream))
    else:
        launch(out, scale, x, granularity, static, target, stream=stream)


@repeating
def launch(
    output: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    granularity: int,
    static: bool,
    target: str | Target = "gpu",
    *,
    stream: Stream | None = None,
) -> Again | None:
    """Run the op; the tensors are those of `QuantizeArgs`."""
    aligned_to = alignment(x, output)
    key = (target, granularity, static, aligned_to, *signature(x, output, scale))
    run: Runner | None = _runs.get(key)
    if run is None:
        problem = Problem(
            "quantize",
            short_dtype(x.dtype),
            short_dtype(output.dtype),
            features=frozenset({"static_scale"}) if static else frozenset(),
            granularity=granularity,
            alignment=aligned_to,
        )
        run = _runs.remember(key, resolve(problem, target, x.device))
    if x.numel() == 0:
        return None
    with stream_scope(x.device, stream):
        return run(QuantizeArgs(x, output, scale))
