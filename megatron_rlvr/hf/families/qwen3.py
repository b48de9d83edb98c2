"""Qwen3 dense: GQA with QK norm and explicit head_dim, RMSNorm, SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rlvr.hf.families.rule import Rule, Source
from megatron_rlvr.hf.layouts import Gated, GroupedQkv, Replicated, Split, Vocabulary
from megatron_rlvr.types import ModelSpec


def rules(spec: ModelSpec, vocab_multiple: int) -> Iterator[Rule]:
    """Every tensor of the model, in model order; a tied head has no tensor of its own."""
    yield from embedding_rules(spec, vocab_multiple)
    for layer in range(spec.num_layers):
        yield from attention_rules(spec, layer)
        yield from mlp_rules(spec, layer)
    yield from head_rules(spec, vocab_multiple)


def embedding_rules(spec: ModelSpec, vocab_multiple: int) -> Iterator[Rule]:
    source = Source("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    yield Rule("embedding.word_embeddings.weight", (source,), Vocabulary(multiple=vocab_multiple))


def attention_rules(spec: ModelSpec, layer: int) -> Iterator[Rule]:
    hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    hidden, head = spec.hidden_size, spec.head_dim
    q_rows, kv_rows = spec.num_attention_heads * head, spec.num_key_value_heads * head
    qkv = tuple(
        Source(f"{hf}self_attn.{x}_proj.weight", (rows, hidden))
        for x, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
    )
    yield norm_rule(f"{megatron}input_layernorm.weight", f"{hf}input_layernorm.weight", hidden)
    yield Rule(f"{megatron}self_attention.linear_qkv.weight", qkv, GroupedQkv(num_groups=spec.num_key_value_heads))
    yield norm_rule(f"{megatron}self_attention.q_layernorm.weight", f"{hf}self_attn.q_norm.weight", head)
    yield norm_rule(f"{megatron}self_attention.k_layernorm.weight", f"{hf}self_attn.k_norm.weight", head)
    out = Source(f"{hf}self_attn.o_proj.weight", (hidden, q_rows))
    yield Rule(f"{megatron}self_attention.linear_proj.weight", (out,), Split(1))
    yield norm_rule(f"{megatron}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", hidden)


def mlp_rules(spec: ModelSpec, layer: int) -> Iterator[Rule]:
    hf, megatron = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
    yield from swiglu_rules(hf, megatron, spec.hidden_size, spec.intermediate_size)


def head_rules(spec: ModelSpec, vocab_multiple: int) -> Iterator[Rule]:
    yield norm_rule("decoder.final_layernorm.weight", "model.norm.weight", spec.hidden_size)
    if not spec.tie_word_embeddings:
        source = Source("lm_head.weight", (spec.vocab_size, spec.hidden_size))
        yield Rule("output_layer.weight", (source,), Vocabulary(multiple=vocab_multiple))


def norm_rule(megatron: str, hf: str, width: int) -> Rule:
    """A norm's weight, whole on every rank."""
    return Rule(megatron, (Source(hf, (width,)),), Replicated())


def swiglu_rules(hf: str, megatron: str, hidden: int, ffn: int, expert: int | None = None) -> Iterator[Rule]:
    """The two layers of one SwiGLU block under the given name prefixes."""
    gate, up = (Source(f"{hf}{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
    yield Rule(f"{megatron}linear_fc1.weight", (gate, up), Gated(), expert)
    yield Rule(f"{megatron}linear_fc2.weight", (Source(f"{hf}down_proj.weight", (hidden, ffn)),), Split(1), expert)
