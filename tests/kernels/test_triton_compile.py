"""Every Triton kernel for every architecture, compiled here without a GPU; what the compilers report is asserted.

No spills: nothing of a thread's registers in memory (scalar registers that AMD's compiler keeps in vector lanes do not
count). On NVIDIA, prefill in float32 or with softcap, and on sm_90 prefill of what its own kernel does not serve,
may keep a few words there; so may the kernel of sm_90 itself, of what belongs to an item and not to a tile.
Shared memory (LDS) within what a block may have, and prefill within the bound that chooses its tile.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mla.backends.triton import compiler, configs
from mla.backends.triton.ops import ENTRIES, Prefill, PrefillHopper
from mla.masks import CausalMask, MaterializedMask
from mla.problem import Problem

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter is on", allow_module_level=True)

ARCHS = ("sm_80", "sm_90a", "gfx90a", "gfx942", "gfx950")
#: Bytes of stack that those may have; with fp8 values as columns, which loads take byte by byte where a sequence begins
#: elsewhere than the copy engine reads from; of the kernel of sm_90.
STACK_BYTES = 96
COLUMNS_STACK_BYTES = 224
HOPPER_STACK_BYTES = 192
CASES = [
    pytest.param(arch, entry, index, problem, id=f"{arch}-{entry.__name__}-{index}")
    for arch in ARCHS
    for entry in ENTRIES
    for index, problem in enumerate(entry.problems(arch))
]


def stack_bytes(kernel: Any) -> int:
    """Bytes of a thread's stack: the only place for spills."""
    if "amdgcn" in kernel.asm:
        found = re.findall(r"\.(vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", kernel.asm["amdgcn"])
        assert len(found) == 2
        return max(int(count) for _, count in found)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", text)
    return int(stack)


def copies_before_exec(text: str) -> list[str]:
    """Copies to accumulation registers between a label of AMD assembly and the restoration of the exec mask behind it.

    LLVM's register allocator has put them there under pressure: lanes that come back miss them.
    """
    found = []
    lines = [line for line in map(str.strip, text.split("\n")) if line and not line.startswith((".loc", ";", ".Ltmp"))]
    for i, label in enumerate(lines):
        if label.startswith(".LBB"):
            block = lines[i + 1 : i + 12]
            ends = [j for j, line in enumerate(block) if line.startswith(("s_or_b64 exec, exec", "s_cbranch", ".LBB"))]
            if ends and block[ends[0]].startswith("s_or_b64 exec"):
                found += [line for line in block[: ends[0]] if line.startswith(("v_accvgpr_write", "v_accvgpr_mov"))]
    return found


@pytest.mark.parametrize(("arch", "entry", "index", "problem"), CASES)
def test_compiles_without_spills(arch: str, entry: Any, index: int, problem: Problem) -> None:
    assert arch == "sm_90a" or entry is not PrefillHopper
    assert entry is PrefillHopper or entry.check(problem, arch) is None
    for spec in entry.specs(problem, arch):
        kernel = compiler.build(spec, arch)
        heavy = problem.dtypes == "fp32" or "softcap" in problem.features or arch == "sm_90a"
        lenient = spec.name == "prefill.prefill" and arch.startswith("sm_") and heavy
        columns = "v_transposed" in problem.features
        few = COLUMNS_STACK_BYTES if columns else STACK_BYTES
        allowed = HOPPER_STACK_BYTES if spec.gluon else few if lenient else 0
        assert stack_bytes(kernel) <= allowed, spec
        assert kernel.metadata.shared <= configs.shared_bytes(arch)
        assert not copies_before_exec(kernel.asm.get("amdgcn", ""))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx942"])
def test_the_bound_of_a_tile_holds_for_fp8(arch: str) -> None:
    for problem in (problem for problem in Prefill.problems(arch) if "fp8" in problem.dtypes):
        tile = configs.choose(arch, problem, configs.shared_bytes(arch))
        assert tile is not None
        kernel = compiler.build(Prefill.specs(problem, arch)[1], arch)
        assert kernel.metadata.shared <= configs.tile_bytes(tile, arch, problem)


@pytest.mark.parametrize(("arch", "instruction"), [
    ("sm_89", r"mma\.sync\S*\.e4m3\.e4m3"), ("sm_90a", r"wgmma\S*\.e4m3\.e4m3"), ("gfx942", "v_mfma_f32_\\w+_fp8_fp8"),
])  # fmt: skip
def test_both_products_of_fp8_are_those_of_the_matrix_unit(arch: str, instruction: str) -> None:
    (problem,) = (problem for problem in Prefill.problems(arch) if "v_transposed" in problem.features)
    asm = compiler.build(Prefill.specs(problem, arch)[1], arch).asm
    text = asm.get("ptx") or asm["amdgcn"]
    assert re.search(instruction, text) and not re.search(r"mma\S*(f32_\w+_b?f16|\.b?f16\.b?f16)", text)


def test_a_copy_before_exec_is_found() -> None:
    text = ".LBB0_78:\n\tv_accvgpr_write_b32 a62, v150\n\ts_or_b64 exec, exec, s[0:1]\n"
    assert copies_before_exec(text) == ["v_accvgpr_write_b32 a62, v150"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx942"])
@pytest.mark.parametrize("rope", ["paged", "ragged"])
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16], ids=["no_bias", "fp32_bias", "bf16_bias"])
@pytest.mark.parametrize("dtypes", ["bf16", "fp32"])
def test_the_bound_of_a_tile_holds(arch: str, rope: Any, bias: torch.dtype | None, dtypes: str) -> None:
    mask = CausalMask() if bias is None else CausalMask() & MaterializedMask(torch.zeros(1, 1, 4, 4, dtype=bias))
    problem = Problem("prefill", dtypes, dtypes, page_size=64 if rope == "paged" else 0, rope=rope, mask=mask.program)
    tile = configs.choose(arch, problem, configs.shared_bytes(arch))
    assert tile is not None
    kernel = compiler.build(Prefill.specs(problem, arch)[1], arch)
    assert kernel.metadata.shared <= configs.tile_bytes(tile, arch, problem) <= configs.shared_bytes(arch)


@pytest.mark.parametrize("limit", [99, 64], ids="{}KiB".format)
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120a"])
def test_small_shared_memory_gets_a_working_tile(arch: str, dims: tuple[int, int], limit: int) -> None:
    problem = Problem("prefill", "bf16", "bf16", dims, page_size=64, rope="paged", mask=CausalMask().program)
    tile = configs.choose(arch, problem, limit * configs.KIB)
    assert tile is not None
    from mla.backends.triton.prefill import attention_spec

    assert compiler.build(attention_spec(problem, arch, tile), arch).metadata.shared <= limit * configs.KIB


@pytest.mark.parametrize("arch", ["sm_100a", "gfx1100", "gfx1201"])
def test_other_architectures_compile(arch: str) -> None:
    problem = Problem("prefill", "bf16", "bf16", page_size=64, rope="paged", mask=CausalMask().program)
    for spec in Prefill.specs(problem, arch):
        assert compiler.build(spec, arch).metadata.shared <= configs.shared_bytes(arch)


def test_the_hopper_kernel_uses_what_it_is_made_of() -> None:
    problem = next(iter(PrefillHopper.problems("sm_90a")))
    text = compiler.build(PrefillHopper.specs(problem, "sm_90a")[1], "sm_90a").asm["ptx"]
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "cp.async.mbarrier.arrive.noinc"):
        assert instruction in text
