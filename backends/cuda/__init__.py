"""CUDA backend: kernels in CUDA C++, compiled at run time by NVRTC through cuda.core; no nvcc, no CUDA headers.

An entry class (see docs/design.md) describes its kernels once, for the call and for compilation ahead alike::

    class Gather:
        @staticmethod
        def check(problem, arch): ...                    # None, or why the problem does not fit
        @staticmethod
        def problems(arch) -> Iterator[Problem]: ...     # what `compile_ahead` builds for this architecture
        @staticmethod
        def specs(problem, arch) -> tuple[KernelSpec, ...]: ...    # pure; the kernels of one problem
        @staticmethod
        def prepare(problem, device):
            (spec,) = Gather.specs(problem, arch_of(device))
            kernel = runtime.load(spec, device)

            def run(args):
                kernel.launch(GatherParams(...), grid)

            return run

`compiler.KernelSpec` says what a kernel is, `runtime.load` compiles and loads it, `Kernel.launch` puts it on torch's
current stream with a ctypes parameter block of the C struct's name and fields. `params` holds the parts that kernels
share, `tensor_map` makes TMA descriptors.
"""
