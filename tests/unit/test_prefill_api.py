"""The public prefill functions: five overloads, keywords, what is refused and what does not change the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla
from mla import ArgumentError, DeviceError, DTypeError, MlaError, ShapeError, dispatch, masks
from mla._prefill_call import Call
from mla._prefill_check import describe
from tests.support.problems import Case, PrefillProblem, build
from tests.support.tolerance import assert_lse, assert_output, precision_of

TAIL = ("mask", "valid_length", "cache_row_offsets", "scale")


def positional(problem: PrefillProblem) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the overload that a problem belongs to, behind `output`."""
    operands, keywords = problem.operands, dict(problem.keywords)
    if "q_rope" in keywords:
        front = [
            operands["q"],
            keywords.pop("q_rope"),
            keywords.pop("q_scale"),
            operands["k"],
            keywords.pop("k_scales"),
        ]
        front += [operands["v"], operands["k_rope"]]
    else:
        front = [operands[name] for name in ("q", "k", "v", "k_rope")]
        if "k_rope_scales" in keywords:
            front.append(keywords.pop("k_rope_scales"))
    return front + [operands[name] for name in TAIL], keywords


OVERLOADS = {
    "paged": Case(),
    "tensor": Case(rope="batched"),
    "tensor_scaled": Case(rope="ragged", dtypes="bf16+fp8_rope"),
    "split_tensor": Case(rope="batched", dtypes="fp8+bf16_rope"),
    "split_paged": Case(dtypes="fp8+bf16_rope", prescaled=False),
}
NAMES = {
    8: ("q", "k", "v", "k_rope", "mask_functor", "valid_length", "cache_row_offsets", "scale"),
    9: ("q", "k", "v", "k_rope", "k_rope_scales", "mask_functor", "valid_length", "cache_row_offsets", "scale"),
    11: ("q_nope", "q_rope", "q_scale", "k", "k_scales", "v", "k_rope", "mask_functor", "valid_length",
         "cache_row_offsets", "scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERLOADS)
@pytest.mark.parametrize("by_position", [99, 6, 4, 0])
def test_overloads(name: str, by_position: int) -> None:
    problem = build(OVERLOADS[name])
    operands, keywords = positional(problem)
    outputs = problem.outputs()
    named = dict(list(zip(NAMES[len(operands)], operands, strict=True))[by_position:])
    mla.flare_mla_prefill(outputs.pop("output"), *operands[:by_position], **named, **keywords, **outputs, target="cpu")
    whole, lse = problem.run("cpu")
    again = problem.outputs()["output"]
    mla.flare_mla_prefill(again, *operands, **keywords, target="cpu")
    assert torch.equal(again.nan_to_num(), whole.nan_to_num())
    assert torch.equal(outputs["lse"].nan_to_num(), lse.nan_to_num())
    assert_output(whole, problem.expect()[0], precision_of(problem.case.dtypes))


def test_prefill_allocates_what_it_returns() -> None:
    problem = build(Case(dtypes="fp8", spare_rows=(0, 0)))
    output = mla.prefill(**problem.operands, **problem.keywords, target="cpu")
    assert isinstance(output, torch.Tensor) and output.dtype == torch.bfloat16
    output, lse = mla.prefill(**problem.operands, **problem.keywords, return_lse=True, lse_layout="HT", target="cpu")
    assert lse.shape == (4, output.shape[0]) and lse.dtype == torch.float32
    assert_output(output, problem.expect()[0], "fp8")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64])
