"""Triton backend: one source for NVIDIA and AMD GPUs, and for the CPU under Triton's interpreter.

The same description of a kernel (`compiler.KernelSpec`) is compiled for the device of a call, ahead for an architecture
that is not here, and interpreted where ``TRITON_INTERPRET=1``. The interpreter is for checking logic:
it runs numpy, not the compiler's output, and is known to be wrong in places. Two are known: bfloat16
products (the kernels multiply in float32 there) and rounding to bfloat16 (the kernels round themselves there).
"""
