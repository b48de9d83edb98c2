"""What the last pipeline stage differentiates: the configured policy loss under the mini-batch's one denominator."""

from __future__ import annotations

import torch

from megatron_rlvr.actor.schedule import LossFunction
from megatron_rlvr.config.tree import LossConfig
from megatron_rlvr.losses import policy_loss
from megatron_rlvr.types import MiniBatch, PackedBatch


def denominator(config: LossConfig, mini_batch: MiniBatch) -> int:
    """Action tokens (`token-mean`) or responses (`seq-mean-*`) of the whole mini-batch, over all ranks."""
    return mini_batch.num_action_tokens if config.aggregation == "token-mean" else mini_batch.num_sequences


def objective(config: LossConfig, mini_batch: MiniBatch) -> LossFunction:
    """A function of one micro-batch; its losses add up to the mini-batch's loss over micro-batches and ranks."""
    normalizer = denominator(config, mini_batch)

    def loss_function(
        batch: PackedBatch, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, num_tokens, sums = policy_loss(
            config.name,
            logprobs=logprobs,
            behavior_logprobs=batch.behavior_logprobs,
            reference_logprobs=batch.reference_logprobs,
            advantages=batch.advantages,
            cu_seqlens=batch.action_cu_seqlens,
            aggregation=config.aggregation,
            normalizer=normalizer,
            **config.hyperparameters,
        )
        sums["actor/entropy/num"] = entropy.sum(dtype=torch.float64)
        sums["actor/entropy/den"] = num_tokens.double()
        return loss, sums

    return loss_function
