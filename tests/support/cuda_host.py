"""CUDA kernel sources built as host C++, so that their index arithmetic can be run without a GPU.

A block's threads are pthreads in `cuda_host_prelude.h`; inline PTX is taken out, but for the arithmetic that
`_ARITHMETIC` gives in C. What moves data by TMA or multiplies by wgmma cannot be run so: the tests call the functions
between.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

from mla import jit_cache
from mla._paths import KERNELS
from mla.backends.cuda.compiler import INCLUDE, KernelSpec
from tests.support.mask_host import compiler

_PRELUDE = Path(__file__).with_name("cuda_host_prelude.h")
_ARITHMETIC = {
    'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': "y = __builtin_exp2f(x);",
    'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': "y = 1.0f / x;",
    'asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));': "thread = threadIdx.x;",
}


def build(spec: KernelSpec, harness: str, folder: Path, *, threads: int | None = None) -> ctypes.CDLL:
    """Compile a kernel's source and a harness of ``extern "C"`` functions that call into it.

    Parameters
    ----------
    spec : KernelSpec
        Its source, defines and generated texts are used.
    harness : str
        C++ text, in the same namespace as the source.
    threads : int, optional
        ``MLA_THREADS``, when another number than the kernel's is to run.
    """
    text = jit_cache.assemble(
        KERNELS / "cuda" / spec.source,
        include_dirs=(INCLUDE,),
        defines={"MLA_THREADS": threads or spec.threads, "MLA_SHARED_BYTES": spec.shared_bytes, **dict(spec.defines)},
        generated=dict(spec.generated),
    )
    for ptx, c in _ARITHMETIC.items():
        text = text.replace(ptx, c)
    text = re.sub(r"\basm( volatile)?\(", "host_asm(", text)
    text = text.replace("extern __shared__ uint8_t dynamic[]", "static uint8_t dynamic[MLA_SHARED_BYTES]")
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(f'#include "{_PRELUDE}"\nnamespace kernel {{\n{text}\n{harness}\n}}\n')
    command = [str(compiler()), "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-pthread"]
    done = subprocess.run([*command, "-o", str(library), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return ctypes.CDLL(str(library))
