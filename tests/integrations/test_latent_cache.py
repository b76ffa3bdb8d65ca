"""Past tokens of a DeepSeek model in the library's pages: logits and tokens as with transformers' own cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="no transformers: pip install 'mla-prefill[transformers]'")

from mla.errors import ArgumentError, BufferOverflowError, ShapeError, UnsupportedError  # noqa: E402
from mla.integrations.transformers import NAME, LatentCache, use_latent_cache  # noqa: E402
from tests.integrations.deepseek import prompt, tiny_model  # noqa: E402
from tests.integrations.test_transformers import DEVICES, SEED, greedy  # noqa: E402


def _cache(model: Any, **changes: Any) -> LatentCache:
    arguments = {"batch_size": 2, "max_length": 64, "page_size": 16, "dtype": model.dtype, "device": model.device}
    return LatentCache(model.config, **(arguments | changes))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_greedy_tokens(kind: str, device: str, dtype: torch.dtype) -> None:
    model, ids = tiny_model(kind, dtype, device, SEED), prompt(2, 37, device)
    expected = greedy(model, "eager", ids)
    use_latent_cache(model)
    assert torch.equal(greedy(model, NAME, ids, past_key_values=_cache(model)), expected)
    assert torch.equal(greedy(model, NAME, ids), expected), "the model's own cache still serves"


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("buffer_token_size", [24, 16384])
def test_logits_behind_a_cached_prefix(page_size: int, buffer_token_size: int) -> None:
    """Whatever the pages and however many chunks; after tokens were taken back too."""
    model, ids = tiny_model("v3", torch.float32, "cpu", SEED), prompt(2, 37, "cpu")
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    use_latent_cache(model)
    cache = _cache(model, page_size=page_size, buffer_token_size=buffer_token_size)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
        model(ids.flip(1)[:, :5], attention_mask=mask[:, :25], past_key_values=cache)
        cache.crop(-5)
        assert cache.get_seq_length() == 20
        actual = model(ids[:, 20:], attention_mask=mask, past_key_values=cache).logits
    assert (actual - expected[:, 20:]).norm() / expected.norm() <= 1e-5
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_mask_of_the_callers() -> None:
    """A prefix of 5 tokens that all see; the second part of the prefill finds the first in the cache."""
    model, ids = tiny_model("v3", torch.float32, "cpu", SEED), prompt(2, 12, "cpu")
    at = torch.arange(12)
    visible = ((at <= at[:, None]) | (at < 5)).expand(2, 1, 12, 12)
    use_latent_cache(model)
    cache = _cache(model)
    with torch.no_grad():
        expected = model(ids, attention_mask=visible).logits
        model(ids[:, :7], attention_mask=visible[:, :, :7, :7], past_key_values=cache)
        actual = model(ids[:, 7:], attention_mask=visible[:, :, 7:], past_key_values=cache).logits
    assert (actual - expected[:, 7:]).norm() / expected.norm() <= 1e-5


def test_a_quantised_cache() -> None:
    model, ids = tiny_model("v3", torch.float32, "cpu", SEED, first_k_dense_replace=2), prompt(2, 37, "cpu")
    use_latent_cache(model)
    with torch.no_grad():
        expected = model(ids).logits
        actual = model(ids, past_key_values=_cache(model, dtype=torch.float8_e4m3fn)).logits
    off = (actual - expected).double().norm() / expected.double().norm()
    # Each of two layers may be 5e-2 off, independently.
    assert 1e-4 < off < 2**0.5 * 5e-2, off


def test_attention_in_fp8() -> None:
    model, ids = tiny_model("v3", torch.bfloat16, "cpu", SEED, first_k_dense_replace=2), prompt(2, 37, "cpu")
    use_latent_cache(model)
    with torch.no_grad():
        expected, actual = (
            model(ids, past_key_values=_cache(model, attention_dtype=dtype)).logits
            for dtype in (None, torch.float8_e4m3fn)
        )
    off = (actual - expected).double().norm() / expected.double().norm()
    # Each of two layers may be 5e-2 off, independently.
    assert 1e-4 < off < 2**0.5 * 5e-2, off


def test_latents_lie_in_the_pages() -> None:
    model, ids = tiny_model("v2", torch.float32, "cpu", SEED), prompt(2, 37, "cpu")
    use_latent_cache(model)
    cache, own = _cache(model), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids, past_key_values=own)
    for i, layer in enumerate(own.layers):
        pages = cache.pages.layer(i)
        latent, rope = (x.reshape(2, 64, -1)[:, :37] for x in (pages.latent, pages.rope))
        torch.testing.assert_close(latent, layer.keys[:, 0])
        torch.testing.assert_close(rope, layer.values[:, 0])


def test_refused() -> None:
    model, ids = tiny_model("v3", torch.float32, "cpu", SEED), prompt(2, 12, "cpu")
    with torch.no_grad():
        with pytest.raises(UnsupportedError, match="use_latent_cache"):
            model(ids, past_key_values=_cache(model))
        use_latent_cache(model)
        use_latent_cache(model)
        with pytest.raises(BufferOverflowError, match=r"max_length 8 tokens a sequence, got 0 \+ 12"):
            model(ids, past_key_values=_cache(model, max_length=8))
        with pytest.raises(ShapeError, match="for 3 sequences"):
            model(ids, past_key_values=_cache(model, batch_size=3))
        with pytest.raises(UnsupportedError, match="packed sequences cannot be cached"):
            offsets = torch.tensor([0, 5, 12])
            cache = _cache(model, batch_size=1)
            model(ids[:1], past_key_values=cache, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
    cache = _cache(model)
    with pytest.raises(UnsupportedError, match="beam search"):
        cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(ArgumentError, match="tokens_to_remove"):
        cache.crop(-1)
    with pytest.raises(ShapeError, match="kv_lora_rank"):
        _cache(tiny_model("v3", torch.float32, "cpu", SEED, kv_lora_rank=256))
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with pytest.raises(UnsupportedError, match="no attention module with expand_kv"):
        use_latent_cache(llama)
