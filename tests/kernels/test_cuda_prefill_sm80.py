"""The mma.sync prefill kernel: compiled for every architecture; on a GPU, what the matrix does not reach."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import mla
from mla import dispatch, masks
from mla.backends.cuda import compiler, prefill_sm80
from mla.backends.cuda.prefill_sm80 import PrefillSm80, Tile, multiplies_fp8, prefill_spec, tile_of
from mla.problem import Problem
from tests.kernels.test_cuda_compile import sass
from tests.support.matrix_cases import LONG_ROWS
from tests.support.problems import MASKS, Case, MaskContext, PrefillProblem, build
from tests.support.tolerance import assert_lse, assert_output, precision_of

pytest.importorskip("cuda.core", reason="needs cuda-core, cuda-bindings and NVRTC (the extra `cuda`)")

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
#: One architecture for each tile.
ARCH_OF_TILE = {(192, 128): ("sm_80", "sm_89", "sm_90a"), (256, 256): ("sm_89",)}
CONTEXT = MaskContext(2, 3, (4, 5), (6, 7), torch.device("cpu"), torch.Generator())


def problem_of(mask: str = "causal", features: tuple[str, ...] = ("lse",), **changes: object) -> Problem:
    program = MASKS[mask](CONTEXT).program
    asked = frozenset({"batch_invariant", *features, *(["bias"] if program.has_bias else [])})
    base = Problem("prefill", "bf16", "bf16", page_size=64, rope="paged", mask=program, features=asked)
    return replace(base, **changes)  # type: ignore[arg-type]


def fp8_problem_of(dtypes: str = "fp8", *features: str, **changes: object) -> Problem:
    scaled = ("scales",) if dtypes != "fp8+bf16_rope" else ("split_q",)
    operands = ("q_scale", "k_scales", "v_scale") if dtypes.startswith("fp8") else ()
    out_dtype = "bf16" if dtypes.startswith("fp8") else dtypes[:4]
    more = {"out_dtype": out_dtype, "granularity": 128 if "scales" in scaled else 0, **changes}
    return problem_of(features=("lse", *scaled, *operands, *features), dtypes=dtypes, **more)


PROBLEMS = {
    **{mask: problem_of(mask) for mask in MASKS},
    "plain": problem_of(features=()),
    "fp16, sinks and softcap": problem_of(features=("lse", "sinks", "softcap"), dtypes="fp16", out_dtype="fp16"),
    "bias and softcap, fp32 out": problem_of("causal_bias", ("lse", "sinks", "softcap"), out_dtype="fp32"),
    "tokens as pages": problem_of(page_size=1),
    "pages of 100": problem_of(page_size=100),
    "batched": problem_of(rope="batched", page_size=0),
    "ragged": problem_of(rope="ragged", page_size=0),
    **{f"rows of {alignment} bytes": problem_of(alignment=alignment) for alignment in (2, 4, 8)},
    "fp32 out, rows of 2 bytes": problem_of(out_dtype="fp32", alignment=2),
    "fp8": fp8_problem_of(),
    "fp8, V^T, bias and softcap, fp32 out": fp8_problem_of(
        "fp8", "v_transposed", "softcap", "sinks", "bias", mask="causal_bias", out_dtype="fp32", page_size=1
    ),
    "fp8, batched, rows of 1 byte": fp8_problem_of(rope="batched", page_size=0, alignment=1),
    "fp8, bf16 rope": fp8_problem_of("fp8+bf16_rope"),
    "fp8, prescaled bf16 rope": fp8_problem_of("fp8+bf16_rope", "rope_prescaled", rope="ragged", page_size=0),
    "bf16, fp8 rope": fp8_problem_of("bf16+fp8_rope"),
    "fp16, fp8 rope, tokens as pages": fp8_problem_of("fp16+fp8_rope", page_size=1, mask="causal_bias"),
}
#: Compiled for every architecture: with both heights of the tile, with the taller one.
THOROUGH = {"causal": 2, "bias and softcap, fp32 out": 2, "fp8": 1, "bf16, fp8 rope": 1}


@pytest.fixture
def _fresh_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "sm80"))
    monkeypatch.delenv("MLA_AOT_DIR", raising=False)
    monkeypatch.delenv("MLA_JIT", raising=False)


@pytest.mark.usefixtures("_fresh_cache")
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_compiles_within_its_budget(name: str) -> None:
    for dims in ((192, 128), (256, 256)):
        problem = replace(PROBLEMS[name], dims=dims)
        value_scales = "V^T" in name  # the rarest of all together
        for arch in ARCHS if name in THOROUGH else ARCH_OF_TILE[dims]:
            tile = tile_of(problem, arch)
            assert tile is not None
            for used in (tile, tile.halved())[: THOROUGH.get(name, 1)]:
                options = {"value_scales": value_scales, "fp8_mma": multiplies_fp8(problem, arch)}
                spec = prefill_spec(problem, used, positive_scale=True, **options)
                report = compiler.build(spec, arch).report
                spills = (report["spill_store_bytes"], report["spill_load_bytes"], report["stack_bytes"])
                assert spills == (0, 0, 0), (dims, arch, used)
                assert report["shared_bytes"] == 0
                assert int(str(report["registers"])) * 32 * used.warps * used.resident <= 65536, (dims, arch, used)


@pytest.mark.usefixtures("_fresh_cache")
@pytest.mark.parametrize(
    ("alignment", "copies", "width"), [(16, "LDGSTS", ".128"), (8, "LDGSTS", ".64"), (4, "LDGSTS", ""), (2, "LDG", "")]
)
def test_it_uses_the_tensor_cores_and_the_widest_copies(alignment: int, copies: str, width: str) -> None:
    problem = problem_of(alignment=alignment)
    tile = tile_of(problem, "sm_80")
    assert tile is not None
    path = compiler.build(prefill_spec(problem, tile, positive_scale=True), "sm_80").path
    assert path is not None
    instructions = sass(path)
    kinds = {instruction.split(".")[0] for instruction in instructions}
    assert kinds >= {"HMMA", "LDSM", copies}
    assert not kinds & {"LDL", "STL"}, "local memory"
    wide = {re.sub(r"\.(E|BYPASS|LTC128B|CONSTANT|U16)\b", "", one) for one in instructions if one.startswith("LDGSTS")}
    assert wide == ({f"LDGSTS{width}"} if copies == "LDGSTS" else set())


@pytest.mark.usefixtures("_fresh_cache")
@pytest.mark.parametrize(
    ("arch", "dims", "fp8"),
    [
        ("sm_80", (192, 128), "HMMA"),
        ("sm_90a", (192, 128), "HMMA"),
        ("sm_89", (192, 128), "QMMA"),
        ("sm_120", (192, 128), "QMMA"),
        ("sm_89", (256, 256), "HMMA"),
    ],
)
def test_fp8_is_multiplied_as_it_is_where_there_are_tensor_cores_for_it(
    arch: str, dims: tuple[int, int], fp8: str
) -> None:
    spec = PrefillSm80.specs(fp8_problem_of(dims=dims), arch)[0]
    path = compiler.build(spec, arch).path
    assert path is not None
    kinds = {instruction.split(".")[0] for instruction in sass(path)}
    assert kinds & {"HMMA", "QMMA"} == {"HMMA", fp8}


def test_tiles_follow_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    tiles = {arch: tile_of(problem, arch) for arch in (*ARCHS, "sm_87", "sm_103a", "sm_121")}
    assert tiles["sm_90a"] == tiles["sm_100"] == tiles["sm_103a"] == Tile(4, 32, 64, 2)
    assert tiles["sm_80"] == tiles["sm_87"] == Tile(8, 32, 64, 1)
    assert tiles["sm_86"] == tiles["sm_89"] == tiles["sm_120"] == tiles["sm_121"] == Tile(8, 16, 32, 1)
    for dims in ((192, 128), (256, 256)):
        for arch in ARCHS:
            assert PrefillSm80.check(replace(problem, dims=dims), arch) is None
    monkeypatch.setitem(prefill_sm80.SHARED_BYTES, "sm_80", 99 << 10)
    assert tile_of(problem, "sm_80") == tiles["sm_86"]
    monkeypatch.setitem(prefill_sm80.SHARED_BYTES, "sm_80", 64 << 10)
    assert PrefillSm80.check(problem, "sm_80") == ("needs 81,968 bytes of shared memory a block, and sm_80 has 65,536")


def test_explain_says_what_it_is_for() -> None:
    for target in ("cuda:sm_80", "cuda:sm_89", "cuda:sm_100", "cuda:sm_120"):
        assert mla.explain("prefill", target=target).chosen == "cuda.sm80.prefill.mma"
    assert "no tcgen05 kernel yet" in str(mla.explain("prefill", target="cuda:sm_100"))
    assert mla.explain("prefill", target="cuda:sm_90a", alignment=2).chosen == "cuda.sm80.prefill.mma"
    refusal = str(mla.explain("prefill", target="cuda:sm_90a", alignment=2))
    assert "cuda.sm90.prefill.wgmma (priority 200): refused" in refusal
    assert "alignment 2 bytes is not at least 16" in refusal


def test_what_is_compiled_ahead() -> None:
    beside = {problem.dtypes for problem in PrefillSm80.problems("sm_90a")}
    assert beside == {"bf16+fp8_rope"}, "Hopper has kernels of its own for the others"
    names = [spec.name for problem in PrefillSm80.problems("sm_80") for spec in PrefillSm80.specs(problem, "sm_80")]
    assert len(names) == len(set(names)) == 72 + 36 + 144
    assert PrefillSm80.workspace_bytes(problem_of(), T=1 << 20, L=1 << 20, B=1 << 16, H=128) == 0


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The GPU, with this kernel in place of what dispatch would choose there."""
    monkeypatch.setattr("mla.dispatch.resolve", lambda problem, target, device: PrefillSm80.prepare(problem, device))
    dispatch.forget()
    yield torch.device("cuda", 0)
    dispatch.forget()


