"""The Hopper prefill in fp8: what the compiler makes of it, without a GPU; with one, what the matrix does not ask."""

from __future__ import annotations

import dataclasses
import random
import subprocess
from pathlib import Path

import pytest
import torch

import mla
from mla.backends.cuda import compiler
from mla.backends.cuda.prefill_fp8_sm90 import Variant, prefill_spec, tile_of
from mla.masks import CausalMask, MaterializedMask
from mla.problem import Problem
from mla.target import device_arch
from tests.kernels.test_cuda_prefill_sm90 import LONG, SINK_WINDOW, disassembler
from tests.support.problems import Case, build
from tests.support.tolerance import assert_lse, assert_output, same_bits

pytest.importorskip("cuda.core", reason="needs cuda-core, cuda-bindings and NVRTC (the extra `cuda`)")

WHOLE, CHUNKED = Variant(chunked=False, value_scales=False), Variant(chunked=True, value_scales=False)
FEATURES = frozenset({"q_scale", "k_scales", "v_scale", "scales"})
FP8 = Problem(
    "prefill", "fp8", "bf16", page_size=64, rope="paged", mask=CausalMask().program, features=FEATURES, granularity=128
)
ROPE16 = dataclasses.replace(
    FP8, dtypes="fp8+bf16_rope", features=frozenset({"q_scale", "k_scales", "split_q", "rope_prescaled"}), granularity=0
)


def asking(problem: Problem, *features: str, **fields: object) -> Problem:
    return dataclasses.replace(problem, features=problem.features | set(features), **fields)  # type: ignore[arg-type]


