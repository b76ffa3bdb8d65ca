"""The ROCm backend through the real hip-python, run as a script with the double's libraries on hip-python's path.

Compilation goes to the clang of the ziglang wheel, launches to the interpreter; tensors lie on the CPU, and the few
torch functions that would ask for a HIP device are replaced. Prints what ran; any difference from the reference is an
error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.support.amdgcn import Memory, launch
from tests.support.hip import HipCompileError, compile_hip

ARCH = "gfx942"
STREAM = 0x1234
DEVICE = torch.device("cuda", 0)
MARK = b"\nASSEMBLY:"

_COMPILE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_size_t,
)  # fmt: skip


class Double:
    """What the two libraries do when they are called."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.double_result.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        self.memory = Memory()
        self.compiled: list[str] = []
        self.launched: list[str] = []
        self._callbacks = (_COMPILE(self._compile), _LAUNCH(self._launch))
        self.library.double_set(*self._callbacks, 1)

    def _compile(self, source: bytes, name: bytes, options: bytes, program: int) -> int:
        given = options.decode().split()
        assert given == [f"--offload-arch={ARCH}", "-O3", "-std=c++17"], given
        try:
            asm = compile_hip(source.decode(), ARCH)
        except HipCompileError as error:
            self.library.double_result(program, str(error).encode(), b"", 0)
            return 6  # HIPRTC_ERROR_COMPILATION
        code = _assemble(asm) + MARK + struct.pack("<Q", len(asm)) + asm.encode()
        self.compiled.append(name.decode())
        self.library.double_result(program, b"", code, len(code))
        return 0

    def _launch(self, image: int, name: bytes, shape: Any, stream: int, kernarg: int, size: int) -> int:
        assert stream == STREAM
        grid, block = tuple(shape[0:3]), tuple(shape[3:6])
        try:
            launch(_assembly_behind(image), name.decode(), grid, block, ctypes.string_at(kernarg, size), self.memory)
        except Exception as error:
            print(f"launch of {name.decode()}: {error!r}", file=sys.stderr)
            return 719  # hipErrorLaunchFailure
        self.launched.append(name.decode())
        return 0


def _assemble(asm: str) -> bytes:
    """Assembly -> code object."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "k.s").write_text(asm)
        target = ("--target=amdgcn-amd-amdhsa", f"-mcpu={ARCH}", "-nogpulib")
        for command in (("clang", *target, "-c", "-o", "k.o", "k.s"), ("ld.lld", "-shared", "-o", "k.co", "k.o")):
            subprocess.run([sys.executable, "-m", "ziglang", *command], cwd=folder, check=True)
        return (Path(folder) / "k.co").read_bytes()


def _assembly_behind(image: int) -> str:
    """The assembly text that `Double` puts behind the ELF image at an address."""
    header = ctypes.string_at(image, 64)
    (sections,) = struct.unpack_from("<Q", header, 0x28)
    entry, count = struct.unpack_from("<HH", header, 0x3A)
    end = image + sections + entry * count
    assert ctypes.string_at(end, len(MARK)) == MARK
    (size,) = struct.unpack("<Q", ctypes.string_at(end + len(MARK), 8))
    return ctypes.string_at(end + len(MARK) + 8, size).decode()


@contextlib.contextmanager
def hip_torch() -> Any:
    """A torch that seems built for ROCm and sees one MI300."""
    properties = SimpleNamespace(gcnArchName=f"{ARCH}:sramecc+:xnack-", multi_processor_count=4)
    with contextlib.ExitStack() as stack:
        for name, value in (
            ("torch.version.hip", "6.4"),
            ("torch.cuda.get_device_properties", lambda device: properties),
            ("torch.cuda.device_count", lambda: 1),
            ("torch.cuda.current_device", lambda: 0),
            ("torch.cuda.device", lambda device: contextlib.nullcontext()),
            ("torch.cuda.current_stream", lambda device=None: SimpleNamespace(cuda_stream=STREAM)),
        ):
            stack.enter_context(patch(name, value))
        yield


def main(library: Path) -> None:
    with hip_torch():
        from mla import dispatch, jit_cache
        from mla.ahead import compile_ahead
        from mla.backends.rocm import compiler, ops, runtime
        from mla.errors import CompileError, MlaError
        from tests.kernels import test_matrix as matrix
        from tests.kernels.test_rocm_execution import implementation
        from tests.support.matrix_cases import PLANS
        from tests.support.problems import Case
        from tests.support.rocm import tensors_of

        availability = runtime.probe()
        assert availability.reason is None and availability.archs == (ARCH,), availability
        assert availability.versions["hiprtc"] == "9.0"
        double = Double(library)

        def resolve(problem: Any, target: object, device: torch.device) -> Any:
            entry = implementation(problem.op).load()
            run = entry.prepare(problem, DEVICE)

            def call(args: Any) -> None:
                double.memory = Memory()
                for tensor in tensors_of(args):
                    double.memory.add(tensor)
                run(args)

            return call

        with contextlib.ExitStack() as stack:
            for module in ("dispatch", "plan", "gather", "store", "merge"):
                stack.enter_context(patch(f"mla.{module}.resolve", resolve))
            dispatch.forget()
            cpu = torch.device("cpu")
            matrix.test_plan(implementation("plan"), cpu, PLANS[2], "rocm")
            matrix.test_gather(implementation("gather"), cpu, (("page_size", 64),), True, "rocm")
            matrix.test_store(implementation("store"), cpu, (("page_size", 16), ("csr", True)), "rocm", 1)
            matrix.test_merge(implementation("merge"), cpu, ("bf16", "bf16", 128, "TH", -1), "rocm", 1)
            case = Case(lengths=((37, 30), (0, 12), (90, 1)), heads=1, mask="windows_of_heads")
            matrix.test_prefill(implementation("prefill"), cpu, case, "rocm", 1)
        assert set(double.launched) == {"mla_plan", "mla_gather", "mla_store", "mla_merge", "mla_prefill"}
        assert len(double.compiled) == 5, double.compiled

        # The same kernels come out of the cache, with what the notes say of them.
        jit_cache.forget()
        spec = ops.Plan.specs(next(ops.Plan.problems(ARCH)), ARCH)[0]
        binary = compiler.build(spec, ARCH)
        assert len(double.compiled) == 5
        assert binary.report["vgpr_spills"] == 0 and binary.report["vgprs"] > 0

        paths = compile_ahead("rocm", ARCH, ("plan",), Path(os.environ["MLA_CACHE_DIR"]) / "ahead")
        assert [path.suffix for path in paths] == [".hsaco"]

        try:
            compiler.build(compiler.KernelSpec("broken", "cdna/gather.hip", "mla_gather", spec.params, 64), ARCH)
        except CompileError as error:
            assert "error:" in str(error) and "HIPRTC_ERROR_COMPILATION" in str(error)
        else:
            raise AssertionError("a broken kernel compiled")
        try:
            runtime.load(compiler.KernelSpec("plan.none", spec.source, "missing", spec.params, spec.threads), DEVICE)
        except MlaError as error:
            assert "hipErrorNotFound" in str(error)
        else:
            raise AssertionError("a missing function loaded")
    print("executed through hip-python:", ", ".join(double.launched))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
