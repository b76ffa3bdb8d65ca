"""Attention of DeepSeek-V2 and V3 models in Hugging Face transformers, and a cache of their latents in pages.

    from mla.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="mla_prefill")

Opt-in, the keys and values of past tokens kept as 576 numbers a token and attended to straight from there:

    from mla.integrations.transformers import LatentCache, use_latent_cache

    use_latent_cache(model)
    model.generate(..., past_key_values=LatentCache(model.config, batch_size=2, max_length=4096, device=model.device))
"""

from __future__ import annotations

from mla.integrations import require_package

require_package("transformers")

from mla.integrations.transformers.attention import NAME, attention_forward, register, use_latent_cache  # noqa: E402
from mla.integrations.transformers.latent_cache import LatentCache  # noqa: E402
from mla.integrations.transformers.step import Step, prepare_step  # noqa: E402

__all__ = ["NAME", "LatentCache", "Step", "attention_forward", "prepare_step", "register", "use_latent_cache"]