@pytest.mark.parametrize("rope", ["paged", "batched"])
def test_index_dtypes_and_strides(dtype: torch.dtype, rope: str) -> None:
    expected = build(Case(rope=rope, chunk=(0, 192))).run("cpu")
    problem = build(Case(rope=rope, chunk=(0, 192), index_dtype=dtype))
    for place in (problem.operands, problem.keywords):
        for name, value in place.items():
            if isinstance(value, torch.Tensor) and value.dtype == dtype:
                place[name] = value.repeat_interleave(2)[::2] if dtype != torch.uint32 else value
    for a, b in zip(problem.run("cpu"), expected, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


CACHED = st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 200])
NEW = st.sampled_from([0, 1, 2, 33, 64, 65])


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(CACHED, NEW), min_size=1, max_size=5),
    rope=st.sampled_from(["paged", "batched", "ragged"]),
    page_size=st.sampled_from([1, 16, 64]),
    mask=st.sampled_from(["none", "causal", "sliding", "documents", "causal_bias"]),
    dtypes=st.sampled_from(["fp32", "bf16", "fp8", "fp8+bf16_rope"]),
    strided=st.booleans(),
    chunk=st.sampled_from([None, (0, 64), (16, 48), (64, 200)]),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_any_batch(seed: int, **fields: Any) -> None:
    case = Case(**{**fields, "lengths": tuple(fields["lengths"])}, sinks=seed % 2 == 0, heads=1 + seed % 3)
    problem = build(case, seed=seed)
    output, lse = problem.run("cpu")
    expected, expected_lse = problem.expect()
    assert_output(output, expected, precision_of(case.dtypes))
    assert_lse(lse, expected_lse, precision_of(case.dtypes))


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    lengths = ((70, 300), (0, 5), (600, 40))
    problem = build(Case(lengths=lengths, rope="ragged", overrides=False, spare_rows=(0, 0)))
    output, lse = problem.run("cpu")
    rows, keys = (problem.operands[name].tolist() for name in ("valid_length", "cache_row_offsets"))
    for b in range(3):
        alone = {name: problem.operands[name][keys[b] : keys[b + 1]] for name in ("k", "v", "k_rope")}
        alone["q"] = problem.operands["q"][rows[b] : rows[b + 1]]
        ends = {"valid_length": torch.tensor([0, rows[b + 1] - rows[b]]),
                "cache_row_offsets": torch.tensor([0, keys[b + 1] - keys[b]])}  # fmt: skip
        again, again_lse = mla.prefill(**{**problem.operands, **alone, **ends}, return_lse=True, target="cpu")
        assert torch.equal(again, output[rows[b] : rows[b + 1]])
        assert torch.equal(again_lse, lse[rows[b] : rows[b + 1]])


def test_the_number_of_threads_changes_nothing() -> None:
    problem, threads = build(Case(lengths=((500, 300), (0, 5)), heads=6)), torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            runs.append(problem.run("cpu"))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("hint", [1, 7, 10**6])
