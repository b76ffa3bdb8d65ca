"""Interpreter: small HIP and Triton kernels, compiled for real and executed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.amdgcn import run_kernel
from tests.support.hip import ARCHS, compile_hip, needs_clang

pytestmark = needs_clang

VECTOR_ADD = """
extern "C" __global__ void __launch_bounds__(256) add(const float* a, const float* b, float* out, int n, float scale) {
    int i = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
    if (i < n) out[i] = a[i] + scale * b[i];
}
"""
BLOCK_SUM = """
extern "C" __global__ void __launch_bounds__(256) block_sum(const float* x, float* out) {
    __shared__ float partial[256];
    int t = __builtin_amdgcn_workitem_id_x(), g = __builtin_amdgcn_workgroup_id_y();
    partial[t] = x[g * 256 + t];
    for (int step = 128; step; step >>= 1) {
        BARRIER;
        if (t < step) partial[t] += partial[t + step];
    }
    if (t == 0) out[g] = partial[0];
}
"""
TRANSPOSE = """
extern "C" __global__ void __launch_bounds__(256) transpose(const short* x, short* out, int rows, int cols) {
    extern __shared__ short tile[];
    int t = __builtin_amdgcn_workitem_id_x();
    int r0 = __builtin_amdgcn_workgroup_id_y() * 32, c0 = __builtin_amdgcn_workgroup_id_x() * 32;
    for (int i = t / 32; i < 32; i += 8)
        if (r0 + i < rows && c0 + t % 32 < cols) tile[i * 33 + t % 32] = x[(r0 + i) * cols + c0 + t % 32];
    BARRIER;
    for (int i = t / 32; i < 32; i += 8)
        if (c0 + i < cols && r0 + t % 32 < rows) out[(c0 + i) * rows + r0 + t % 32] = tile[(t % 32) * 33 + i];
}
"""
GEMM = """
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
extern "C" __global__ void __launch_bounds__(64) gemm(const short* a, const short* b, float* c, int K, int N) {
    int lane = __builtin_amdgcn_workitem_id_x(), row0 = __builtin_amdgcn_workgroup_id_x() * 32;
    int col0 = __builtin_amdgcn_workgroup_id_y() * 32;
    f32x16 acc = {};
    for (int k = (lane / 32) * 4; k < K; k += 8) {
        s16x4 av = *(const s16x4*)(a + (row0 + lane % 32) * K + k);
        s16x4 bv = *(const s16x4*)(b + (col0 + lane % 32) * K + k);
        acc = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(av, bv, acc, 0, 0, 0);
    }
    for (int r = 0; r < 16; ++r) c[(row0 + r / 4 * 8 + lane / 32 * 4 + r % 4) * N + col0 + lane % 32] = acc[r];
}
"""
BARRIER = ('__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); __builtin_amdgcn_s_barrier();'
           ' __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup")')  # fmt: skip
FENCE_ONLY = '__builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup")'


@pytest.mark.parametrize("arch", ARCHS)
def test_vector_add(arch: str) -> None:
    a, b, out = torch.randn(1000), torch.randn(1000), torch.full((1000,), float("nan"))
    run_kernel(compile_hip(VECTOR_ADD, arch), "add", (4,), (256,), (a, b, out, 1000, 0.5))
    torch.testing.assert_close(out, a + 0.5 * b)


@pytest.mark.parametrize("arch", ARCHS)
def test_reduction_with_barriers(arch: str, seed: int) -> None:
    x, out = torch.randn(3, 256), torch.zeros(3)
    run_kernel(
        compile_hip(BLOCK_SUM.replace("BARRIER", BARRIER), arch), "block_sum", (1, 3), (256,), (x, out), seed=seed
    )
    torch.testing.assert_close(out, x.sum(1))


@pytest.mark.parametrize("arch", ARCHS)
def test_transpose_through_dynamic_lds(arch: str, seed: int) -> None:
    x = torch.randint(-(2**15), 2**15, (50, 70), dtype=torch.int16)
    out = torch.zeros(70, 50, dtype=torch.int16)
    asm = compile_hip(TRANSPOSE.replace("BARRIER", BARRIER), arch)
    run_kernel(asm, "transpose", (3, 2), (256,), (x, out, 50, 70), lds_bytes=32 * 33 * 2, seed=seed)
    assert torch.equal(out, x.T)


@pytest.mark.parametrize("arch", ARCHS)
def test_matrix_product(arch: str) -> None:
    a, b = torch.randn(64, 48).bfloat16(), torch.randn(32, 48).bfloat16()
    out = torch.full((64, 32), float("nan"))
    stats = run_kernel(compile_hip(GEMM, arch), "gemm", (2, 1), (64,), (a, b, out, 48, 32))
    torch.testing.assert_close(out, a.float() @ b.float().T, rtol=1e-5, atol=1e-5)
    assert sum(count for name, count in stats.mix().items() if name.startswith("v_mfma")) == 2 * 48 // 8


@pytest.mark.parametrize("source", [BLOCK_SUM, TRANSPOSE], ids=["block_sum", "transpose"])
def test_missing_barrier_is_caught(source: str) -> None:
    """With the barrier gone, some order of the waves gives a wrong result."""
    asm = compile_hip(source.replace("BARRIER", FENCE_ONLY), "gfx942")
    wrong = 0
    for seed in range(6):
        if source is BLOCK_SUM:
            x, out = torch.randn(1, 256), torch.zeros(1)
            run_kernel(asm, "block_sum", (1, 1), (256,), (x, out), seed=seed)
            wrong += not torch.allclose(out, x.sum(1), rtol=1e-4)
        else:
            x = torch.randint(-(2**15), 2**15, (32, 32), dtype=torch.int16)
            out = torch.zeros(32, 32, dtype=torch.int16)
            run_kernel(asm, "transpose", (1, 1), (256,), (x, out, 32, 32), lds_bytes=32 * 33 * 2, seed=seed)
            wrong += not torch.equal(out, x.T)
    assert wrong >= 3


def test_too_much_lds_is_refused() -> None:
    asm = compile_hip(TRANSPOSE.replace("BARRIER", BARRIER), "gfx942")
    buffers = np.zeros(4, np.int16), np.zeros(4, np.int16)
    with pytest.raises(ValueError, match="bytes of LDS"):
        run_kernel(asm, "transpose", (1, 1), (256,), (*buffers, 2, 2), lds_bytes=65 * 1024)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_triton_output(arch: str, dtype: torch.dtype, seed: int) -> None:
    """Triton's own assembly for a masked matrix product with a softmax, which also pins the lane maps of MFMA."""
    pytest.importorskip("triton", reason="no triton: pip install triton")
    from tests.support.triton_softmax_matmul import compiled

    kernel = compiled(arch, "bf16" if dtype is torch.bfloat16 else "fp16")
    n = 50
    x, y = torch.randn(64, 64).to(dtype), torch.randn(64, 64).to(dtype)
    out = torch.full((64, 64), float("nan"))
    run_kernel(kernel.asm["amdgcn"], kernel.metadata.name, (1,), (256,), (x, y, out, n), kernel.metadata.shared, seed)
    scores = (x.double() @ y.double().T).masked_fill(torch.arange(64) >= n, -torch.inf)
    expected = torch.softmax(scores * np.log(2), 1).to(dtype).double() @ y.double()
    torch.testing.assert_close(out[:n].double(), expected[:n], rtol=2e-2, atol=2e-2)
    assert torch.isnan(out[n:]).all()
