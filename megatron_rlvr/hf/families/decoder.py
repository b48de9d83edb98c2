"""What all families share: a pre-norm decoder with grouped-query attention, RMSNorm and SwiGLU.

Which layers have a bias and whether q and k are normalised, the spec says. Rules come in model order.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rlvr.hf.families.rule import Rule, Source
from megatron_rlvr.hf.layouts import Gated, GroupedQkv, Layout, Replicated, Split, Vocabulary
from megatron_rlvr.types import ModelSpec


def dense_rules(spec: ModelSpec, vocab_multiple: int) -> Iterator[Rule]:
    """Every tensor of a model without experts; a tied head has no tensor of its own."""
    yield from embedding_rules(spec, vocab_multiple)
    for layer in range(spec.num_layers):
        yield from attention_rules(spec, layer)
        yield from mlp_rules(spec, layer)
    yield from head_rules(spec, vocab_multiple)


def embedding_rules(spec: ModelSpec, vocab_multiple: int) -> Iterator[Rule]:
    source = Source("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    yield Rule("embedding.word_embeddings.weight", (source,), Vocabulary(multiple=vocab_multiple))


def attention_rules(spec: ModelSpec, layer: int) -> Iterator[Rule]:
    """The attention block of one layer, with the norms before it and before the MLP."""
    hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    hidden, head = spec.hidden_size, spec.head_dim
    q_rows, kv_rows = spec.num_attention_heads * head, spec.num_key_value_heads * head
    qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    split = GroupedQkv(num_groups=spec.num_key_value_heads)
    yield norm_rule(f"{megatron}input_layernorm.weight", f"{hf}input_layernorm.weight", hidden)
    yield from linear_rules(
        f"{megatron}self_attention.linear_qkv",
        {f"{hf}self_attn.{name}": (rows, hidden) for name, rows in qkv.items()},
        split,
        bias=split if spec.attention_bias else None,
    )
    if spec.qk_norm:
        for x in ("q", "k"):
            name = f"{megatron}self_attention.{x}_layernorm.weight"
            yield norm_rule(name, f"{hf}self_attn.{x}_norm.weight", head)
    yield from linear_rules(
        f"{megatron}self_attention.linear_proj",
        {f"{hf}self_attn.o_proj": (hidden, q_rows)},
        Split(1),
        bias=Replicated() if spec.output_bias else None,
    )
    yield norm_rule(f"{megatron}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", hidden)


def mlp_rules(spec: ModelSpec, layer: int) -> Iterator[Rule]:
    """The dense MLP of one layer."""
    hf, megatron = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
    yield from swiglu_rules(hf, megatron, spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)


def head_rules(spec: ModelSpec, vocab_multiple: int) -> Iterator[Rule]:
    yield norm_rule("decoder.final_layernorm.weight", "model.norm.weight", spec.hidden_size)
    if not spec.tie_word_embeddings:
        source = Source("lm_head.weight", (spec.vocab_size, spec.hidden_size))
        yield Rule("output_layer.weight", (source,), Vocabulary(multiple=vocab_multiple))


def norm_rule(megatron: str, hf: str, width: int) -> Rule:
    """A norm's weight, whole on every rank."""
    return Rule(megatron, (Source(hf, (width,)),), Replicated())


def swiglu_rules(
    hf: str, megatron: str, hidden: int, ffn: int, *, expert: int | None = None, bias: bool = False
) -> Iterator[Rule]:
    """The two layers of one SwiGLU block under the given name prefixes."""
    gate_up = {f"{hf}{x}_proj": (ffn, hidden) for x in ("gate", "up")}
    down = {f"{hf}down_proj": (hidden, ffn)}
    yield from linear_rules(f"{megatron}linear_fc1", gate_up, Gated(), expert, Gated() if bias else None)
    yield from linear_rules(f"{megatron}linear_fc2", down, Split(1), expert, Replicated() if bias else None)


def linear_rules(
    megatron: str,
    sources: dict[str, tuple[int, int]],
    layout: Layout,
    expert: int | None = None,
    bias: Layout | None = None,
) -> Iterator[Rule]:
    """Weight and, where `bias` gives its layout, bias of the linear layer that `sources` (HF name -> shape) make.

    A row-parallel layer adds its bias to the reduced output, so every rank holds all of it.
    """
    weights = tuple(Source(f"{name}.weight", shape) for name, shape in sources.items())
    yield Rule(f"{megatron}.weight", weights, layout, expert)
    if bias is not None:
        biases = tuple(Source(f"{name}.bias", (shape[0],)) for name, shape in sources.items())
        yield Rule(f"{megatron}.bias", biases, bias, expert)
