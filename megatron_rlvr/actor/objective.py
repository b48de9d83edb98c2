"""What the last pipeline stage differentiates: the configured policy loss under the mini-batch's one denominator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_rlvr.actor.schedule import LossFunction
from megatron_rlvr.config.tree import LossConfig
from megatron_rlvr.losses import NonFiniteLogprobError, first_corrections, group_variances, policy_loss
from megatron_rlvr.losses.proximal_kl import ProximalKlHyperparameters
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
        try:
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
        except NonFiniteLogprobError as error:
            raise _named(error, batch) from None
        sums["actor/entropy/num"] = entropy.sum(dtype=torch.float64)
        sums["actor/entropy/den"] = num_tokens.double()
        return loss, sums | _corrections(config, mini_batch, batch, logprobs)

    return loss_function


def settle(mini_batch: MiniBatch) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """What becomes of the metric sums once they are those of the whole mini-batch: V(H), which needs whole groups."""

    def settled(sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return sums if mini_batch.group_index is None else group_variances(sums, mini_batch.group_index)

    return settled


def _corrections(
    config: LossConfig, mini_batch: MiniBatch, batch: PackedBatch, logprobs: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The first-token corrections behind V(H), under the settings of proximal_kl whatever the loss."""
    if not config.variance_horizons or mini_batch.group_index is None:
        return {}
    if batch.reference_logprobs is None or batch.sequence_index is None:
        raise RuntimeError("loss.variance_horizons needs reference log-probs and the place of every response")
    settings = ProximalKlHyperparameters(**(config.hyperparameters if config.name == "proximal_kl" else {}))
    return first_corrections(
        logprobs.detach(),
        batch.reference_logprobs,
        batch.action_cu_seqlens,
        horizons=config.variance_horizons,
        sequence_index=batch.sequence_index,
        num_sequences=mini_batch.num_sequences,
        beta=settings.beta,
        cost_clip=settings.cost_clip,
        tail_decay=settings.tail_decay,
    )


def _named(error: NonFiniteLogprobError, batch: PackedBatch) -> NonFiniteLogprobError:
    """The same error, its sequence counted in the mini-batch rather than in the micro-batch where it was found."""
    if batch.sequence_index is None:
        return error
    place = int(batch.sequence_index[error.sequence])
    return NonFiniteLogprobError(f"response {place} of the mini-batch: {error}", error.sequence)
