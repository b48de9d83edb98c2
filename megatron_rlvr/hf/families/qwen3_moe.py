"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3 with routed experts in some or all layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_rlvr.hf.config_json import ConfigJson
from megatron_rlvr.hf.families import decoder
from megatron_rlvr.hf.families.rule import Rule, Source
from megatron_rlvr.hf.layouts import Replicated
from megatron_rlvr.types import ModelSpec


def describe(config: ConfigJson) -> dict[str, Any]:
    """Fields of the ModelSpec that only this family has, with the defaults of transformers' Qwen3MoeConfig."""
    config.require("num_key_value_heads")
    per_head = config.integer("hidden_size") // config.integer("num_attention_heads")
    biased = config.boolean("attention_bias")
    return {
        "head_dim": config.integer("head_dim", per_head),
        "qk_norm": True,
        "attention_bias": biased,
        "output_bias": biased,
        **_experts(config),
    }


def rules(spec: ModelSpec, vocab_multiple: int) -> Iterator[Rule]:
    """Every tensor of the model, in model order; layers outside spec.moe_layers are dense."""
    yield from decoder.embedding_rules(spec, vocab_multiple)
    for layer, routed in enumerate(spec.moe_layers):
        yield from decoder.attention_rules(spec, layer)
        yield from _expert_rules(spec, layer) if routed else decoder.mlp_rules(spec, layer)
    yield from decoder.head_rules(spec, vocab_multiple)


def _experts(config: ConfigJson) -> dict[str, Any]:
    num_layers = config.integer("num_hidden_layers")
    num_experts = config.integer("num_experts", config.get("num_local_experts"))
    top_k = config.integer("num_experts_per_tok", 8)
    if top_k > num_experts:
        raise config.refuse("num_experts_per_tok", f"there are only {num_experts} experts")
    step = config.integer("decoder_sparse_step", 1)
    dense = _dense_layers(config, num_layers)
    return {
        "moe_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
        "norm_topk_prob": config.boolean("norm_topk_prob"),
    }


def _dense_layers(config: ConfigJson, num_layers: int) -> set[int]:
    layers = config.get("mlp_only_layers", [])
    if not isinstance(layers, list) or not all(isinstance(i, int) and 0 <= i < num_layers for i in layers):
        raise config.refuse("mlp_only_layers", f"it must list layer numbers from 0 to {num_layers - 1}")
    return set(layers)


def _expert_rules(spec: ModelSpec, layer: int) -> Iterator[Rule]:
    hf, megatron = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
    router = Source(f"{hf}gate.weight", (spec.num_experts, spec.hidden_size))
    yield Rule(f"{megatron}router.weight", (router,), Replicated())
    for e in range(spec.num_experts):
        yield from decoder.swiglu_rules(
            f"{hf}experts.{e}.",
            f"{megatron}experts.local_experts.{e}.",
            spec.hidden_size,
            spec.moe_intermediate_size,
            expert=e,
        )
