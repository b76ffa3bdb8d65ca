"""Every registered implementation, run over cases of its operation and compared with the oracle.

An implementation is tested by being registered: the parameters come from the registry. On a machine without its device
it has one skipped test that names the device; on a machine with it, an implementation that no case fits is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mla import dispatch, reference, registry
from mla.errors import UnsupportedError
from mla.gather import gather_latent, project_to_fp8
from mla.merge import merge_attn_states
from mla.plan import generic_flare_mla_prefill_ragged_paged_plan
from mla.problem import PREFILL_DTYPES, Problem
from mla.quantize import (
    quantize_per_block,
    quantize_per_head,
    quantize_per_tensor,
    quantize_per_token,
    quantize_with_scale,
)
from mla.registry_file import Implementation
from mla.store import store
from mla.target import device_arch, runs_on
from tests.support.matrix_cases import (
    GATHERS,
    LONG_ROWS,
    MERGES,
    PLANS,
    PREFILLS,
    PREFILLS_FULL,
    PROJECTIONS,
    QUANTIZATIONS,
    STORES,
    PlanCase,
)
from tests.support.paged import make_paged, offsets_of, slots_of
from tests.support.problems import DTYPES, Case, build, fetch, fp8_dtype
from tests.support.tolerance import assert_lse, assert_output, precision_of

TARGETS = {"reference": "cpu", "cuda": "cuda", "rocm": "rocm", "triton": "triton"}
FITTING: set[str] = set()  # ids of implementations that ran at least one case


def device_of(implementation: Implementation) -> torch.device | None:
    """Return the device on this machine that an implementation runs on."""
    devices = [torch.device("cpu")] + ([torch.device("cuda", 0)] if torch.cuda.is_available() else [])
    return next((device for device in reversed(devices) if runs_on(implementation.backend, device)), None)


def over(op: str, cases: list[Any], full: list[Any] | None = None) -> pytest.MarkDecorator:
    """Parametrise a test by every implementation of an op and by cases; `full` ones run only when asked for."""
    params = []
    for one in (one for one in registry.default() if one.op == op):
        device = device_of(one)
        marks = [getattr(pytest.mark, one.backend)] if one.backend in ("cuda", "rocm", "triton") else []
        if device is None:
            params.append(pytest.param(one, None, cases[0], id=one.id, marks=marks))
            continue
        if device.type == "cpu":
            marks = []
        params += [pytest.param(one, device, case, id=f"{one.id}-{case}", marks=marks) for case in cases]
        params += [
            pytest.param(one, device, case, id=f"{one.id}-full-{i}-{case}", marks=[*marks, pytest.mark.full_matrix])
            for i, case in enumerate(full or [])
        ]
    return pytest.mark.parametrize(("implementation", "device", "case"), params)


@pytest.fixture
def only(implementation: Implementation, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let the public functions run this implementation and no other; the value is the target to call them with."""

    def resolve(problem: Problem, target: object, device: torch.device) -> Callable[[Any], None]:
        _, faults = implementation.requires.compare(problem, device_arch(device))
        refusal = None if faults else implementation.load().check(problem, device_arch(device))
        if faults or refusal:
            raise UnsupportedError("; ".join([*faults, *([refusal] if refusal else [])]))
        FITTING.add(implementation.id)
        run: Callable[[Any], None] = implementation.load().prepare(problem, device)
        return run

    for module in ("dispatch", "plan", "gather", "store", "merge", "quantize"):
        monkeypatch.setattr(f"mla.{module}.resolve", resolve)
    dispatch.forget()
    yield TARGETS.get(implementation.backend, implementation.backend)
    dispatch.forget()


@pytest.fixture(autouse=True)
def _refusals_skip(request: pytest.FixtureRequest) -> None:
    if "case" in request.fixturenames:
        request.node.obj = skip_refusals(request.node.obj)


def skip_refusals(test: Callable[..., None]) -> Callable[..., None]:
    """Turn an implementation's refusal of a case into a skip that says why."""

    def run(*args: Any, **kwargs: Any) -> None:
        try:
            test(*args, **kwargs)
        except UnsupportedError as refusal:
            pytest.skip(f"refused: {refusal}")

    return run


@over("prefill", PREFILLS, PREFILLS_FULL)
def test_prefill(implementation: Implementation, device: torch.device, case: Case, only: str, seed: int) -> None:
    problem = build(case, device, seed)
    results = *problem.run(only), *problem.run(only), *problem.expect()
    output, lse, again, again_lse, expected, expected_lse = fetch(*results)
    assert_output(output, expected, precision_of(case.dtypes))
    assert_lse(lse, expected_lse, precision_of(case.dtypes))
    assert torch.equal(output.nan_to_num(), again.nan_to_num()) and torch.equal(
        lse.nan_to_num(), again_lse.nan_to_num()
    )


