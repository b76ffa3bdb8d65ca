"""One attention result out of two over disjoint key sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla._check import (
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
from mla._launch import Stream, stream_scope, traced_target
from mla._repeat import repeating
from mla.dispatch import Memo, Runner, resolve
from mla.errors import ArgumentError, DTypeError, ShapeError
from mla.problem import SUPPORTED_DIMS, Again, MergeArgs, Problem

if TYPE_CHECKING:
    from mla.target import Target

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_runs = Memo()


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    *,
    lse_layout: str = "TH",
    target: str | Target = "gpu",
    stream: Stream | None = None,
) -> None:
    """Merge the attention of the same queries over two disjoint sets of keys, weighted by their LSE.

    ``lse = log(exp(prefix_lse) + exp(suffix_lse))`` and
    ``output = exp(prefix_lse - lse) * prefix_output + exp(suffix_lse - lse) * suffix_output``, in f32.

    Parameters
    ----------
    output : torch.Tensor
        [T, H, dv]; bf16, fp16 or fp32. May be one of the inputs (the same memory, not shifted).
    prefix_output, suffix_output : torch.Tensor
        [T, H, dv], one dtype: that of `output`, or fp32. Each has strides of its own, the last dimension contiguous.
    prefix_lse, suffix_lse : torch.Tensor
        float32, [T, H] or [H, T] as `lse_layout` says, any strides; natural logarithm. -inf, or +inf, says that the
        side has no keys: its output is not read into the result and may be NaN. Two empty sides give 0 and -inf.
    output_lse : torch.Tensor, optional
        As the other LSE tensors; may be one of them.
    lse_layout : {"TH", "HT"}
    target : str or Target
    stream : torch.cuda.Stream or int, optional
        torch's current stream when missing.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, UnsupportedError
        Before anything is launched, naming the argument, what came and what is allowed.

    Notes
    -----
    Section 2.2 of "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving" (2025). Nothing
    synchronises.
    """
    tensors = (output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)
    if torch.compiler.is_compiling():
        _refuse_gradients(*tensors)
        torch.ops.mla.merge(
            output, output_lse, *tensors[1:5], lse_layout=lse_layout, target=traced_target(target, stream)
        )
        return
    _merge(*tensors, lse_layout, target, stream=stream)


@repeating
def _merge(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None,
    lse_layout: str,
    target: str | Target,
    *,
    stream: Stream | None,
) -> Again | None:
    tensors = (output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)
    run = find_run(*tensors, lse_layout, target)
    _refuse_gradients(*tensors)
    if lse_layout == "HT":
        prefix_lse, suffix_lse = prefix_lse.T, suffix_lse.T
        output_lse = None if output_lse is None else output_lse.T
    with stream_scope(output.device, stream):
        return run(MergeArgs(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse))


def _refuse_gradients(*tensors: torch.Tensor | None) -> None:
    names = ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse")
    require_no_grad(**dict(zip(names, tensors, strict=True)))


def find_run(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None,
    lse_layout: str,
    target: str | Target,
) -> Runner:
    """Return what serves a merge of such tensors; checks them when it has not met their like."""
    outputs = (output, prefix_output, suffix_output)
    addresses = [x.data_ptr() & 15 if isinstance(x, torch.Tensor) else 0 for x in outputs]
    key = (target, lse_layout, *addresses, *signature(*outputs, prefix_lse, suffix_lse, output_lse))
    run: Runner | None = _runs.get(key)
    if run is not None:
        return run
    if lse_layout not in ("TH", "HT"):
        raise ArgumentError(f"lse_layout must be 'TH' or 'HT', got {lse_layout!r}")
    for tensor, name in zip(outputs, ("output", "prefix_output", "suffix_output"), strict=True):
        require_tensor(tensor, name, 3)
        require_dtype(tensor, name, _DTYPES)
        require_shape(tensor, name, output.shape, f"output has shape {tuple(output.shape)}")
        require_device(tensor, name, output.device)
        require_last_dim_contiguous(tensor, name)
    require_no_overlap(output, "output")
    if prefix_output.dtype != suffix_output.dtype:
        raise DTypeError(
            f"prefix_output and suffix_output must have one dtype, got {prefix_output.dtype} and {suffix_output.dtype}"
        )
    if prefix_output.dtype not in (output.dtype, torch.float32):
        raise DTypeError(f"prefix_output must be {output.dtype}, as output, or float32, got {prefix_output.dtype}")
    total, heads, v_head_dim = output.shape
    dims = next((dims for dims in SUPPORTED_DIMS if dims[1] == v_head_dim), None)
    if dims is None:
        allowed = ", ".join(str(dv) for _, dv in SUPPORTED_DIMS)
        raise ShapeError(f"output has v_head_dim {v_head_dim}, which is not supported; allowed: {allowed}")
    lse_shape = (total, heads) if lse_layout == "TH" else (heads, total)
    lse_tensors = {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse, "output_lse": output_lse}
    for name, lse in lse_tensors.items():
        if lse is None and name == "output_lse":
            continue
        require_tensor(lse, name, 2)
        assert lse is not None
        require_dtype(lse, name, (torch.float32,))
        require_shape(lse, name, lse_shape, f"output has {total} rows and {heads} heads in layout {lse_layout}")
        require_device(lse, name, output.device)
    problem = Problem(
        "merge",
        short_dtype(prefix_output.dtype),
        short_dtype(output.dtype),
        dims=dims,
        features=frozenset() if output_lse is None else frozenset({"lse"}),
        alignment=alignment(*outputs),
    )
    return _runs.remember(key, resolve(problem, target, output.device))
