"""The Hopper prefill: what the compiler makes of it, without a GPU; with one, what the matrix does not ask."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import mla
from mla.backends.cuda import compiler, prefill_sm90
from mla.backends.cuda.prefill_sm90 import Tile, Variant, prefill_spec, schedule_spec, tile_of
from mla.errors import CompileError
from mla.masks import (
    CausalMask,
    CausalPaddingMask,
    ChunkedCausalMask,
    Mask,
    MaterializedMask,
    NullMask,
    SlidingWindowCausalMask,
)
from mla.problem import Problem
from mla.target import device_arch
from tests.support.problems import MASKS, Case, build
from tests.support.tolerance import assert_lse, assert_output, precision_of

pytest.importorskip("cuda.core", reason="needs cuda-core, cuda-bindings and NVRTC (the extra `cuda`)")

WHOLE, CHUNKED = Variant(chunked=False, positive_scale=True), Variant(chunked=True, positive_scale=True)
CAUSAL = Problem(
    "prefill", "bf16", "bf16", page_size=64, rope="paged", mask=CausalMask().program, features=frozenset({"lse"})
)
SINK_WINDOW = Mask.from_function(lambda b, h, q, k: (k <= q) & ((q - k < 4096) | (k < 64)))
BIAS = MaterializedMask(torch.zeros(1, 8, 8))


def changed(**fields: object) -> Problem:
    return dataclasses.replace(CAUSAL, **fields)  # type: ignore[arg-type]


KERNELS: dict[str, tuple[Problem, Variant]] = {
    "causal": (CAUSAL, WHOLE),
    "chunked": (CAUSAL, CHUNKED),
    "fp16_to_fp32_sinks": (
        changed(dtypes="fp16", out_dtype="fp32", mask=NullMask().program, features=frozenset({"lse", "sinks"})),
        WHOLE,
    ),
    "page_1": (changed(page_size=1), CHUNKED),
    "page_8": (changed(page_size=8), CHUNKED),
    "window": (changed(mask=SlidingWindowCausalMask(512).program), WHOLE),
    "function": (changed(mask=SINK_WINDOW.program), CHUNKED),
    "captured": (changed(mask=CausalPaddingMask(torch.zeros(4, dtype=torch.int32)).program), WHOLE),
    "division": (changed(mask=ChunkedCausalMask(1000).program), WHOLE),
    "negative_scale": (CAUSAL, Variant(chunked=False, positive_scale=False)),
    "softcap_bias": (changed(mask=BIAS.program, features=frozenset({"softcap", "bias"})), WHOLE),
    "batched": (changed(rope="batched", page_size=0), WHOLE),
    "ragged": (changed(rope="ragged", page_size=0), WHOLE),
    "wide_dims": (changed(dims=(256, 256)), CHUNKED),
}


def disassembler() -> str | None:
    """Return cuobjdump, of the toolkit or of Triton's wheel."""
    triton = importlib.util.find_spec("triton")
    carried = Path(str(triton.origin)).parent / "backends/nvidia/bin/cuobjdump" if triton else Path()
    return shutil.which("cuobjdump") or (str(carried) if carried.is_file() else None)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_keep_their_registers_and_the_tensor_cores_asynchronous(name: str, tmp_path: Path) -> None:
    problem, variant = KERNELS[name]
    spec = prefill_spec(problem, variant)
    binary = compiler.compile_unit(compiler.unit(spec, "sm_90a"))
    # With a captured tensor the producer, which has 32 registers, may put away a word or two.
    assert problem.mask is not None
    spills = 8 if problem.mask.captures else 0
    assert int(str(binary.report["spill_store_bytes"])) <= spills
    assert binary.report["registers"] == 65536 // spec.threads // 8 * 8
    assert spec.shared_bytes <= 227 * 1024
    # Serialised products wait for each other one by one: everything is still right, at half the speed.
    assert "serialized" not in str(binary.report["log"]), binary.report["log"]

    tool = disassembler()
    if tool is None:
        pytest.skip("needs cuobjdump, of the CUDA toolkit or of triton")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(binary.code)
    lines = subprocess.run([tool, "-sass", str(file)], capture_output=True, text=True, check=True).stdout.splitlines()

    def count(instruction: str) -> int:
        return sum(f" {instruction}" in line for line in lines)

    # The masked body, whole and for half a tile; the plain one, which may have to take its scores again.
    tile, scores = tile_of(problem), problem.dims[0] // 16
    plain = 0 if problem.mask.biases else 2 if problem.v_head_dim <= 128 else 1
    assert count("HGMMA") == (2 + plain) * scores + (1 + bool(plain)) * (tile.block_n // 16) + tile.block_n // 32
    assert count("WARPGROUP.DEPBAR") == 4 + plain + bool(plain)
    assert max(count("LDL"), count("STL")) <= spills


def test_the_order_of_large_batches_compiles_small() -> None:
    binary = compiler.compile_unit(compiler.unit(schedule_spec(CAUSAL), "sm_90a"))
    assert binary.report["spill_store_bytes"] == 0
    assert int(str(binary.report["registers"])) <= 64


def test_registers_that_would_never_be_given_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_sm90, "tile_of", lambda problem: Tile(3, 128, 2, 1, 168, 32))
    spec = prefill_spec.__wrapped__(CAUSAL, WHOLE)
    with pytest.raises(CompileError, match="wait for ever"):
        compiler.build(spec, "sm_90a")