@over("prefill", LONG_ROWS)
def test_long_rows_keep_the_mean_of_their_values(
    implementation: Implementation, device: torch.device, case: Case, only: str, seed: int
) -> None:
    problem = build(case, device, seed)
    output, _ = problem.run(only)
    expected, _ = problem.expect()
    written = ~expected.isnan()
    torch.testing.assert_close(output.double()[written].mean(), expected[written].mean(), rtol=5e-3, atol=0.0)
    assert_output(output, expected, precision_of(case.dtypes))


@over("plan", PLANS)
def test_plan(implementation: Implementation, device: torch.device, case: PlanCase, only: str) -> None:
    data = make_paged(case.cached, case.new, case.P, device=device)
    tables = [torch.full(shape, -7, dtype=torch.int32, device=device) for shape in (
        (case.C, len(case.new) + 1), (case.C, len(case.new)), (case.C,), (1,)
    )]  # fmt: skip
    generic_flare_mla_prefill_ragged_paged_plan(
        data.input_row_offsets, data.cache, 0, case.N, *tables[:3], required_chunks=tables[3], target=only
    )
    *expected, required = reference.plan(case.cached, case.new, case.P, case.N, case.C)
    assert [table.tolist() for table in tables] == [*expected, [required]]


@over("gather", GATHERS)
@pytest.mark.parametrize("known_length", [True, False], ids=["host_length", "device_length"])
def test_gather(implementation: Implementation, device: torch.device, case: Any, known_length: bool, only: str) -> None:
    options, out_dtype = dict(case), DTYPES[dict(case).pop("out", "bf16")]
    options.pop("out", None)
    if options.pop("fp8", False):
        options["dtype"] = fp8_dtype(device)
    size = options.pop("size", 192)
    data = make_paged((70, 0, 129), (5, 64, 1), device=device, **options)
    cache = data.cache.layer(data.layer_idx)
    plan = reference.plan(data.cached, data.new, cache.page_size, size, 3)
    for rows, offsets, length in zip(*plan[:3], strict=True):
        tables = [torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, offsets)]
        buffer = torch.full((size, 512), -1.0, dtype=out_dtype, device=device)
        inflated = min(size, max(length, 0) + 3)
        given = inflated if known_length else torch.tensor([inflated], dtype=torch.int32, device=device)
        gather_latent(*tables, given, data.cache, data.layer_idx, buffer, target=only)
        # Slots of page padding are gathered as they lie; the builder poisons them with NaN.
        expected = reference.gather(*tables, cache)
        actual = buffer[: expected.shape[0]].double()
        assert torch.equal(actual.isnan(), expected.isnan())
        if cache.scales is None:
            assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
        else:
            torch.testing.assert_close(actual.nan_to_num(), expected.nan_to_num(), rtol=2**-8, atol=1e-6)
        assert (buffer[expected.shape[0] : inflated] == 0).all()
        assert (buffer[inflated:] == -1).all()


@over("store", STORES)
def test_store(implementation: Implementation, device: torch.device, case: Any, only: str, seed: int) -> None:
    options = dict(case)
    dtype = DTYPES[options.pop("rows", "bf16")]
    if options.pop("fp8", False):
        options["dtype"] = fp8_dtype(device)
    data = make_paged((70, 0, 63), (5, 64, 1), device=device, poison=0.0, **options)
    cache = data.cache.layer(data.layer_idx)
    before = cache.latent.float().clone()
    rows = torch.randn(sum(data.new), 576, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)
    store(data.cache, data.layer_idx, data.input_row_offsets, rows[:, :512], rows[:, 512:], target=only)
    first = offsets_of(data.new)
    touched = torch.zeros(cache.latent.shape[:2], dtype=torch.bool)
    for b, new in enumerate(data.new):
        positions = torch.arange(data.cached[b], data.cached[b] + new, device=device)
        for slot in slots_of(data, b, data.cached[b], data.cached[b] + new):
            touched[slot] = True
        stored = torch.cat(reference.cache_rows(cache, b, positions), -1)
        wanted = rows[first[b] : first[b] + new].double()
        if cache.scales is None:
            assert torch.equal(stored, wanted)
        else:  # e4m3 has 3 bits behind the point; the smallest step is 2^-9 of a scale of amax / 448
            atol = 2**-9 * wanted.abs().max().item() / 240
            torch.testing.assert_close(stored, wanted, rtol=2**-4, atol=atol)
    assert torch.equal(cache.latent.float()[~touched.to(device)], before[~touched.to(device)])