def check(problem: PrefillProblem) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = problem.run("cuda")
    expected, expected_lse = problem.expect()
    assert_output(output, expected, precision_of(problem.case.dtypes))
    assert_lse(lse, expected_lse, precision_of(problem.case.dtypes))
    return output, lse


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a copy whose address and outer strides are multiples of `elements` elements and of no more."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + elements)
    flat = torch.full((math.prod(shape) + elements,), math.nan, device=tensor.device).to(tensor.dtype)
    return flat[elements:].view(shape)[..., : tensor.shape[-1]].copy_(tensor)


@pytest.mark.cuda
@pytest.mark.parametrize("rope", ["paged", "ragged", "batched"])
@pytest.mark.parametrize("elements", [1, 2, 4])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_rows_that_are_not_aligned(rope: str, elements: int, out_dtype: str, device: torch.device, seed: int) -> None:
    problem = build(Case(rope=rope, strided=False, out_dtype=out_dtype), device, seed)
    for name in ("q", "k", "v", *(["k_rope"] if rope != "paged" else [])):
        problem.operands[name] = shifted(problem.operands[name], elements)
    outputs = problem.outputs()
    outputs["output"] = shifted(outputs["output"], elements)
    seen = []
    prepare = PrefillSm80.prepare

    def spy(problem: Problem, device: torch.device) -> object:
        seen.append(problem.alignment)
        return prepare(problem, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefillSm80, "prepare", staticmethod(spy))
        mla.prefill(**problem.operands, **problem.keywords, **outputs, target="cuda")
    assert seen == [2 * elements]
    expected, expected_lse = problem.expect()
    assert_output(outputs["output"], expected, "bf16")
    assert_lse(outputs["lse"], expected_lse, "bf16")