BIAS = MaterializedMask(torch.zeros(1, 8, 8))
KERNELS: dict[str, tuple[Problem, Variant]] = {
    "transposed": (asking(FP8, "v_transposed"), WHOLE),
    "transposed_lse": (asking(FP8, "v_transposed", "lse"), WHOLE),
    "rows": (FP8, WHOLE),
    "rows_lse_chunked": (asking(FP8, "lse", out_dtype="fp32"), CHUNKED),
    "value_scales": (asking(FP8, "lse"), Variant(chunked=False, value_scales=True)),
    "page_1": (asking(FP8, "lse", page_size=1), WHOLE),
    "sinks_function": (asking(FP8, "lse", "sinks", mask=SINK_WINDOW.program), WHOLE),
    "softcap_bias": (asking(FP8, "lse", "softcap", "bias", mask=BIAS.program), WHOLE),
    "rope16": (asking(ROPE16, "v_transposed"), WHOLE),
    "rope16_rows_lse": (asking(ROPE16, "lse"), CHUNKED),
    "rope16_not_prescaled": (
        dataclasses.replace(ROPE16, features=ROPE16.features - {"rope_prescaled"} | {"lse"}),
        WHOLE,
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_keep_their_registers_and_the_tensor_cores_asynchronous(name: str, tmp_path: Path) -> None:
    problem, variant = KERNELS[name]
    spec, tile = prefill_spec(problem, variant), tile_of(problem)
    binary = compiler.compile_unit(compiler.unit(spec, "sm_90a"))
    # The bodies for tiles with a scale for each key, and the producer's warps with their 32 registers where V^T is
    # copied, may put away a few words.
    spills = 0 if tile.row_groups == 2 else 160 if variant.value_scales else 120
    assert int(str(binary.report["spill_store_bytes"])) <= spills
    assert binary.report["registers"] == 65536 // spec.threads // 8 * 8
    assert spec.shared_bytes <= 227 * 1024
    assert "serialized" not in str(binary.report["log"]), binary.report["log"]

    tool = disassembler()
    if tool is None:
        pytest.skip("needs cuobjdump, of the CUDA toolkit or of triton")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(binary.code)
    lines = subprocess.run([tool, "-sass", str(file)], capture_output=True, text=True, check=True).stdout.splitlines()

    def count(instruction: str) -> int:
        return sum(f" {instruction}" in line for line in lines)

    # Whole tiles: one scale, a scale a key, masked; and the first half of a masked one. Of an unscaled rope no two keys
    # have one scale; softcap masks every tile. A loop may have its first products twice.
    whole = 3 - (problem.dtypes != "fp8" and "rope_prescaled" not in problem.features) - (tile.row_groups == 2) * 2
    fp8_rope = problem.dtypes == "fp8"
    assert count("QGMMA") >= whole * (4 + 2 * fp8_rope + 4) + 4 + 2 * fp8_rope + 2
    assert count("HGMMA") >= 4 * (whole + 1) or fp8_rope


def test_tiles_depend_on_nothing_that_changes_by_step() -> None:
    assert tile_of(FP8) == tile_of(dataclasses.replace(FP8, page_size=1, out_dtype="fp32", rope="batched"))


@pytest.fixture
def hopper() -> torch.device:
    device = torch.device("cuda", 0)
    if device_arch(device) != "sm_90a":
        pytest.skip(f"needs an H100 or H200; this is {device_arch(device)}")
    return device


@pytest.mark.cuda
@pytest.mark.parametrize("dtypes", ["fp8", "fp8+bf16_rope"])
@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("alone", [0, 1, 3])
def test_a_sequence_is_bitwise_the_same_in_any_company(
    hopper: torch.device, dtypes: str, one_scale: bool, alone: int, seed: int
) -> None:
    case = Case(dtypes=dtypes, lengths=LONG, heads=3, spare_rows=(0, 0))
    problem = build(case, hopper, seed)
    if one_scale:
        problem.with_one_key_scale()
    output, lse = problem.run("cuda")
    offsets = problem.operands["valid_length"].tolist()
    mine = slice(offsets[alone], offsets[alone + 1])
    others = torch.full_like(problem.operands["valid_length"], 0)
    others[alone + 1 :] = offsets[alone + 1] - offsets[alone]
    problem.operands = dict(problem.operands, q=problem.operands["q"][mine], valid_length=others)
    for name in ("q_scale", "q_rope"):
        if name in problem.keywords:
            problem.keywords[name] = problem.keywords[name][mine]
    # The lengths of the cache say how many tokens precede the new ones, so positions are those of the whole batch.
    output_alone, lse_alone = problem.run("cuda")
    assert same_bits(output_alone, output[mine])
    assert torch.equal(lse_alone, lse[mine])


@pytest.mark.cuda
@pytest.mark.parametrize("dtypes", ["fp8", "fp8+bf16_rope"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_transposed_values_that_begin_anywhere(hopper: torch.device, dtypes: str, mask: str, seed: int) -> None:
    """TMA reads from multiples of 16 rows; copies do the rest, and both take turns in one ring."""
    lengths = ((0, 256), (0, 1029), (0, 33), (0, 800), (0, 1), (0, 97))
    case = Case(
        dtypes=dtypes, rope="ragged", overrides=False, mask=mask, v_transposed=True, v_scale="number", heads=16,
        lengths=(*lengths, (0, -sum(new for _, new in lengths) % 16 + 16)),
    )  # fmt: skip
    problem = build(case, hopper, seed)
    output, lse = problem.run("cuda")
    expected, expected_lse = problem.expect()
    assert_output(output, expected, "fp8", 0.6)
    assert_lse(lse, expected_lse, "fp8")


@pytest.mark.cuda
@pytest.mark.parametrize("dtypes", ["fp8", "fp8+bf16_rope"])
def test_values_as_rows_give_the_bits_of_transposed_ones(hopper: torch.device, dtypes: str, seed: int) -> None:
    """Call after call, V from memory: thread blocks end with items of one tile, whose rows of V come late."""
    case = Case(
        dtypes=dtypes, heads=16, spare_rows=(0, 0),
        lengths=((0, 2048), (0, 129), (0, 777), (0, 64), (0, 1500), (0, 33), (700, 1), (0, 900)),
    )  # fmt: skip
    rows, columns = (build(dataclasses.replace(case, v_transposed=t), hopper, seed) for t in (False, True))
    expected, expected_lse = columns.run("cuda")
    flush = torch.empty(1 << 27, dtype=torch.uint8, device=hopper)
    for _ in range(100):
        flush.zero_()
        output, lse = rows.run("cuda")
        assert same_bits(output, expected) and torch.equal(lse, expected_lse)


@pytest.mark.cuda
def test_a_scale_that_is_no_number(hopper: torch.device, seed: int) -> None:
    """Consumers compare the scales of tiles, and NaN is unlike itself."""
    case = Case(dtypes="fp8+bf16_rope", lengths=((900, 65), (0, 300)), heads=3, spare_rows=(0, 0))
    problem = build(case, hopper, seed)
    problem.keywords["k_scales"] = torch.full((1, 1), torch.nan, device=hopper).expand(len(problem.operands["k"]), 1)
    output, lse = problem.run("cuda")
    assert output.isnan().all() and lse.isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("lse", [True, False])
def test_a_row_does_not_depend_on_its_neighbours(hopper: torch.device, lse: bool, seed: int) -> None:
    """Rows whose logits grow begin a tile anew; the others of their warp come out the same, to the bit."""

    def run() -> torch.Tensor:
        outputs = problem.outputs()
        if not lse:  # P itself tells where a row has to begin anew, not its sum
            outputs["lse"] = None
        mla.prefill(**problem.operands, **problem.keywords, **outputs, target="cuda")
        return outputs["output"]

    case = Case(dtypes="fp8+bf16_rope", lengths=((1900, 64),), heads=4, mask="none", spare_rows=(0, 0))
    problem = build(case, hopper, seed).with_one_key_scale()
    growing = torch.linspace(6, 1, len(problem.operands["k"]), device=hopper)[:, None, None]
    problem.operands["k"] = (problem.operands["k"].float().nan_to_num() * growing).to(torch.float8_e4m3fn)
    output = run()
    problem.operands["q"] = problem.operands["q"].clone()
    problem.operands["q"][1::2] = 0.0
    others = run()
    assert same_bits(output[::2], others[::2])
    assert not same_bits(output[1::2], others[1::2])


@pytest.mark.cuda
def test_scales_as_numbers_equal_tensors_on_every_stream_and_in_graphs(hopper: torch.device, seed: int) -> None:
    problem = build(Case(dtypes="fp8", lengths=((0, 300), (100, 65)), heads=4, spare_rows=(0, 0)), hopper, seed)
    numbers = {name: random.Random(seed).uniform(0.5, 2.0) for name in ("q_scale", "k_scales", "v_scale")}
    output = torch.empty_like(problem.outputs()["output"])

    def call(scales: dict[str, object]) -> None:
        output.fill_(torch.nan)
        mla.prefill(**problem.operands, **problem.keywords | scales, output=output, target="cuda")

    call({name: torch.full((1,), value, device=hopper) for name, value in numbers.items()})
    expected = output.clone()
    for _ in range(4):  # launched again from the third on
        call(numbers)
        assert same_bits(output, expected)
    for stream in (torch.cuda.Stream(hopper), torch.cuda.Stream(hopper)):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # what this stream has to write comes late
            call(numbers)
        stream.synchronize()
        assert same_bits(output, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(numbers)
    output.zero_()
    graph.replay()
    assert same_bits(output, expected)
