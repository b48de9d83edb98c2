"""Canonical parameter names: megatron-core's local names with global layer and expert numbers.

Rank-local names count layers and experts from zero on each rank, and Transformer Engine fuses norms into the linear
layers behind them. Weight maps, refreshes and checkpoints speak canonical names alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch.nn import Parameter

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_LOCAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_WRAPPERS = re.compile(r"^(?:module\.)+")

_OUTSIDE_LAYERS = frozenset(
    ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"),
)
# The Transformer Engine spec fuses a norm into the linear layer that follows it; the local spec keeps it apart.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_IN_LAYERS = frozenset(
    (
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.bias",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc1.bias",
        "mlp.linear_fc2.weight",
        "mlp.linear_fc2.bias",
        "mlp.router.weight",
    ),
)


def canonical_name(local_name: str, *, layer_offset: int = 0, expert_offset: int = 0) -> str:
    """Canonical name of a parameter of GPTModel, built with the local or the Transformer Engine layer spec.

    local_name      as `named_parameters()` gives it; leading `module.` of wrappers (DDP, Float16Module) is dropped
    layer_offset    global number of this model chunk's first layer
    expert_offset   global number of this rank's first expert

    Raises ValueError for a name that has no Hugging Face counterpart in the supported families.
    """
    name = _WRAPPERS.sub("", local_name)
    if name in _OUTSIDE_LAYERS:
        return name
    layer = _LAYER.match(name)
    inner = _canonical_in_layer(layer.group(2), expert_offset) if layer else None
    if layer is None or inner is None:
        raise ValueError(f"parameter {local_name!r} has no canonical name: unsupported layer spec")
    return f"decoder.layers.{int(layer.group(1)) + layer_offset}.{inner}"


def _canonical_in_layer(name: str, expert_offset: int) -> str | None:
    if name in _FUSED_NORMS:
        return _FUSED_NORMS[name]
    if name in _IN_LAYERS:
        return name
    if found := _LOCAL_EXPERT.match(name):
        expert, linear = found.group(1), found.group(2)
    elif found := _GROUPED_EXPERT.match(name):
        linear, expert = found.group(1), found.group(2)
    else:
        return None
    return f"mlp.experts.local_experts.{int(expert) + expert_offset}.{linear}.weight"


def named_parameters(chunks: list[GPTModel]) -> Iterator[tuple[str, Parameter]]:
    """This rank's parameters under their canonical names."""
    for chunk in chunks:
        experts = (chunk.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        layers = chunk.decoder.layers
        offsets = {
            "layer_offset": layers[0].layer_number - 1 if len(layers) else 0,
            "expert_offset": parallel_state.get_expert_model_parallel_rank() * experts,
        }
        for name, parameter in chunk.named_parameters():
            yield canonical_name(name, **offsets), parameter
