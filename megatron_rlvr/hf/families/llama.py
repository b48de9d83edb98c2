"""Llama 2 to 3.3 (3.2-3B: llama3 RoPE scaling, tied head): no QK norm, biases only where config.json asks for them."""

from __future__ import annotations

from typing import Any

from megatron_rlvr.hf.config_json import ConfigJson
from megatron_rlvr.hf.families.decoder import dense_rules as rules

__all__ = ["describe", "rules"]


def describe(config: ConfigJson) -> dict[str, Any]:
    """Fields of the ModelSpec that only this family has, with the defaults of transformers' LlamaConfig."""
    per_head = config.integer("hidden_size") // config.integer("num_attention_heads")
    biased = config.boolean("attention_bias")
    return {
        "head_dim": config.integer("head_dim", per_head),
        "qk_norm": False,
        "attention_bias": biased,
        "output_bias": biased,
        "mlp_bias": config.boolean("mlp_bias"),
    }