@pytest.mark.cuda
@pytest.mark.parametrize("elements", [1, 4, 8])
@pytest.mark.parametrize(
    ("dtypes", "transposed"),
    [("fp8", False), ("fp8", True), ("fp8+bf16_rope", False), ("fp8+bf16_rope", True), ("bf16+fp8_rope", False)],
)
def test_fp8_rows_that_are_not_aligned(
    dtypes: str, elements: int, transposed: bool, device: torch.device, seed: int
) -> None:
    lengths = ((37, 70), (0, 129), (200, 1))
    case = Case(lengths=lengths, dtypes=dtypes, strided=False, v_transposed=transposed, page_size=1)
    problem = build(case, device, seed)
    for name in ("q", "k", *([] if transposed else ["v"])):
        problem.operands[name] = shifted(problem.operands[name], elements)
    if dtypes == "fp8+bf16_rope":
        problem.keywords["q_rope"] = shifted(problem.keywords["q_rope"], elements)
    check(problem)


@pytest.mark.cuda
@pytest.mark.parametrize("dtypes", ["bf16", "fp8", "fp8+bf16_rope", "bf16+fp8_rope"])
@pytest.mark.parametrize("rope", ["paged", "ragged", "batched"])
@pytest.mark.parametrize("alignment", [16, 2])
def test_what_does_not_count_is_not_read_into_the_result(
    dtypes: str, rope: str, alignment: int, device: torch.device, seed: int
) -> None:
    """Slots behind the last key, other pages, tails of wide rows: NaN and Inf give the bits that zeros give."""
    results = []
    for poison in (0.0, math.nan, math.inf):
        lengths = ((0, 65), (1, 64), (200, 3))
        case = Case(lengths=lengths, dtypes=dtypes, rope=rope, poison=poison, softcap=20.0, heads=2, v_scale="row")
        problem = build(case, device, seed)
        unused = problem.operands["k"].float().isnan().any(-1).any(-1)
        for name in ("k_scales", "v_scale"):
            if name in problem.keywords:
                problem.keywords[name] = problem.keywords[name].masked_fill(unused[:, None], poison)
        if alignment < 16:
            for name in ("q", "k", "v"):
                problem.operands[name] = shifted(problem.operands[name], 2 // problem.operands[name].element_size())
        results.append(problem.run("cuda"))
    for output, lse in results[1:]:
        assert torch.equal(output.nan_to_num(), results[0][0].nan_to_num())
        assert torch.equal(lse.nan_to_num(), results[0][1].nan_to_num())
        assert torch.equal(output.isnan(), results[0][0].isnan())


@pytest.mark.cuda
@pytest.mark.parametrize("mask", ["causal", "sliding", "checkered", "causal_bias"])
@pytest.mark.parametrize("dtypes", ["bf16", "fp8", "bf16+fp8_rope"])
def test_a_sequence_does_not_depend_on_its_company(mask: str, dtypes: str, device: torch.device, seed: int) -> None:
    lengths = ((300, 150), (0, 1), (17, 500), (1000, 129))
    together = build(Case(lengths=lengths, mask=mask, heads=3, rope="ragged", dtypes=dtypes), device, seed)
    output, lse = check(together)
    queries = together.operands["valid_length"]
    for b in range(len(lengths)):
        own = slice(b, b + 2)
        alone = {name: together.operands[name][own] for name in ("valid_length", "cache_row_offsets")}
        if mask == "causal_bias":
            (bias,) = together.operands["mask"].biases
            alone["mask"] = masks.CausalMask() & masks.MaterializedMask(bias[b : b + 1])
        positions = {name: together.keywords[name][b : b + 1] for name in ("start_positions", "kv_lengths")}
        own_arguments = {**together.operands, **alone, **together.keywords, **positions}
        again, again_lse = mla.prefill(**own_arguments, return_lse=True, target="cuda")
        rows = slice(int(queries[b]), int(queries[b + 1]))
        assert torch.equal(again[rows], output[rows]) and torch.equal(again_lse[rows], lse[rows])


@pytest.mark.cuda
@pytest.mark.parametrize("case", [
    Case(dtypes="fp8", scale=0.15, lengths=((1500, 130), (0, 700), (63, 65))),
    Case(dtypes="fp8", v_transposed=True, page_size=1, softcap=12.0, sinks=True),
    Case(dtypes="fp8", v_scale="row", mask="causal_bias"),
    Case(dtypes="fp8+bf16_rope", mask="sink_window", v_scale=""),
    *(case for case in LONG_ROWS if case.dtypes.startswith("fp8")),
], ids=str)  # fmt: skip
def test_fp8_multiplied_as_it_is(case: Case, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where ptxas makes conversions and 16-bit products of it."""
    monkeypatch.setattr(prefill_sm80, "FP8_MMA_ARCHS", ("sm_*",))
    problem = build(case, device, seed)
    output, _ = check(problem)
    if case.v_mean:
        expected, _ = problem.expect()
        torch.testing.assert_close(output.double().nanmean(), expected.nanmean(), rtol=5e-3, atol=0.0)


def attention(
    q: torch.Tensor, k: torch.Tensor, rope: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [n, dv] and LSE [n] in float64 of queries [n, 192] that each have keys [n, m, ...] of their own."""
    keys = torch.cat((k, rope), -1).double()
    scores = (torch.einsum("nd,nmd->nm", q.double(), keys) * scale).masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[:, None]).exp().masked_fill(~visible, 0.0)
    return torch.einsum("nm,nmd->nd", weights, v.double()), lse


@pytest.mark.cuda
def test_more_than_65536_sequences(device: torch.device) -> None:
    batch, heads, most = 65_537, 3, 4
    q, k, v, rope = (
        torch.randn(*shape, device=device).bfloat16()
        for shape in (
            (batch, heads, 192),
            (batch * most, heads, 128),
            (batch * most, heads, 128),
            (batch * most, 1, 64),
        )
    )
    counts = torch.arange(batch, device=device, dtype=torch.int32) % (most + 1)
    offsets = torch.arange(batch + 1, device=device, dtype=torch.int32)
    output, lse = mla.prefill(
        q, k, v, rope, masks.NullMask(), offsets, offsets * most, 0.1, return_lse=True, target="cuda",
        start_positions=torch.zeros_like(counts), kv_lengths=counts,
    )  # fmt: skip
    visible = torch.arange(most, device=device) < counts[:, None]
    for h in range(heads):
        rows = [x.view(batch, most, *x.shape[1:])[:, :, min(h, x.shape[1] - 1)] for x in (k, rope, v)]
        expected, expected_lse = attention(q[:, h], *rows, visible, 0.1)
        assert_output(output[:, h], expected, "bf16")
        assert_lse(lse[:, h], expected_lse, "bf16")


@pytest.mark.cuda
def test_more_than_65535_query_tiles_of_one_sequence(device: torch.device) -> None:
    new, keys = 65_536 * 128 + 1, 70
    q = torch.randn(new, 1, 192, device=device, dtype=torch.bfloat16)
    k, v, rope = (torch.randn(keys, 1, width, device=device, dtype=torch.bfloat16) for width in (128, 128, 64))
    ends = [torch.tensor([0, n], device=device, dtype=torch.int32) for n in (new, keys)]
    zero = torch.zeros(1, device=device, dtype=torch.int32)
    output, lse = mla.prefill(
        q, k, v, rope, masks.CausalMask(), *ends, 0.1, return_lse=True, target="cuda", start_positions=zero,
        kv_lengths=ends[1][1:],
    )  # fmt: skip
    sample = torch.cat((torch.arange(300), torch.arange(new - 300, new), torch.randint(new, (1000,)))).to(device)
    visible = torch.arange(keys, device=device) <= sample[:, None]
    each = [x[None, :, 0].expand(len(sample), -1, -1) for x in (k, rope, v)]
    expected, expected_lse = attention(q[sample, 0], *each, visible, 0.1)
    assert_output(output[sample, 0], expected, "bf16")
    assert_lse(lse[sample, 0], expected_lse, "bf16")


@pytest.mark.cuda
@pytest.mark.parametrize("tile", [tile for tiles in prefill_sm80.TILES.values() for tile in tiles], ids=str)
@pytest.mark.parametrize("mask", ["causal", "sink_window", "causal_bias"])
def test_every_tile_and_its_half(
    tile: Tile, mask: str, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of smaller parts too, on whatever GPU is here; tall and short give the same bits."""
    dims = next(dims for dims, tiles in prefill_sm80.TILES.items() if tile in tiles)
    lengths = ((0, 0), (0, 700), (63, 65), (1500, 130), (127, 1))
    steep = {"scale": 0.9}  # maxima that grow from tile to tile
    for options in (
        steep,
        {"page_size": 1, "sinks": True, "softcap": 12.0},
        {"scale": -0.05, "dtypes": "fp16"},
        # The rope is rounded to bf16 with its scale, an error that grows with the softmax scale: at the usual one.
        {"dtypes": "fp8"},
        {"dtypes": "fp8+bf16_rope", "v_scale": "row", "v_transposed": True, "page_size": 1},
        {**steep, "dtypes": "fp16+fp8_rope"},
    ):
        problem = build(Case(lengths=lengths, dims=dims, mask=mask, heads=2, **options), device, seed)  # type: ignore[arg-type]
        results = []
        for used in (tile, tile.halved()):
            with monkeypatch.context() as patch:
                patch.setattr(Tile, "halved", lambda self, used=used: used)
                patch.setattr(prefill_sm80, "tile_of", lambda problem, arch, used=used: used)
                dispatch.forget()
                results.append(check(problem))
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(*results, strict=True))
