"""Tiny DeepSeek models with random weights and heads of the real widths."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

VOCABULARY = 32
_CLASSES = {"v2": (DeepseekV2Config, DeepseekV2ForCausalLM), "v3": (DeepseekV3Config, DeepseekV3ForCausalLM)}
#: YaRN with mscale_all_dim, so that the softmax scale is not 1 / sqrt(q_depth).
_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip


def tiny_model(kind: str, dtype: torch.dtype, device: torch.device | str, seed: int, **changes: Any) -> Any:
    """Make a model of two layers whose tokens depend on attention and rarely repeat.

    Its head gives the token after t, t + 1, the best chance. In 16-bit dtypes no layer routes: a routing decision that
    rounding flips would move a logit by any amount.
    """
    config = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1 if dtype == torch.float32 else 2, "max_position_embeddings": 4096,
        "initializer_range": 0.1, "rope_parameters": _ROPE,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    } | changes  # fmt: skip
    make_config, make_model = _CLASSES[kind]
    torch.manual_seed(seed)
    model = make_model(make_config(**config))
    embedding = torch.linalg.qr(torch.randn(config["hidden_size"], VOCABULARY))[0].T
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(8 * embedding)
        model.lm_head.weight.mul_(0.5).add_(embedding.roll(1, 0))
    return model.to(device, dtype).eval()


def prompt(batch: int, tokens: int, device: torch.device | str) -> torch.Tensor:
    """Draw token ids [batch, tokens] from torch's generator, none of them padding."""
    return torch.randint(1, VOCABULARY, (batch, tokens)).to(device)