def test_a_simple_mask_is_unrolled_and_a_long_one_is_not() -> None:
    defines = [dict(prefill_spec(changed(mask=m.program), WHOLE).defines) for m in (CausalMask(), SINK_WINDOW)]
    assert [d["MLA_MASK_UNROLL"] for d in defines] == [1, 0]


def test_tiles_depend_on_nothing_that_changes_by_step() -> None:
    assert tile_of(CAUSAL) == tile_of(changed(page_size=1, mask=NullMask().program, out_dtype="fp32"))
    assert tile_of(CAUSAL).block_n == 128


@pytest.fixture
def hopper() -> torch.device:
    device = torch.device("cuda", 0)
    if device_arch(device) != "sm_90a":
        pytest.skip(f"needs an H100 or H200; this is {device_arch(device)}")
    return device


LONG = ((0, 700), (1500, 130), (0, 1), (3000, 65), (100, 0), (0, 193))
#: Keys of the first three are worked on in parts: six, two and four of them where there are three heads.
IN_PARTS = ((12300, 70), (4500, 300), (9000, 1), (0, 700), (0, 0), (2000, 65))
#: Of the 138 items of the first, those beyond a wave have their keys in parts.
PARTLY = ((0, 8800), (300, 70), (4500, 300))
MANY_IN_PARTS = (*IN_PARTS, (4096, 3), *((50, 20),) * 28)  # ordered by a kernel of its own


@pytest.mark.cuda
@pytest.mark.parametrize("mask", MASKS)
def test_keys_in_parts_agree_with_the_oracle(hopper: torch.device, mask: str, seed: int) -> None:
    batches = [((4200, 70), (0, 30))] if "bias" in mask else [IN_PARTS]
    for lengths in (*batches, PARTLY, MANY_IN_PARTS) if mask in ("causal", "documents") else batches:
        problem = build(Case(lengths=lengths, heads=3, mask=mask, sinks=mask == "causal"), hopper, seed)
        output, lse = problem.run("cuda")
        expected, expected_lse = problem.expect()
        assert_output(output, expected, precision_of("bf16"))
        assert_lse(lse, expected_lse, precision_of("bf16"))


@pytest.mark.cuda
@pytest.mark.parametrize("fields", [{"dims": (256, 256)}, {"softcap": 9.0}, {"out_dtype": "fp32"}, {"dtypes": "fp16"}])
def test_parts_of_every_tile_agree_with_the_oracle(hopper: torch.device, fields: dict[str, Any], seed: int) -> None:
    problem = build(Case(lengths=IN_PARTS, heads=3, **fields), hopper, seed)
    output, lse = problem.run("cuda")
    expected, expected_lse = problem.expect()
    assert_output(output, expected, precision_of(problem.case.dtypes))
    assert_lse(lse, expected_lse, precision_of(problem.case.dtypes))


