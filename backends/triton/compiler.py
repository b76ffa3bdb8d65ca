"""Kernel descriptions to compiled kernels, for any architecture, on any machine: Triton compiles without a GPU.

A `KernelSpec` fixes everything that Triton's own just-in-time path would guess from the arguments of a call: types,
what addresses and strides are divisible by, constants. So a problem compiles once, whatever values its calls bring,
and the same description compiles ahead for hardware that is not here. Binaries are kept in Triton's own cache
(TRITON_CACHE_DIR).
"""

from __future__ import annotations

import functools
import importlib
import linecache
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla import mask_code
from mla._paths import KERNELS
from mla.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mla.masks import MaskProgram

#: Triton's names of element types by the library's.
ELEMENT_TYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "u8", "fp8_fnuz": "u8", "int32": "i32"}
#: Bytes of an element, by both names.
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "u8": 1, "fp8": 1, "fp8_fnuz": 1, "fp8e4nv": 1, "fp8e4b8": 1}

_MASK_FUNCTIONS = {"MASK_VISIBLE": "mask_visible", "MASK_CLASS": "mask_tile_class", "MASK_BIAS": "mask_bias"}


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of ``kernels/triton`` with all that is known before a call.

    Attributes
    ----------
    name : str
        ``module.function`` below ``kernels/triton``.
    types : tuple of (str, str or None)
        Every run-time parameter in order with its Triton type (``*bf16``, ``i32``; ``map<bf16[128, 1, 128]>`` is a
        tensor map of that box); None for one that is absent.
    constants : tuple of (str, object)
        Every compile-time parameter that is a plain value.
    mask : MaskProgram or None
        The program that the kernel's mask functions are printed from: ``MASK_*`` parameters in Triton; in Gluon, whose
        warp partitions cannot be handed functions, global names put behind the kernel's text.
    divisible : tuple of (str, int)
        What the address (in bytes) or value of a run-time parameter is divisible by, where more than nothing is known.
    num_warps, num_stages : int
    gluon : bool
        The kernel is written in Gluon, Triton's lower-level language.
    """

    name: str
    types: tuple[tuple[str, str | None], ...]
    constants: tuple[tuple[str, Any], ...] = ()
    mask: MaskProgram | None = None
    divisible: tuple[tuple[str, int], ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    gluon: bool = False


def function(spec: KernelSpec) -> Any:
    """Return the ``jit`` function of a kernel."""
    module, _, attribute = spec.name.partition(".")
    if not spec.gluon:
        return getattr(importlib.import_module(f"mla.kernels.triton.{module}"), attribute)
    assert spec.mask is not None
    return _gluon_module(module, spec.mask)[attribute]


@functools.cache
def _gluon_module(module: str, program: MaskProgram) -> Mapping[str, Any]:
    text = (KERNELS / "triton" / f"{module}.py").read_text()
    return _execute(f"{module} {program.key}", text + mask_code.triton_source(program))


@functools.cache
def mask_functions(program: MaskProgram) -> Mapping[str, Any]:
    """Return the functions of a mask as ``triton.jit`` functions, by the names of the kernel's parameters."""
    namespace = _execute(f"mask {program.key}", mask_code.triton_source(program))
    return {parameter: namespace.get(printed) for parameter, printed in _MASK_FUNCTIONS.items()}


def _execute(name: str, text: str) -> dict[str, Any]:
    """Run a generated module and return its names.

    Triton reads a function's source from the file it was defined in; the text is registered with `linecache` under
    a name of its own instead, so no file is written.
    """
    filename = f"<{name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": "mla.kernels.triton.generated", "__package__": "mla.kernels.triton"}
    exec(compile(text, filename, "exec"), namespace)
    return namespace


def constants(spec: KernelSpec) -> dict[str, Any]:
    """Return every compile-time parameter: plain values, mask functions, and None for run-time parameters left out."""
    values = dict(spec.constants)
    if spec.mask is not None and not spec.gluon:
        values |= mask_functions(spec.mask)
    return values | {name: None for name, kind in spec.types if kind is None}


def gpu_target(arch: str) -> Any:
    """Return Triton's description of an architecture (``sm_90a``, ``gfx942``)."""
    from triton.backends.compiler import GPUTarget

    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:].rstrip("af")), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def build(spec: KernelSpec, arch: str) -> Any:
    """Compile (or take from Triton's cache) one kernel for one architecture; needs no GPU.

    Returns
    -------
    triton.compiler.CompiledKernel

    Raises
    ------
    CompileError
        With Triton's message and the description of the kernel.
    """
    import triton

    kernel = function(spec)
    types, divisible = dict(spec.types), dict(spec.divisible)
    signature = {name: _type(types.get(name)) for name in kernel.arg_names}
    attributes = {
        (index,): [["tt.divisibility", divisible[name]]]
        for index, name in enumerate(kernel.arg_names)
        if name in divisible
    }
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True}
    try:
        source = _source_class(spec)(kernel, signature, constants(spec), attributes)
        return triton.compile(source, target=gpu_target(arch), options=options)
    except Exception as error:
        raise CompileError(f"triton does not compile {spec.name} for {arch}: {error}\n{spec}") from error


def _source_class(spec: KernelSpec) -> Any:
    if spec.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _type(kind: str | None) -> str:
    if kind is None:
        return "constexpr"
    if found := re.fullmatch(r"map<(\w+)(\[.*\])>", kind):
        from triton.experimental.gluon.language import NVMMASharedLayout

        width, inner = ITEMSIZE[found[1]], int(found[2].rstrip("]").rpartition(",")[2])
        line = min(128, inner * width)
        layout = NVMMASharedLayout(line if line >= 32 else 0, 8 * width, rank=found[2].count(",") + 1)
        return f"tensordesc<{found[1]}{found[2]},{layout!r}>"
    return kind
