"""Qwen2 and Qwen2.5: a bias on q, k and v that config.json does not mention; no QK norm."""

from __future__ import annotations

from typing import Any

from megatron_rlvr.hf.config_json import ConfigJson
from megatron_rlvr.hf.families.decoder import dense_rules as rules

__all__ = ["describe", "rules"]


def describe(config: ConfigJson) -> dict[str, Any]:
    """Fields of the ModelSpec that only this family has, with the defaults of transformers' Qwen2Config."""
    config.require("num_key_value_heads")
    per_head = config.integer("hidden_size") // config.integer("num_attention_heads")
    if config.integer("head_dim", per_head) != per_head:
        raise config.refuse("head_dim", f"engines take hidden_size / num_attention_heads {per_head} for this family")
    return {"head_dim": per_head, "qk_norm": False, "attention_bias": True}
