"""From a kernel's description to a cubin: source text, options, NVRTC through cuda.core, and the cache.

cuda.core has a program cache of its own (`FileStreamProgramCache`); it stores bare bytes, so a truncated entry is found
only when the driver refuses it, and neither the source nor the compiler's report is kept beside the binary. Binaries
therefore go through `mla.jit_cache`, which does all three and compiles once for many processes.

Nothing here needs a GPU or a driver.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from mla import jit_cache
from mla._paths import KERNELS
from mla.jit_cache import Binary, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping

INCLUDE = KERNELS / "cuda" / "include"

_import_lock = threading.Lock()
_PTXAS = "--ptxas-options="
_REPORT = {
    "registers": re.compile(r"Used (\d+) registers"),
    "shared_bytes": re.compile(r"(\d+) bytes smem"),
    "stack_bytes": re.compile(r"(\d+) bytes stack frame"),
    "spill_store_bytes": re.compile(r"(\d+) bytes spill stores"),
    "spill_load_bytes": re.compile(r"(\d+) bytes spill loads"),
}


@dataclass(frozen=True)
class KernelSpec:
    """Everything that decides one compiled kernel, apart from the architecture.

    Attributes
    ----------
    name : str
        ``<op>.<variant>``, one for each combination of defines and generated texts; `kernel_id` adds the rest.
    source : str
        File below ``kernels/cuda``, such as ``common/gather.cu``. Quoted includes come from its folder,
        ``cuda/include`` and `generated`. No system headers.
    symbol : str
        The ``extern "C" __global__`` function. Its one parameter is ``const __grid_constant__ <Params> params``.
    params : type of ctypes.Structure
        Its class name and field names are those of the C struct; size and offsets are checked by the compilation.
    threads : int
        Threads of a block; the source sees it as ``MLA_THREADS``.
    shared_bytes : int
        Dynamic shared memory of a block; the source sees it as ``MLA_SHARED_BYTES`` and asserts its plan against it.
    defines : tuple of (str, int or str)
        Further macros, in order.
    generated : tuple of (str, str)
        Headers without a file (name, text), such as a mask's code.
    ptxas : tuple of str
        Further options of ptxas.
    programmatic : bool
        Launch with programmatic stream serialisation: the grid may start before the one ahead of it in the stream
        ends, so the kernel has to execute ``griddepcontrol.wait`` before it touches memory (sm_90 and later).
    """

    name: str
    source: str
    symbol: str
    params: type[ctypes.Structure]
    threads: int
    shared_bytes: int = 0
    defines: tuple[tuple[str, int | str], ...] = ()
    generated: tuple[tuple[str, str], ...] = ()
    ptxas: tuple[str, ...] = ()
    programmatic: bool = False

    def kernel_id(self, arch: str) -> str:
        """Name of the files of this kernel: ``cuda.<arch>.<op>.<variant>``."""
        return f"cuda.{arch}.{self.name}"


@functools.lru_cache(maxsize=512)
def unit(spec: KernelSpec, arch: str) -> Unit:
    """Assemble the translation unit of a kernel for one architecture.

    Raises
    ------
    CompileError
        A quoted include is missing.
    """
    text = jit_cache.assemble(
        KERNELS / "cuda" / spec.source,
        include_dirs=(INCLUDE,),
        defines={"MLA_THREADS": spec.threads, "MLA_SHARED_BYTES": spec.shared_bytes, **dict(spec.defines)},
        generated=dict(spec.generated),
        epilogue=jit_cache.layout_asserts(spec.params),
    )
    ptxas = [f"{_PTXAS}{option}" for option in ("-v", *spec.ptxas)]
    return Unit(spec.kernel_id(arch), arch, text, ("--std=c++17", "--device-as-default-execution-space", *ptxas))


def build(spec: KernelSpec, arch: str) -> Binary:
    """Return the cubin of a kernel for one architecture, compiled now if it is in no cache.

    ``report`` of the result has ``registers``, ``shared_bytes`` (static), ``stack_bytes``, ``spill_store_bytes``,
    ``spill_load_bytes`` of the kernel and ``log``, ptxas's own words.

    Raises
    ------
    CompileError
    """
    return jit_cache.obtain(unit(spec, arch), compile_unit, compiler_name)


@functools.cache
def compiler_name() -> str:
    """Name NVRTC and its version, as the cache key has it."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def cuda_core() -> ModuleType:
    """Import cuda.core. Its initialisation rearranges modules and must not be seen half done by another thread."""
    with _import_lock:
        import cuda.core

        return cuda.core


def compile_unit(unit: Unit) -> Binary:
    """Run NVRTC on a unit, whatever the caches hold."""
    core = cuda_core()
    log = _Log()
    options = core.ProgramOptions(
        name=f"{unit.kernel_id}{unit.source_suffix}",
        arch=unit.arch,
        std="c++17",
        device_as_default_execution_space=True,
        ptxas_options=[option.removeprefix(_PTXAS) for option in unit.options if option.startswith(_PTXAS)],
    )
    program = core.Program(unit.text, "c++", options)
    try:
        code = program.compile("cubin", logs=log)
    finally:
        program.close()
    return Binary(bytes(code.code), report(log.text))


def report(log: str) -> Mapping[str, object]:
    """Read registers, shared memory and spills out of what ``ptxas -v`` says of a unit with one kernel."""
    found: dict[str, object] = {}
    for name, pattern in _REPORT.items():
        values = [int(value) for value in pattern.findall(log)]
        found[name] = max(values, default=0)
    found["log"] = log.strip()
    return found


class _Log:
    """What cuda.core writes its compilation log to."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str | bytes) -> None:
        self.text += text if isinstance(text, str) else text.decode(errors="replace")
