"""The C text of masks: built for the host and run against the torch evaluation, and compiled for GPUs."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mla.mask_code import MaskArgs, c_source
from tests.support import mask_host
from tests.support.mask_cases import masks, random_points, random_tiles
from tests.support.mask_expressions import BATCH, HEADS, build, conditions, meaning

needs_compiler = pytest.mark.skipif(mask_host.compiler() is None, reason="needs a host C++ compiler (g++ or clang++)")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> mask_host.HostMasks:
    torch.manual_seed(0)
    return mask_host.HostMasks(list(masks().values()), tmp_path_factory.mktemp("masks"))


@needs_compiler
@pytest.mark.parametrize("i", range(len(masks())), ids=list(masks()))
def test_c_text_computes_what_torch_computes(host: mask_host.HostMasks, i: int) -> None:
    mask, points, tiles = host.masks[i], random_points(), random_tiles()
    assert torch.equal(host.call("visible", i, points).bool(), mask.visible(*points.unbind(1)))
    assert torch.equal(host.call("tile_class", i, tiles), mask.tile_class(*tiles.unbind(1)).int())
    if mask.biases:
        every = torch.cartesian_prod(
            torch.arange(BATCH), torch.arange(HEADS), torch.arange(-1, 10), torch.arange(-1, 14)
        )
        assert torch.equal(host.call("bias", i, every), mask.bias(*every.unbind(1)))


@needs_compiler
def test_the_host_and_the_kernel_agree_on_the_size_of_the_parameter_block(host: mask_host.HostMasks) -> None:
    assert host.args_size() == ctypes.sizeof(MaskArgs) == 112


@needs_compiler
@settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(trees=st.lists(conditions, min_size=25, max_size=25))
def test_c_text_of_any_mask_means_what_python_means(trees: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    host = mask_host.HostMasks([build(tree) for tree in trees], tmp_path_factory.mktemp("any"))
    points, tiles = random_points(200), random_tiles(200)
    for i, tree in enumerate(trees):
        expected = torch.tensor([int(meaning(tree, *point)) for point in points.tolist()], dtype=torch.int32)
        assert torch.equal(host.call("visible", i, points), expected), tree
        assert torch.equal(host.masks[i].visible(*points.unbind(1)).int(), expected), tree
        classes = host.call("tile_class", i, tiles)
        assert torch.equal(classes, host.masks[i].tile_class(*tiles.unbind(1)).int()), tree


DEVICE_PRELUDE = "#define MLA_DEVICE __device__ __forceinline__\n"
DEVICE_KERNEL = """
extern "C" __global__ void probe(MaskArgs m, const int* p, float* out) {
    float sum = mask_visible(m, p[0], p[1], p[2], p[3]) + mask_tile_class(m, p[0], p[1], p[2], p[3], p[4], p[5]);
#if MLA_MASK_BIASES > 0
    sum += mask_bias(m, p[0], p[1], p[2], p[3]);
#endif
    out[0] = sum;
}
"""
DEVICE_MASKS = ["null", "chunked causal", "chunks by head", "two biases", "bias"]


@pytest.mark.parametrize("name", DEVICE_MASKS)
def test_nvrtc_compiles_the_text(name: str) -> None:
    core = pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC: pip install 'mla-prefill[cuda]'")
    options = core.ProgramOptions(arch="sm_90a", std="c++17")
    program = core.Program(DEVICE_PRELUDE + c_source(masks()[name].program) + DEVICE_KERNEL, "c++", options)
    assert len(program.compile("cubin").code) > 0


HIP_PRELUDE = """
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __forceinline__ inline __attribute__((always_inline))
"""


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs ziglang's clang: pip install ziglang")
def test_clang_compiles_the_text_for_gfx942(tmp_path: Path) -> None:
    sources = []
    for name in DEVICE_MASKS:
        source = tmp_path / f"{name.replace(' ', '_')}.hip"
        source.write_text(HIP_PRELUDE + DEVICE_PRELUDE + c_source(masks()[name].program) + DEVICE_KERNEL)
        sources.append(str(source))
    command = [sys.executable, "-m", "ziglang", "clang", "-x", "hip", "--offload-device-only", "--no-gpu-bundle-output"]
    command += [
        "--offload-arch=gfx942",
        "-nogpulib",
        "-nogpuinc",
        "-O3",
        "-fdeclspec",
        "-std=c++17",
        "-S",
        "-emit-llvm",
    ]
    done = subprocess.run([*command, *sources], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*.ll"))) == len(DEVICE_MASKS)
