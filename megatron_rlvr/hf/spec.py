"""config.json -> ModelSpec, without loading any weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rlvr.hf.config_json import ConfigJson
from megatron_rlvr.hf.families import FAMILIES
from megatron_rlvr.hf.rope import read_rope
from megatron_rlvr.types import ModelSpec, UserError

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


def read_model_spec(path: str | Path) -> ModelSpec:
    """Describe the model in the Hugging Face directory `path` from its config.json alone.

    Accepts the RoPE parameters as `rope_parameters` (transformers 5) and as `rope_theta` / `rope_scaling` (before).

    Raises UserError when config.json is missing, broken, or describes a model that is not supported.
    """
    config = ConfigJson(Path(path) / "config.json")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise config.refuse("model_type", f"use one of {', '.join(FAMILIES)}")
    config.require(*_REQUIRED)
    _refuse_unsupported(config)
    theta, scaling = read_rope(config)
    heads = config.integer("num_attention_heads")
    key_value_heads = config.integer("num_key_value_heads", heads)
    if heads % key_value_heads:
        raise config.refuse("num_key_value_heads", f"it must divide num_attention_heads {heads}")
    return ModelSpec(
        family=family,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=config.integer("hidden_size"),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        rms_norm_eps=float(config.get("rms_norm_eps")),
        rope_theta=theta,
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
        eos_token_ids=_token_ids(config.get("eos_token_id")),
        rope_scaling=scaling,
        **FAMILIES[family].describe(config),
    )


def _refuse_unsupported(config: ConfigJson) -> None:
    if config.get("use_sliding_window", False):
        raise config.refuse("use_sliding_window", "only full attention is trained")
    if set(config.get("layer_types", [])) - {"full_attention"}:
        raise config.refuse("layer_types", "only full attention is trained")
    if config.get("hidden_act", "silu") != "silu":
        raise config.refuse("hidden_act", "the MLP must be SwiGLU with silu")
    if config.get("quantization_config") is not None:
        raise UserError(f"{config.path}: quantization_config is present; training needs the unquantised checkpoint.")


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
