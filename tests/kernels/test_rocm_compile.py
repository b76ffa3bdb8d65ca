"""Every ROCm kernel compiles for every architecture, without spills, within the registers and LDS it was planned for.

By the clang of the ziglang wheel, from the texts that hipRTC is given; the figures are those of the code's notes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mla import masks, registry
from mla._paths import KERNELS as SOURCES
from mla.backends.rocm import code_object, compiler, ops
from mla.backends.rocm.compiler import KernelSpec
from mla.backends.rocm.prefill import LDS_BYTES, tile_of
from mla.problem import SUPPORTED_DIMS, Problem
from tests.support.amdgcn import parse
from tests.support.hip import ARCHS, HipCompileError, compile_hip, needs_clang
from tests.support.rocm import assembly

pytestmark = needs_clang

#: VGPRs and AGPRs of a wave together, for the stated waves a SIMD.
REGISTERS = {1: 512, 2: 256, 4: 128}


def one_of_each(arch: str) -> list[tuple[str, KernelSpec]]:
    """One kernel of each operation and shape; what differs by page size or mask alone is the same code."""
    fp8 = ops.Gather.problems(arch)
    problems = [
        Problem("plan", "int32", "int32", alignment=4),
        Problem("gather", "bf16", "bf16", page_size=64),
        next(p for p in fp8 if p.dtypes.startswith("fp8") and p.granularity == 128),
        Problem("gather", "fp32", "fp32", page_size=1, alignment=4),
        Problem("store", "bf16", "bf16", page_size=64),
        next(p for p in ops.Store.problems(arch) if "+" in p.out_dtype),
        next(p for p in ops.Store.problems(arch) if p.granularity == 576),
        Problem("merge", "bf16", "bf16", alignment=16),
        Problem("merge", "fp32", "bf16", dims=(256, 256)),
        *ops.Quantize.problems(arch),
        Problem("quantize", "fp32", "fp8", granularity=64, alignment=4),
    ]
    causal = masks.CausalMask().program
    sink_window = masks.Mask.from_function(lambda b, h, q, k: (k <= q) & ((q - k < 4096) | (k < 64))).program
    for dims in SUPPORTED_DIMS:
        plain = Problem("prefill", "bf16", "bf16", dims, 64, rope="paged", mask=causal)
        problems += [
            plain,
            replace(plain, dtypes="fp16", out_dtype="fp16"),
            replace(plain, out_dtype="fp32", mask=masks.NullMask().program, features=frozenset({"lse"})),
            replace(plain, features=frozenset({"lse", "sinks", "softcap"}), mask=sink_window, page_size=1),
            replace(plain, rope="batched", page_size=0),
            replace(plain, dtypes="bf16+fp8_rope", granularity=128),
            replace(plain, rope="ragged", page_size=0),
        ]
        if arch != "gfx90a":
            scaled = frozenset({"q_scale", "k_scales", "v_scale"})
            narrow = replace(plain, dtypes="fp8", granularity=128, features=scaled, mask=masks.NullMask().program)
            mixed = replace(narrow, dtypes="fp8+bf16_rope", granularity=0, features=scaled | {"split_q"})
            problems += [narrow, replace(mixed, features=mixed.features | {"rope_prescaled"}, mask=causal)]
        if arch != "gfx90a" and dims == (192, 128):
            problems += [
                replace(narrow, features=scaled | {"lse", "sinks", "softcap"}, mask=sink_window, page_size=1),
                replace(
                    narrow, features=scaled | {"v_transposed", "lse"}, rope="batched", page_size=0, out_dtype="fp32"
                ),
                replace(mixed, features=mixed.features | {"v_transposed", "softcap"}, rope="ragged", page_size=0),
            ]
    entries = {
        "plan": ops.Plan, "gather": ops.Gather, "store": ops.Store, "merge": ops.Merge, "prefill": ops.Prefill,
        "quantize": ops.Quantize,
    }  # fmt: skip
    specs = [spec for problem in problems for spec in entries[problem.op].specs(problem, arch)]
    return [(spec.kernel_id(arch), spec) for spec in specs]


KERNELS = [(arch, spec) for arch in ARCHS for _, spec in one_of_each(arch)]


@pytest.mark.parametrize(("arch", "spec"), KERNELS, ids=[spec.kernel_id(arch) for arch, spec in KERNELS])
def test_kernel(arch: str, spec: KernelSpec) -> None:
    program = parse(assembly(spec, arch))
    kernel = program.kernels[spec.symbol]
    notes = kernel.metadata
    assert notes[".vgpr_spill_count"] == notes[".sgpr_spill_count"] == notes[".private_segment_fixed_size"] == 0
    assert notes[".max_flat_workgroup_size"] == spec.threads
    assert not any(ins.name.startswith(("flat_", "scratch_")) for ins in program.code), "an access of unknown kind"
    waves, lds = 4, 256
    if "prefill" in spec.name:
        dims = next(dims for dims in SUPPORTED_DIMS if f".d{dims[0]}x{dims[1]}." in spec.name)
        dtypes = spec.name.removeprefix("prefill.").split("_fp32")[0].split("_bf16.")[0].split("_fp16.")[0]
        tile = tile_of(Problem("prefill", dtypes, dims=dims), arch)
        waves, lds = tile.waves_per_simd, tile.lds_bytes
        products = {ins.name for ins in program.code if ins.name.startswith("v_mfma_")}
        assert products and all(name.startswith("v_mfma_f32_32x32x") for name in products)
        narrow = {"gfx942": "v_mfma_f32_32x32x16_fp8_fp8", "gfx950": "v_mfma_f32_32x32x64_f8f6f4"}.get(arch)
        assert (narrow in products) == dtypes.startswith("fp8")
    assert notes[".vgpr_count"] <= REGISTERS[waves]  # the total: AGPRs are counted in it
    assert notes[".group_segment_fixed_size"] <= min(lds, LDS_BYTES[arch])


def test_parameter_blocks_are_checked() -> None:
    """A field that the host and the device place differently is a compile error that names it."""
    arch, spec = next((arch, spec) for arch, spec in KERNELS if spec.name.startswith("merge"))
    text = compiler.unit(spec, arch).text.replace("  int tokens;\n  int heads;\n", "  int heads;\n  int tokens;\n")
    with pytest.raises(HipCompileError, match=r"MergeParams\.tokens: offset differs"):
        compile_hip(text, arch)


def test_architectures_without_mfma_are_refused() -> None:
    prefill = next(one for one in registry.default() if one.id == "rocm.cdna.prefill.mfma")
    problem = Problem("prefill", "bf16", "bf16", page_size=64, rope="paged", mask=masks.CausalMask().program)
    _, faults = prefill.requires.compare(problem, "gfx1100")
    assert faults == ["architecture gfx1100 is not in gfx90a, gfx942, gfx950"]
    spec = ops.Prefill.specs(problem, "gfx942")[0]
    with pytest.raises(HipCompileError, match="no MFMA on this architecture"):
        compile_hip(compiler.unit(spec, "gfx942").text, "gfx1100")


def test_notes_of_a_code_object(tmp_path: Path) -> None:
    """What is read out of the ELF file is what the assembly says."""
    arch, spec = next((arch, spec) for arch, spec in KERNELS if arch == "gfx942" and spec.name.startswith("prefill"))
    asm = assembly(spec, arch)
    (tmp_path / "k.s").write_text(asm)
    target = ("--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-nogpulib")
    for command in (("clang", *target, "-c", "-o", "k.o", "k.s"), ("ld.lld", "-shared", "-o", "k.co", "k.o")):
        subprocess.run([sys.executable, "-m", "ziglang", *command], cwd=tmp_path, check=True)
    report = code_object.report((tmp_path / "k.co").read_bytes())
    for name, key in (("vgprs", "vgpr_count"), ("agprs", "agpr_count"), ("lds_bytes", "group_segment_fixed_size")):
        assert report[name] == int(re.search(rf"\.{key}:\s+(\d+)", asm)[1])  # type: ignore[index]
    assert report["vgpr_spills"] == report["scratch_bytes"] == 0
    assert code_object.report(b"not an ELF file") == {}


def test_every_registered_source_is_compiled() -> None:
    compiled = {(SOURCES / "rocm" / spec.source).resolve() for _, spec in KERNELS}
    assert compiled == {path.resolve() for one in registry.default() if one.backend == "rocm" for path in one.sources}


def test_variants_are_named_once_and_only_for_cdna() -> None:
    names = [name for name, _ in ops.variants("gfx942")]
    assert len(names) == len(set(names)) > 100
    assert all(name.startswith("rocm.gfx942.") for name in names)
    assert list(ops.variants("gfx1100")) == []
