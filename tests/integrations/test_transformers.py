"""Tiny random DeepSeek models with the library's attention, held against transformers' eager attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="no transformers: pip install 'mla-prefill[transformers]'")

from mla.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError  # noqa: E402
from mla.integrations.transformers import NAME, attention, attention_forward, register  # noqa: E402
from tests.integrations.deepseek import prompt, tiny_model  # noqa: E402

DEVICES = [
    pytest.param("cpu", torch.float32, id="cpu-fp32"),
    pytest.param("cpu", torch.bfloat16, id="cpu-bf16"),
    pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=pytest.mark.cuda),
]
#: Of a model whose best token beats the second, in the prompts below, by six times what bfloat16 moves a logit.
SEED = 55
NEW_TOKENS = 16

register()

Forward = Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _left_padding(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    return mask


def _plain(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return model(ids).logits, torch.ones_like(ids, dtype=torch.bool)


def _padded(places: slice | list[int]) -> Forward:
    def forward(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones_like(ids)
        mask[0, places] = 0
        return model(ids, attention_mask=mask).logits, mask.bool()

    return forward


def _cached(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill in two parts, of which the second finds the first in the cache; then one token more."""
    mask, cache, parts = _left_padding(ids), transformers.DynamicCache(config=model.config), []
    for start, end in ((0, 20), (20, 36), (36, 37)):
        out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
        parts.append(out.logits)
    return torch.cat(parts, 1), mask.bool()


