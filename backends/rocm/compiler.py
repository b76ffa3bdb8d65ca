"""From a kernel's description to a code object: source text, options, hipRTC through hip-python, and the cache.

Nothing here needs a GPU; hipRTC itself comes with ROCm, no package on PyPI has it.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

from mla import jit_cache
from mla._paths import KERNELS
from mla.backends.rocm import code_object
from mla.jit_cache import Binary, Unit

INCLUDE = KERNELS / "rocm" / "include"
#: What the kernels are written for: CDNA2, CDNA3, CDNA4.
ARCHS = ("gfx90a", "gfx942", "gfx950")


@dataclass(frozen=True)
class KernelSpec:
    """Everything that decides one compiled kernel, apart from the architecture.

    Attributes
    ----------
    name : str
        ``<op>.<variant>``, one for each combination of defines and generated texts; `kernel_id` adds the rest.
    source : str
        File below ``kernels/rocm``, such as ``cdna/gather.hip``. Quoted includes come from its folder,
        ``rocm/include`` and `generated`. No system headers.
    symbol : str
        The ``extern "C" __global__`` function. Its one parameter is ``<Params>`` by value.
    params : type of ctypes.Structure
        Its class name and field names are those of the C struct; size and offsets are checked by the compilation.
    threads : int
        Work-items of a workgroup; the source sees it as ``MLA_THREADS``.
    defines : tuple of (str, int or str)
        Further macros, in order.
    generated : tuple of (str, str)
        Headers without a file (name, text), such as a mask's code.
    """

    name: str
    source: str
    symbol: str
    params: type[ctypes.Structure]
    threads: int
    defines: tuple[tuple[str, int | str], ...] = ()
    generated: tuple[tuple[str, str], ...] = ()

    def kernel_id(self, arch: str) -> str:
        """Name of the files of this kernel: ``rocm.<arch>.<op>.<variant>``."""
        return f"rocm.{arch}.{self.name}"


@functools.lru_cache(maxsize=512)
def fp8_name(arch: str) -> str:
    """Name the 8-bit format of an architecture's matrix unit and of caches made for it."""
    return "fp8_fnuz" if arch.startswith("gfx94") else "fp8"


def unit(spec: KernelSpec, arch: str) -> Unit:
    """Assemble the translation unit of a kernel for one architecture.

    Raises
    ------
    CompileError
        A quoted include is missing.
    """
    text = jit_cache.assemble(
        KERNELS / "rocm" / spec.source,
        include_dirs=(INCLUDE,),
        defines={"MLA_THREADS": spec.threads, **dict(spec.defines)},
        generated=dict(spec.generated),
        epilogue=jit_cache.layout_asserts(spec.params),
    )
    options = (f"--offload-arch={arch}", "-O3", "-std=c++17")
    return Unit(spec.kernel_id(arch), arch, text, options, source_suffix=".hip", binary_suffix=".hsaco")


def build(spec: KernelSpec, arch: str) -> Binary:
    """Return the code object of a kernel for one architecture, compiled now if it is in no cache.

    The architecture is the base name: code built without features such as ``:xnack-`` loads under either setting.
    ``report`` of the result has what the code object's notes say: ``vgprs``, ``agprs``, ``sgprs``, ``lds_bytes``,
    ``vgpr_spills``, ``sgpr_spills``, ``scratch_bytes``, and ``log``.

    Raises
    ------
    CompileError
    """
    return jit_cache.obtain(unit(spec, arch), compile_unit, compiler_name)


@functools.cache
def compiler_name() -> str:
    """Name hipRTC and its version, as the cache key has it."""
    from hip import hiprtc

    _, major, minor = _checked(hiprtc.hiprtcVersion(), "hiprtcVersion")
    return f"hiprtc {major}.{minor}"


def compile_unit(unit: Unit) -> Binary:
    """Run hipRTC on a unit, whatever the caches hold."""
    from hip import hiprtc

    name = f"{unit.kernel_id}{unit.source_suffix}".encode()
    _, program = _checked(hiprtc.hiprtcCreateProgram(unit.text.encode(), name, 0, None, None), "hiprtcCreateProgram")
    try:
        options = [option.encode() for option in unit.options]
        (result,) = hiprtc.hiprtcCompileProgram(program, len(options), options)
        log = _log(program)
        if result != hiprtc.hiprtcResult.HIPRTC_SUCCESS:
            raise RuntimeError(f"{result.name}\n{log}")
        _, size = _checked(hiprtc.hiprtcGetCodeSize(program), "hiprtcGetCodeSize")
        code = bytearray(size)
        _checked(hiprtc.hiprtcGetCode(program, code), "hiprtcGetCode")
    finally:
        hiprtc.hiprtcDestroyProgram(program.createRef())
    return Binary(bytes(code), {**code_object.report(bytes(code)), "log": log.strip()})


def _log(program: object) -> str:
    from hip import hiprtc

    _, size = _checked(hiprtc.hiprtcGetProgramLogSize(program), "hiprtcGetProgramLogSize")
    text = bytearray(size)
    if size:
        _checked(hiprtc.hiprtcGetProgramLog(program, text), "hiprtcGetProgramLog")
    return text.decode(errors="replace").rstrip("\0")


def _checked(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    from hip import hiprtc

    if result[0] != hiprtc.hiprtcResult.HIPRTC_SUCCESS:
        raise RuntimeError(f"{what}: {result[0].name}")
    return result
