"""A small Triton kernel, compiled for AMD on the CPU: softmax(x yᵀ) y over the first n rows and columns."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def softmax_matmul(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    offs = tl.arange(0, N)
    place = offs[:, None] * N + offs[None, :]
    x = tl.load(x_ptr + place)
    y = tl.load(y_ptr + place)
    scores = tl.where(offs[None, :] < n, tl.dot(x, tl.trans(y)), -float("inf"))
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    tl.store(out_ptr + place, tl.dot(p.to(y.dtype), y), mask=offs[:, None] < n)


def compiled(arch: str, dtype: str) -> Any:
    """The compiled kernel; `.asm["amdgcn"]`, `.metadata.shared`, `.metadata.name`."""
    signature = {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "out_ptr": "*fp32", "n": "i32"}
    return triton.compile(ASTSource(softmax_matmul, signature, {"N": 64}), target=GPUTarget("hip", arch, 64))