def test_the_hint_changes_nothing(hint: int) -> None:
    problem = build(Case())
    for a, b in zip(problem.run("cpu", q_max_seq_len=hint), problem.run("cpu"), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_one_number_serves_as_every_scale() -> None:
    problem = build(Case(dtypes="fp8", v_scale="number"))
    rows = {"q_scale": problem.operands["q"].shape[0], "k_scales": problem.operands["k"].shape[0]}
    written = {name: torch.full((count, 1), 0.5) for name, count in rows.items()}
    problem.keywords.update(written, v_scale=torch.full((4,), 0.5))
    expected, _ = problem.run("cpu")
    for value in (0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]])):
        problem.keywords.update(q_scale=value, k_scales=value, v_scale=value)
        assert torch.equal(problem.run("cpu")[0].nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_the_alignment_of_fp8_values_is_that_of_their_contiguous_runs(transposed: bool) -> None:
    problem = build(Case(dtypes="fp8", v_transposed=transposed))
    call = Call(**problem.outputs(), k_rope_scales=None, q_rope=None, **problem.operands, **problem.keywords)
    assert ("v_transposed" in describe(call).features, describe(call).alignment) == (transposed, 16)


@pytest.mark.parametrize(("width", "granularity", "split"), [(64, 64, False), (100, 64, True), (576, 128, False)])
def test_a_rope_in_two_blocks_of_scales_is_a_feature(width: int, granularity: int, split: bool) -> None:
    case = Case(dtypes="bf16+fp8_rope", rope="batched", rope_width=width, granularity=granularity)
    problem = build(case)
    call = Call(**problem.outputs(), q_rope=None, **problem.operands, **problem.keywords)
    assert ("split_rope_scales" in describe(call).features) == split


def test_repeated_calls_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build(Case())
    first, _ = problem.run("cpu")

    def describe(call: object) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr("mla._prefill_call.describe", describe)
    operands, keywords = positional(problem)
    outputs = problem.outputs()
    with pytest.raises(AssertionError, match="checked again"):
        mla.flare_mla_prefill(outputs["output"][..., :64], *operands, target="cpu", **keywords)
    again, _ = problem.run("cpu")
    assert torch.equal(first.nan_to_num(), again.nan_to_num())
    dispatch.forget()


def _set(**changes: Any) -> Callable[[PrefillProblem], None]:
    def change(problem: PrefillProblem) -> None:
        for name, value in changes.items():
            place = problem.operands if name in problem.operands else problem.keywords
            place[name] = value(place.get(name)) if callable(value) and not isinstance(value, masks.Mask) else value

    return change


EDGE = torch.zeros(3, dtype=torch.int32)
SCALED = Case(rope="batched", dtypes="bf16+fp8_rope")


def across(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with the first dimension contiguous."""
    return tensor.permute(1, 2, 0).contiguous().permute(2, 0, 1)


REFUSALS: dict[str, tuple[Case, Callable[[PrefillProblem], None], type[Exception], str]] = {
    "heads disagree": (Case(), _set(k=lambda k: k[:, :3]), ShapeError, "k must have shape (*, 4, 128), got"),
    "rows of v": (Case(), _set(v=lambda v: v[:-1]), ShapeError, "v must have shape"),
    "k is a list": (Case(), _set(k=[1, 2]), DTypeError, "k must be a torch.Tensor, got list"),
    "dtype of k": (Case(), _set(k=lambda k: k.half()), DTypeError, "k must have the dtype of q"),
    "rank of q": (Case(), _set(q=lambda q: q[0]), ShapeError, "q must be 3-D"),
    "strides of q": (Case(), _set(q=across), ShapeError, "contiguous"),
    "strides of v": (Case(), _set(v=across), ShapeError, "v must be"),
    "offsets too short": (
        Case(),
        _set(cache_row_offsets=EDGE),
        ShapeError,
        "cache_row_offsets must have length 4, got 3",
    ),
    "batch of the cache": (
        Case(),
        _set(valid_length=EDGE, cache_row_offsets=EDGE),
        ShapeError,
        "k_rope has 3 sequences",
    ),
    "offsets fall": (Case(), _set(valid_length=lambda x: x.flip(0)), MlaError, "must never fall"),
    "offsets are floats": (Case(), _set(valid_length=lambda x: x.float()), DTypeError, "valid_length must be int32"),
    "k too short": (Case(), _set(cache_row_offsets=lambda x: x + 1), ShapeError, "but k has"),
    "mask is a word": (Case(), _set(mask="causal"), DTypeError, "CausalMask()"),
    "scale is a tensor": (Case(), _set(scale=lambda x: torch.tensor(x)), DTypeError, "scale must be a Python float"),
    "scale is infinite": (Case(), _set(scale=float("inf")), ArgumentError, "scale must be a finite float32 number"),
    "scale is huge": (Case(), _set(scale=10**400), ArgumentError, "scale must be a finite float32 number"),
    "softcap is negative": (Case(), _set(softcap=-1.0), ArgumentError, "softcap must be a finite float32 number >= 0"),
    "q_scale is NaN": (Case(dtypes="fp8"), _set(q_scale=float("nan")), ArgumentError, "q_scale must be a finite"),
    "k_scales are huge": (Case(dtypes="fp8"), _set(k_scales=1e300), ArgumentError, "k_scales must be a finite"),
    "v_scale is infinite": (Case(dtypes="fp8"), _set(v_scale=float("inf")), ArgumentError, "v_scale must be a finite"),
    "a sparse scale": (
        Case(dtypes="fp8"),
        _set(k_scales=lambda x: x.to_sparse()),
        ShapeError,
        "k_scales must be a dense",
    ),
    "gradients of scales": (
        Case(dtypes="fp8"),
        _set(k_scales=lambda x: x.clone().requires_grad_()),
        ArgumentError,
        "k_scales requires a gradient",
    ),
    "gradients of the rope's scales": (
        SCALED,
        _set(k_rope_scales=lambda x: x.clone().requires_grad_()),
        ArgumentError,
        "k_rope_scales requires a gradient",
    ),
    "rope_prescaled is no bool": (
        Case(dtypes="fp8+bf16_rope"),
        _set(rope_prescaled=None),
        DTypeError,
        "rope_prescaled must be a bool, got NoneType",
    ),
    "hint is zero": (Case(), _set(q_max_seq_len=0), ArgumentError, "q_max_seq_len"),
    "a gradient": (Case(), _set(q=lambda q: q.clone().requires_grad_()), ArgumentError, "q requires a gradient"),
    "sinks": (Case(), _set(sinks=torch.zeros(3)), ShapeError, "sinks must have shape (4,), got (3,)"),
    "cache_offsets alone": (
        Case(rope="ragged", overrides=False),
        _set(cache_offsets=EDGE),
        ArgumentError,
        "start_positions is missing",
    ),
    "scales of a plain rope": (
        Case(rope="batched"),
        _set(k_rope_scales=torch.ones(3, 201, 1, 1)),
        ArgumentError,
        "belongs to an fp8 k_rope",
    ),
    "rope without scales": (SCALED, _set(k_rope_scales=None), ArgumentError, "k_rope_scales is missing"),
    "shape of scales": (SCALED, _set(k_rope_scales=torch.ones(3, 1, 1, 1)), ShapeError, "(3, 201, 1, 1)"),
    "scales of bf16": (Case(), _set(q_scale=1.0), ArgumentError, "q_scale belongs to fp8 inputs"),
    "shape of q_scale": (
        Case(dtypes="fp8"),
        _set(q_scale=torch.ones(5, 1)),
        ShapeError,
        "q_scale must have shape (205, 1)",
    ),
    "bf16 rope of fp8 q": (
        Case(dtypes="fp8", rope="ragged"),
        _set(k_rope=lambda x: x.to(torch.bfloat16)),
        DTypeError,
        "q_nope and q_rope apart",
    ),
    "split bf16": (
        Case(rope="ragged"),
        _set(q=lambda q: q[..., :128], q_rope=lambda _: torch.zeros(205, 4, 64)),
        DTypeError,
        "fp8",
    ),
    "q is sparse": (Case(), _set(q=lambda q: q.to_sparse()), ShapeError, "q must be a dense tensor"),
    "softcap is no number": (Case(), _set(softcap=None), DTypeError, "softcap must be a Python float"),
    "hint is no int": (Case(), _set(q_max_seq_len=2.5), ArgumentError, "q_max_seq_len must be an int"),
    "cache_offsets negative": (
        Case(),
        _set(cache_offsets=torch.tensor([0, -1, 0])),
        ArgumentError,
        "cache_offsets must not be negative",
    ),
    "kv_lengths past the page table": (
        Case(),
        _set(kv_lengths=torch.tensor([107, 129, 4000]), cache_offsets=torch.tensor([0, 0, 3900])),
        ShapeError,
        "page table too narrow: sequence 2 has 4000 tokens",
    ),
    "kv_lengths past the rope": (
        Case(rope="batched"),
        _set(k_rope=lambda rope: rope[:, :1], kv_lengths=torch.tensor([107, 129, 201])),
        ShapeError,
        "kv_lengths names keys up to position 201, but k_rope has shape (3, 1, 1",
    ),
    "mask of another batch": (
        Case(),
        _set(mask=masks.CausalPaddingMask(torch.tensor([1, 2]))),
        ShapeError,
        "indexed by b has 2 elements",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    case, change, error, words = REFUSALS[name]
    problem = build(case)
    outputs = problem.outputs()
    change(problem)
    with pytest.raises(error) as caught:
        mla.prefill(**problem.operands, **problem.keywords, **outputs, target="cpu")
    assert words in str(caught.value)
    assert outputs["output"].isnan().all(), "something was written before the refusal"


@pytest.mark.parametrize(
    ("outputs", "error", "words"),
    [
        ({"lse": torch.empty(4, 205)}, ShapeError, "lse must have shape (205, 4), got (4, 205)"),
        ({"lse": torch.empty(205, 4), "lse_layout": "HT"}, ShapeError, "lse must have shape (4, 205)"),
        ({"lse_layout": "TB"}, ArgumentError, "lse_layout must be 'TH' or 'HT'"),
        ({"output": torch.empty(205, 4, 128, dtype=torch.float16)}, DTypeError, "output must be bfloat16, float32"),
        (
            {"output": torch.empty(204, 4, 128, dtype=torch.bfloat16)},
            ShapeError,
            "output must have shape (205, 4, 128)",
        ),
        ({"workspace": torch.empty(8)}, DTypeError, "workspace must be uint8"),
        (
            {"output": torch.empty(1, 4, 128, dtype=torch.bfloat16).expand(205, 4, 128)},
            ShapeError,
            "output is written, but its elements share memory",
        ),
        ({"lse": torch.empty(1, 4).expand(205, 4)}, ShapeError, "lse is written, but its elements share memory"),
        ({"target": "cdua"}, ValueError, "cuda"),
        ({"target": "cuda"}, DeviceError, "cpu"),
        ({"stream": 7}, ArgumentError, "no streams"),
    ],
)
def test_refusals_of_outputs(outputs: dict[str, Any], error: type[Exception], words: str) -> None:
    problem = build(Case())
    with pytest.raises(error) as caught:
        mla.prefill(**problem.operands, **{"target": "cpu", **outputs})
    assert words in str(caught.value)


def test_a_collection_is_not_a_layer() -> None:
    problem = build(Case())
    assert problem.paged is not None
    problem.operands["k_rope"] = problem.paged.cache
    with pytest.raises(DTypeError, match=r"\.layer\(i\)"):
        problem.run("cpu")


def test_inference_mode_takes_parameters() -> None:
    problem = build(Case())
    expected, _ = problem.run("cpu")
    problem.operands["q"] = problem.operands["q"].clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(problem.run("cpu")[0].nan_to_num(), expected.nan_to_num())


def test_a_wrong_keyword_is_told_of_the_function_that_was_called() -> None:
    problem = build(Case())
    operands, keywords = positional(problem)
    with pytest.raises(TypeError, match=r"^flare_mla_prefill\(\) got an unexpected keyword argument 'softcp'"):
        mla.flare_mla_prefill(problem.outputs()["output"], *operands, **keywords, softcp=1.0)
    with pytest.raises(TypeError, match=r"^prefill\(\) got an unexpected keyword argument 'softcp'"):
        mla.prefill(**problem.operands, **problem.keywords, softcp=1.0)  # type: ignore[call-arg]
    split, keywords = positional(build(Case(dtypes="fp8+bf16_rope")))
    with pytest.raises(TypeError, match=r"^flare_mla_prefill\(\) got multiple values for argument 'q_scale'"):
        mla.flare_mla_prefill(problem.outputs()["output"], *split, **keywords, q_scale=1.0)


def test_a_chunk_past_the_end_of_a_tensor_rope_has_no_keys() -> None:
    problem = build(Case(rope="batched"))
    length = problem.operands["k_rope"].shape[1]
    problem.keywords.update(
        kv_lengths=torch.full((3,), length), cache_offsets=torch.full((3,), length + 5), start_positions=EDGE
    )
    rows = slice(*problem.operands["valid_length"][[0, -1]].tolist())
    assert not problem.run("cpu")[0][rows].any()


def test_scales_of_the_rope_by_name() -> None:
    problem = build(SCALED)
    expected, _ = problem.run("cpu")
    operands, keywords = positional(problem)
    at = next(i for i, value in enumerate(operands) if isinstance(value, masks.Mask)) - 1
    output = problem.outputs()["output"]
    rest = operands[:at] + operands[at + 1 :]
    mla.flare_mla_prefill(output, *rest, k_rope_scales=operands[at], **keywords, target="cpu")
    assert torch.equal(output.nan_to_num(), expected.nan_to_num())


def test_an_unknown_form_names_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"which is none of \(output, q, k, v, k_rope, mask_functor"):
        mla.flare_mla_prefill(torch.empty(1, 1, 128), torch.empty(1, 1, 192))
    with pytest.raises(DTypeError, match=r"CausalMask\(\)"):
        mla.flare_mla_prefill(*[torch.empty(1, 1, 128)] * 5, "causal", EDGE, EDGE, 1.0)


def test_pages_out_of_range() -> None:
    problem = build(Case())
    assert problem.paged is not None
    cache = problem.operands["k_rope"]
    cache.page_table[0, 0] = 10**6
    with pytest.raises(MlaError, match="1000000"):
        problem.run("cpu")
