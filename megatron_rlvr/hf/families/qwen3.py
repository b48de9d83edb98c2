"""Qwen3 dense (0.6B to 32B, Base and post-trained): QK norm, explicit head_dim; attention_bias covers all four."""

from __future__ import annotations

from typing import Any

from megatron_rlvr.hf.config_json import ConfigJson
from megatron_rlvr.hf.families.decoder import dense_rules as rules

__all__ = ["describe", "rules"]


def describe(config: ConfigJson) -> dict[str, Any]:
    """Fields of the ModelSpec that only this family has, with the defaults of transformers' Qwen3Config."""
    config.require("num_key_value_heads")
    biased = config.boolean("attention_bias")
    return {
        "head_dim": config.integer("head_dim", 128),
        "qk_norm": True,
        "attention_bias": biased,
        "output_bias": biased,
    }
