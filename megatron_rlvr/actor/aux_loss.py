"""The weight of the experts' load-balancing loss, the same in every layout.

megatron-core multiplies the loss of a micro-batch by its tokens and expects the division by all tokens of the step in
`finalize_model_grads`. The policy loss arrives divided by its own denominator, so that division never comes; here it is
put into the coefficient. The step's loss is then the sum over micro-batches of (its tokens / all tokens) * coeff * aux,
with aux = experts * sum_i f_i P_i per layer (Switch Transformer, Eq. 4), tokens with padding.
"""

from __future__ import annotations

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from packaging.version import Version

from megatron_rlvr.actor import platform
from megatron_rlvr.types import MiniBatch


def scale_aux_loss(config: TransformerConfig, coefficient: float, mini_batch: MiniBatch) -> None:
    """Set the coefficient that makes this mini-batch's load-balancing loss weigh `coefficient`; a collective."""
    if coefficient == 0:
        return
    tokens = torch.tensor(sum(b.token_ids.numel() for b in mini_batch.micro_batches), device=platform.device())
    dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
    config.moe_aux_loss_coeff = coefficient * _missing_factor() / tokens.item()


def _missing_factor() -> int:
    """Before 0.19, megatron-core multiplies by a rank's share of the tokens, but divides by all of them."""
    if Version(megatron.core.__version__) >= Version("0.19"):
        return 1
    return parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_context_parallel_world_size()