@over("project", PROJECTIONS)
def test_project(implementation: Implementation, device: torch.device, case: Any, only: str, seed: int) -> None:
    rows, columns, gap, scales = case
    random = torch.Generator().manual_seed(seed)
    a, b = (
        (torch.randn(n, 512 + gap, generator=random) / by).bfloat16().to(device)[:, gap:]
        for n, by in ((rows, 1.0), (columns, 512**0.5))
    )
    around = torch.full((rows + 2, columns + 32), 1.0, device=device).to(fp8_dtype(device))
    scale = (torch.rand(scales, generator=random) * 0.02 + 0.005).to(device)  # some saturate
    project_to_fp8(around[1:-1, 16:-16], a, b, scale, only)
    each = scale.double().repeat_interleave(-(-rows // scales))[:rows, None]
    expected = (a.double() @ b.double().T / each).clamp(-448, 448)
    torch.testing.assert_close(around[1:-1, 16:-16].double(), expected, rtol=2**-4, atol=2**-9)
    around[1:-1, 16:-16] = 1.0
    assert (around.float() == 1.0).all(), "nothing else is written"


@over("merge", MERGES)
def test_merge(implementation: Implementation, device: torch.device, case: Any, only: str, seed: int) -> None:
    dtype, out_dtype, v_dim, layout, alias = case
    random = torch.Generator().manual_seed(seed)
    parts = [torch.randn(77, 5, v_dim, generator=random).to(DTYPES[dtype]).to(device) for _ in range(2)]
    lses = [(torch.randn(77, 5, generator=random) * 3).to(device) for _ in range(2)]
    for i, (empty_first, empty_second) in enumerate(itertools.product((0.0, -torch.inf, torch.inf), repeat=2)):
        for part, lse, value in zip(parts, lses, (empty_first, empty_second), strict=True):
            if value:
                lse[i], part[i] = value, torch.nan
    expected, expected_lse = reference.merge(parts[0], lses[0], parts[1], lses[1])
    wide = torch.empty(77, 5, v_dim + 64, dtype=DTYPES[dtype], device=device)
    wide[..., :v_dim] = parts[1]
    parts[1] = wide[..., :v_dim]
    output = (
        parts[alias] if alias >= 0 else torch.full((77, 5, v_dim), torch.nan, dtype=DTYPES[out_dtype], device=device)
    )
    given = [lse.T.contiguous() if layout == "HT" else lse for lse in lses]
    merge_attn_states(output, parts[0], given[0], parts[1], given[1], given[0], lse_layout=layout, target=only)
    assert_output(output, expected, out_dtype)
    assert_lse(given[0].T if layout == "HT" else given[0], expected_lse, out_dtype)


@over("quantize", QUANTIZATIONS)
def test_quantize(implementation: Implementation, device: torch.device, case: Any, only: str, seed: int) -> None:
    name, shared, (tokens, heads, width), shift = case
    largest = torch.finfo(fp8_dtype(device)).max
    values = torch.randn(tokens, heads + 1, width + 8, generator=torch.Generator().manual_seed(seed))
    values *= torch.logspace(-6, 3, tokens)[:, None, None] if name != "fp16" else 1.0
    values[1], values[-1, -1] = 0.0, 1e-41  # zeros, and what a scale of normal size makes zero
    values = values.to(DTYPES[name])
    x = values.to(device)[:, 1:, shift : shift + width]
    expected = values[:, 1:, shift : shift + width].float()
    out = torch.full((tokens, heads, width + 16), 1.0, device=device).to(fp8_dtype(device))[..., :width]
    given: dict[str, Any] = {"dtype": fp8_dtype(device), "out": out, "target": only}
    if shared == "token":
        scale, groups = quantize_per_token(x, **given)[1].unsqueeze(2), expected.reshape(tokens, -1)[:, None, None]
    elif shared == "head":
        scale, groups = quantize_per_head(x, **given)[1][:, None], expected.transpose(0, 1).reshape(1, heads, 1, -1)
    elif shared == "tensor":
        scale, groups = quantize_per_tensor(x, **given)[1][:, None], expected.reshape(1, 1, 1, -1)
    elif shared == "given":
        scale = torch.tensor([1e-3, 1.0, 2e-37, 3e30, 0.7], device=device)
        quantize_with_scale(x, scale, **given)
        scale, groups = scale[:, None], scale.cpu()[:, None, None] * largest
    else:
        blocks = -(-width // shared)
        scale = quantize_per_block(x, shared, **given)[1]
        groups = torch.nn.functional.pad(expected, (0, blocks * shared - width)).view(tokens, heads, blocks, shared)
    wanted = (groups.abs().amax(-1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    assert torch.equal(scale.cpu().expand(wanted.shape), wanted) or shared == "given"
    each = scale.cpu().repeat_interleave(shared, -1)[..., :width] if isinstance(shared, int) else scale.cpu()
    stored = (expected / each).clamp(-largest, largest).to(out.dtype)
    assert torch.equal(out.cpu().view(torch.uint8), stored.view(torch.uint8))


def test_no_implementation_is_left_out() -> None:
    ran = {one.id for one in registry.default() if device_of(one) is not None}
    if not FITTING:
        pytest.skip("the matrix itself was not run in this session")
    assert ran <= FITTING, f"no case ran on {sorted(ran - FITTING)}"


def test_the_cases_know_every_dtype_row() -> None:
    assert {case.dtypes for case in PREFILLS} == set(PREFILL_DTYPES)
