"""config.json -> ModelSpec, without loading any weight."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rlvr.types import ModelSpec, UserError

FAMILIES = ("qwen3", "qwen3_moe")
SUPPORTED_ROPE_TYPES = ("default",)

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


class _Config:
    """config.json with refusals that name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = _read_json_object(path)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{self.path}: {key} is {value!r}; it must be a positive integer.")
        return value

    def refuse(self, key: str, why: str) -> UserError:
        return UserError(f"{self.path}: {key} {self.values.get(key)!r} is not supported: {why}.")


def _read_json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} does not exist; model.path must be a Hugging Face directory with a config.json.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); copy it again from the model's source.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not a JSON object; copy it again.")
    return values


def read_model_spec(path: str | Path) -> ModelSpec:
    """Describe the model in the Hugging Face directory `path` from its config.json alone.

    Accepts the RoPE parameters as `rope_parameters` (transformers 5) and as `rope_theta` / `rope_scaling` (before).

    Raises UserError when config.json is missing, broken, or describes a model that is not supported.
    """
    config = _Config(Path(path) / "config.json")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise config.refuse("model_type", f"use one of {', '.join(FAMILIES)}")
    for key in _REQUIRED:
        if config.get(key) is None:
            raise UserError(f"{config.path} has no {key}; copy it again from the model's source.")
    _refuse_unsupported(config)
    theta, scaling = _rope(config)
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
        head_dim=config.integer("head_dim", _default_head_dim(config, family)),
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        rms_norm_eps=float(config.get("rms_norm_eps")),
        rope_theta=theta,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=True,
        attention_bias=False,
        eos_token_ids=_token_ids(config.get("eos_token_id")),
        rope_scaling=scaling,
        **(_moe_fields(config) if family == "qwen3_moe" else {}),
    )


def _refuse_unsupported(config: _Config) -> None:
    if config.get("attention_bias", False):
        raise config.refuse("attention_bias", "Megatron-Core cannot add a bias to q, k, v and o_proj alone")
    if config.get("use_sliding_window", False):
        raise config.refuse("use_sliding_window", "only full attention is trained")
    if config.get("hidden_act", "silu") != "silu":
        raise config.refuse("hidden_act", "the MLP must be SwiGLU with silu")
    if config.get("quantization_config") is not None:
        raise UserError(f"{config.path}: quantization_config is present; training needs the unquantised checkpoint.")


def _default_head_dim(config: _Config, family: str) -> int:
    """What transformers assumes when head_dim is absent, which differs between the two families."""
    return 128 if family == "qwen3" else config.integer("hidden_size") // config.integer("num_attention_heads")


def _rope(config: _Config) -> tuple[float, tuple[tuple[str, object], ...]]:
    """Base wavelength and the variant's own parameters, from either place."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise UserError(f"{config.path}: the RoPE parameters {parameters!r} must be a JSON object.")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise UserError(f"{config.path}: rope_type {rope_type!r} is unknown; use {', '.join(SUPPORTED_ROPE_TYPES)}.")
    theta = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
    own = {k: v for k, v in parameters.items() if k not in ("rope_type", "type", "rope_theta")}
    return theta, tuple(sorted(own.items())) if rope_type != "default" else ()


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _moe_fields(config: _Config) -> dict[str, Any]:
    num_layers = config.integer("num_hidden_layers")
    num_experts = config.integer("num_experts", config.get("num_local_experts"))
    top_k = config.integer("num_experts_per_tok", 8)
    if top_k > num_experts:
        raise config.refuse("num_experts_per_tok", f"there are only {num_experts} experts")
    step = config.integer("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers", []))
    return {
        "moe_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
    }