def _packed(*lengths: int, offsets: bool = False) -> Forward:
    def forward(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = ids[:1] if offsets else ids
        counts = (*lengths, ids.shape[1] - sum(lengths))
        kwargs: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in counts])[None].to(ids.device)}
        if offsets and model.config._attn_implementation == NAME:  # eager reads the positions alone
            cumulative = torch.tensor([0, *counts]).cumsum(0).to(ids.device)
            kwargs |= {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": max(counts)}
        return model(ids, use_cache=False, **kwargs).logits, torch.ones_like(ids, dtype=torch.bool)

    return forward


def _four_d(additive: bool) -> Forward:
    """A mask of the caller's: a prefix of 5 tokens that all see, causal after it."""

    def forward(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n, dtype = ids.shape[1], model.dtype
        at = torch.arange(n, device=ids.device)
        visible = ((at[None] <= at[:, None]) | (at[None] < 5)).expand(ids.shape[0], 1, n, n)
        bias = torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)
        boolean = not additive and model.config._attn_implementation == NAME
        return model(ids, attention_mask=visible if boolean else bias).logits, torch.ones_like(ids, dtype=torch.bool)

    return forward


FORWARDS: dict[str, Forward] = {
    "plain": _plain,
    "left padding": _padded(slice(9)),
    "right padding": _padded(slice(30, 37)),
    "holes": _padded([3, 4, 20]),
    "cached prefix": _cached,
    "packed": _packed(5, 1, 20),
    "packed, by cu_seq_lens": _packed(5, 1, 20, offsets=True),
    "4-D bool": _four_d(additive=False),
    "4-D additive": _four_d(additive=True),
}


def logits(model: Any, implementation: str, forward: Forward, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of tokens that are not padding."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        out, real = forward(model, ids)
    return out[real].double()


@pytest.mark.parametrize(
    ("kind", "forward"), [*(("v3", name) for name in FORWARDS), ("v2", "left padding"), ("v2", "cached prefix")]
)
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_logits(kind: str, device: str, dtype: torch.dtype, forward: str) -> None:
    model, ids = tiny_model(kind, dtype, device, SEED), prompt(2, 37, device)
    assert abs(model.model.layers[0].self_attn.scaling * 192**0.5 - 1) > 0.2, "mscale takes part"
    ours = logits(model, NAME, FORWARDS[forward], ids)
    eager = logits(model, "eager", FORWARDS[forward], ids)
    exact = eager if dtype == torch.float32 else logits(model.float(), "eager", FORWARDS[forward], ids)
    ours_off, eager_off = ((x - exact).norm() / exact.norm() for x in (ours, eager))
    assert ours_off <= max(1e-5, 1.5 * eager_off), (ours_off, eager_off)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_greedy_tokens(kind: str, device: str, dtype: torch.dtype) -> None:
    model, ids = tiny_model(kind, dtype, device, SEED), prompt(2, 37, device)
    tokens = [greedy(model, implementation, ids) for implementation in ("eager", NAME)]
    assert torch.equal(*tokens)
    assert tokens[0].unique().numel() > 4, "the same few tokens over and over prove little"


def greedy(model: Any, implementation: str, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Generate from a prompt of which the first sequence is padded; return the new tokens."""
    model.set_attn_implementation(implementation)
    out = model.generate(ids, attention_mask=_left_padding(ids), max_new_tokens=NEW_TOKENS, do_sample=False, **kwargs)
    return out[:, ids.shape[1] :]


def test_tokens_depend_on_attention() -> None:
    """What the tests above would say of a wrong scale."""
    model, ids = tiny_model("v3", torch.float32, "cpu", SEED), prompt(2, 37, "cpu")
    right = logits(model, NAME, _plain, ids)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.01
    wrong = logits(model, NAME, _plain, ids)
    assert (wrong - right).norm() / right.norm() > 1e-4


def test_the_key_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor, *args: Any, **kwargs: Any):
        seen.extend((k, k_rope))
        return torch.empty(*q.shape[:2], v.shape[2])

    monkeypatch.setattr(attention, "prefill", prefill)
    module = tiny_model("v3", torch.float32, "cpu", SEED).model.layers[0].self_attn
    query, key, value = (torch.randn(2, 4, 5, width) for width in (192, 192, 128))
    attention_forward(module, query, key, value, None, scaling=1.0)
    for view in seen:
        assert view.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    k, k_rope = seen
    assert torch.equal(k[4 * 5 + 3, 2], key[1, 2, 3, :128])
    assert torch.equal(k_rope[4 * 5 + 3, 0], key[1, 0, 3, 128:])


def _llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=192,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("v3", torch.float32, "cpu", SEED, attention_dropout=0.1), prompt(2, 12, "cpu")
    model.set_attn_implementation(NAME)
    with pytest.raises(ArgumentError, match="requires a gradient"):
        model(ids)
    with torch.no_grad():
        with pytest.raises(UnsupportedError, match=r"dropout must be 0, got 0\.1"):
            model.train()(ids)
        model.eval()
        with pytest.raises(UnsupportedError, match="attention weights are never formed"):
            model(ids, output_attentions=True)
        with pytest.raises(UnsupportedError, match="StaticCache"):
            model(ids, past_key_values=transformers.StaticCache(config=model.config, max_cache_len=32))
        with pytest.raises(ShapeError, match=r"attention_mask must have shape \(\*, \*, 12, 12\)"):
            model(ids, attention_mask=torch.ones(2, 1, 12, 11, dtype=torch.bool))
        with pytest.raises(DTypeError, match=r"bool or additive, got torch\.int64"):
            model(ids, attention_mask=torch.ones(2, 1, 12, 12, dtype=torch.int64))
        with pytest.raises(ArgumentError, match="packed into one row, got a batch of 2"):
            model(ids, use_cache=False, cu_seq_lens_q=torch.tensor([0, 5, 12]), cu_seq_lens_k=torch.tensor([0, 5, 12]))
        with pytest.raises(UnsupportedError, match="LlamaAttention is no MLA attention"):
            llama = _llama()
            llama.set_attn_implementation(NAME)
            llama(ids)
        small = tiny_model("v3", torch.float32, "cpu", SEED, qk_nope_head_dim=64, v_head_dim=64)
        small.set_attn_implementation(NAME)
        with pytest.raises(ShapeError, match=r"one of \(192, 128\), \(256, 256\)"):
            small(ids)
    module = model.model.layers[0].self_attn
    query, key, value = (torch.randn(1, 4, 5, width) for width in (192, 192, 128))
    for kwargs in ({"sliding_window": 4}, {"softcap": 30.0}, {"indices": torch.zeros(1)}, {"is_causal": False}):
        with pytest.raises(UnsupportedError):
            attention_forward(module, query, key, value, None, **kwargs)