@pytest.mark.cuda
def test_parts_leave_their_counters_zero_and_their_workspace_unread(hopper: torch.device, seed: int) -> None:
    problem = build(Case(lengths=IN_PARTS, heads=3), hopper, seed)
    outputs = problem.outputs()
    order = ("q", "k", "v", "k_rope", "mask", "valid_length", "cache_row_offsets", "scale")
    operands = [problem.operands[name] for name in order]
    need = mla.workspace_size("flare_mla_prefill", outputs["output"], *operands, **problem.keywords, target="cuda")
    expected = problem.run("cuda")[0].view(torch.int16)
    for _ in range(20):
        workspace = torch.full((need + 4,), 255, dtype=torch.uint8, device=hopper)[4:]
        assert torch.equal(problem.run("cuda", workspace=workspace)[0].view(torch.int16), expected)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("page_size", "lengths", "alone"),
    [
        (page_size, lengths, i)
        for page_size, lengths in ((1, LONG), (8, LONG), (64, LONG), (64, IN_PARTS), (64, PARTLY), (64, MANY_IN_PARTS))
        for i, (_, new) in enumerate(lengths[:6])
        if new > 0
    ],
)
def test_a_sequence_is_bitwise_the_same_in_any_company(
    hopper: torch.device, page_size: int, lengths: tuple[tuple[int, int], ...], alone: int, seed: int
) -> None:
    problem = build(Case(lengths=lengths, heads=3, page_size=page_size, spare_rows=(0, 0)), hopper, seed)
    output, lse = problem.run("cuda")
    offsets = problem.operands["valid_length"].tolist()
    mine = slice(offsets[alone], offsets[alone + 1])
    others = torch.full_like(problem.operands["valid_length"], 0)
    others[alone + 1 :] = offsets[alone + 1] - offsets[alone]
    lonely = dict(problem.operands, q=problem.operands["q"][mine], valid_length=others)
    problem.operands = lonely
    # The lengths of the cache say how many tokens precede the new ones, so positions are those of the whole batch.
    output_alone, lse_alone = problem.run("cuda")
    assert torch.equal(output_alone.view(torch.int16), output[mine].view(torch.int16))
    assert torch.equal(lse_alone, lse[mine])


@pytest.mark.cuda
@pytest.mark.parametrize("dtypes", ["bf16", "fp16"])
def test_references_follow_scores_that_grow_row_by_row(hopper: torch.device, dtypes: str, seed: int) -> None:
    """Every second row is so sharp that its references move; the others keep their bits."""
    problem = build(Case(lengths=((2900, 150), (0, 700)), heads=3, dtypes=dtypes, spare_rows=(0, 0)), hopper, seed)
    quiet, quiet_lse = problem.run("cuda")
    problem.operands["q"] = problem.operands["q"].clone()
    problem.operands["q"][1::2] *= 8.0
    output, lse = problem.run("cuda")
    assert torch.equal(output[::2].view(torch.int16), quiet[::2].view(torch.int16))
    assert torch.equal(lse[::2], quiet_lse[::2])
    expected, expected_lse = problem.expect()
    assert_output(output, expected, precision_of(dtypes))
    assert_lse(lse, expected_lse, precision_of(dtypes))


@pytest.mark.cuda
@pytest.mark.parametrize("lengths", [LONG, IN_PARTS])
def test_a_hundred_runs_give_the_same_bits(
    hopper: torch.device, lengths: tuple[tuple[int, int], ...], seed: int
) -> None:
    problem = build(Case(lengths=lengths, heads=16), hopper, seed)
    first = problem.run("cuda")[0].view(torch.int16)
    for _ in range(100):
        assert torch.equal(problem.run("cuda")[0].view(torch.int16), first)


@pytest.mark.cuda
@pytest.mark.parametrize("lengths", [LONG, IN_PARTS, MANY_IN_PARTS])
def test_a_captured_graph_replays(hopper: torch.device, lengths: tuple[tuple[int, int], ...], seed: int) -> None:
    problem = build(Case(lengths=lengths, heads=3, spare_rows=(0, 0)), hopper, seed)
    expected, _ = problem.run("cuda")
    outputs = problem.outputs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla.prefill(**problem.operands, **problem.keywords, **outputs, target="cuda")
    for _ in range(3):
        outputs["output"].fill_(torch.nan)
        graph.replay()
        assert torch.equal(outputs["output"].view(torch.int16), expected.view(torch.int16))
