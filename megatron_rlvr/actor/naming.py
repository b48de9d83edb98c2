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

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_LOCAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.*)$")
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def canonical_name(name: str, layer: int, first_expert: int) -> str:
    """The canonical form of a rank-local name, given its layer's global number and the rank's first global expert."""
    match = _LAYER.match(name)
    if match is None:
        return name
    part = _FUSED_NORMS.get(match[2], match[2])
    if expert := _LOCAL_EXPERT.match(part):
        part = f"mlp.experts.local_experts.{first_expert + int(expert[1])}.{expert[2]}"
    elif grouped := _GROUPED_EXPERT.match(part):
        part = f"mlp.experts.local_experts.{first_expert + int(grouped[2])}.{grouped[1]}.weight"
    return f"decoder.layers.{layer}.{part}"


def named_parameters(chunks: list[GPTModel]) -> Iterator[tuple[str, Parameter]]:
    """This rank's parameters under their canonical names."""
    for chunk in chunks:
        experts = (chunk.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        first_expert = parallel_state.get_expert_model_parallel_rank() * experts
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            match = _LAYER.match(name)
            yield canonical_name(name, layers[int(match[1])] if match else -1, first_expert), parameter
