"""The experts' load-balancing loss, the same in every layout.

Per layer and micro-batch aux = experts * sum_i f_i P_i (Switch Transformer, Eq. 4): f_i the share of routed tokens that
go to expert i, P_i the mean probability of expert i. The loss of a step is the sum over micro-batches of
(its tokens / all tokens of the step) * coefficient * aux. Padding is routed like any token but counts in nothing here.

Why not megatron-core's own sum: it weighs each rank's part by the tokens of that rank, which is not the same thing
where padding is uneven, before 0.19 it divides by as many ranks too often, and it expects the division by all tokens in
`finalize_model_grads`, which the policy loss, final when it arrives, switches off.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rlvr.actor import platform
from megatron_rlvr.types import MiniBatch


class BalancedRouter(TopKRouter):
    """Megatron's router with the load-balancing loss of this module in place of its own."""

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """`probs` [T, experts] unchanged, with the gradient of this rank's part of tokens * coefficient * aux behind.

        scores_for_aux_loss, routing_map   [T, experts], rows of padding are 0
        """
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        routed = routing_map.sum(0).float()
        dist.all_reduce(routed, group=self.tp_cp_group)  # a sequence's tokens lie on all ranks of this group
        tokens = (routed.sum() / self.topk).clamp(min=1)  # none in a micro-batch of padding alone
        shares = routed / (self.topk * tokens)
        aux_of_my_tokens = routing_map.shape[1] * (shares * scores_for_aux_loss.sum(0)).sum()
        return MoEAuxLossAutoScaler.apply(probs, coefficient * aux_of_my_tokens)


def scale_aux_loss(config: TransformerConfig, coefficient: float, mini_batch: MiniBatch) -> None:
    """Divide the coefficient by the tokens of this mini-batch over all ranks; a collective where it is not 0."""
    if coefficient == 0:
        return
    tokens = torch.tensor(sum(b.num_tokens for b in mini_batch.micro_batches), device=platform.device())
    dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
    config.moe_aux_loss_coeff = coefficient / tokens.item()
