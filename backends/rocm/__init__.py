"""ROCm backend: kernels in HIP C++, compiled at run time by hipRTC through hip-python; no hipcc, no HIP headers.

The files and classes are those of ``backends/cuda``: an entry class describes its kernels once (`specs`), for the call
and for compilation ahead alike, and `prepare` returns a closure that only launches. `compiler.KernelSpec` says what a
kernel is, `runtime.load` compiles and loads it, `Kernel.launch` puts it on torch's current stream with a ctypes
parameter block of the C struct's name and fields.

Architectures: gfx90a, gfx942, gfx950 from one source (``kernels/rocm``). RDNA has no MFMA and is left to Triton. What
stands behind these kernels without AMD hardware: docs/rocm.md.
"""
