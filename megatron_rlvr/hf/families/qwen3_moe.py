"""Qwen3-MoE: Qwen3 with routed experts in some or all layers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rlvr.hf.families import qwen3
from megatron_rlvr.hf.families.rule import Rule, Source
from megatron_rlvr.hf.layouts import Replicated
from megatron_rlvr.types import ModelSpec


def rules(spec: ModelSpec, vocab_multiple: int) -> Iterator[Rule]:
    """Every tensor of the model, in model order; layers outside spec.moe_layers are dense."""
    yield from qwen3.embedding_rules(spec, vocab_multiple)
    for layer, routed in enumerate(spec.moe_layers):
        yield from qwen3.attention_rules(spec, layer)
        yield from expert_rules(spec, layer) if routed else qwen3.mlp_rules(spec, layer)
    yield from qwen3.head_rules(spec, vocab_multiple)


def expert_rules(spec: ModelSpec, layer: int) -> Iterator[Rule]:
    hf, megatron = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
    router = Source(f"{hf}gate.weight", (spec.num_experts, spec.hidden_size))
    yield Rule(f"{megatron}router.weight", (router,), Replicated())
    for e in range(spec.num_experts):
        yield from qwen3.swiglu_rules(
            f"{hf}experts.{e}.",
            f"{megatron}experts.local_experts.{e}.",
            spec.hidden_size,
            spec.moe_intermediate_size,
            e,
        )
