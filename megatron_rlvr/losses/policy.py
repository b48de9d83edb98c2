"""The two calls the trainer makes: the coefficients c_t, and the loss they make (SPEC 0).

A sequence-level coefficient needs every log-prob of its response before any gradient. `policy_loss` therefore takes
whole responses: a schedule either keeps a response in one micro-batch, or runs a forward without gradient first, calls
`policy_weights` on the gathered log-probs of all tokens, and multiplies its own share of tokens with the result.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rlvr.losses.aggregation import aggregation_count, check_aggregation, response_weights
from megatron_rlvr.losses.core import PackedTokens, PolicyLoss, Terms
from megatron_rlvr.losses.diagnostics import metric_sums
from megatron_rlvr.losses.errors import LossError
from megatron_rlvr.losses.hyperparameters import build
from megatron_rlvr.losses.inputs import pack
from megatron_rlvr.losses.registry import find_loss


class PolicyWeights(NamedTuple):
    """Detached weights [T] (c_t times the aggregation's weight), count of action tokens [] and metric sums."""

    weights: Tensor
    num_tokens: Tensor
    metrics: dict[str, Tensor]


@torch.no_grad()
def token_coefficients(
    name: str,
    *,
    logprobs: Tensor,
    behavior_logprobs: Tensor | None,
    reference_logprobs: Tensor | None = None,
    advantages: Tensor,
    cu_seqlens: Tensor,
    **hyperparameters: Any,
) -> Tensor:
    """Detached c_t [T] of the loss -(1/N) sum_t c_t log pi_theta(t), float64 for float64 inputs, else float32.

    logprobs, behavior_logprobs, reference_logprobs  [T] packed action tokens, any float dtype, nats
    advantages  [S];  cu_seqlens  [S+1] integers;  hyperparameters: see `hyperparameters_for(name)`
    """
    loss = find_loss(name)
    settings = build(name, loss.hyperparameters, hyperparameters)
    tokens = pack(loss, logprobs, behavior_logprobs, reference_logprobs, advantages, cu_seqlens)
    return _masked(loss, tokens, loss.terms(tokens, settings)).coefficients


@torch.no_grad()
def policy_weights(
    name: str,
    *,
    logprobs: Tensor,
    behavior_logprobs: Tensor | None,
    reference_logprobs: Tensor | None = None,
    advantages: Tensor,
    cu_seqlens: Tensor,
    aggregation: str = "token-mean",
    **hyperparameters: Any,
) -> PolicyWeights:
    """What `policy_loss` multiplies with the log-probs, for schedules that form the sum themselves (see above).

    The metric sums speak of all tokens passed here: where several ranks pass the same tokens, count one rank's sums.
    """
    loss = find_loss(name)
    check_aggregation(aggregation)
    settings = build(name, loss.hyperparameters, hyperparameters)
    tokens = pack(loss, logprobs, behavior_logprobs, reference_logprobs, advantages, cu_seqlens)
    terms = _masked(loss, tokens, loss.terms(tokens, settings))
    scale = response_weights(aggregation, tokens.lengths)
    weights = terms.coefficients if scale is None else terms.coefficients * tokens.expand(scale)
    metrics = metric_sums(loss, tokens, terms, settings, has_reference=reference_logprobs is not None)
    metrics["actor/pg_loss/num"] = -(weights * _finite(tokens.logprobs)).sum(dtype=torch.float64)
    metrics["actor/pg_loss/den"] = aggregation_count(aggregation, tokens.segments.cu_seqlens).double()
    return PolicyWeights(weights, torch.full((), tokens.num_tokens, dtype=torch.int64, device=weights.device), metrics)


def policy_loss(
    name: str,
    *,
    logprobs: Tensor,
    behavior_logprobs: Tensor | None,
    reference_logprobs: Tensor | None = None,
    advantages: Tensor,
    cu_seqlens: Tensor,
    aggregation: str = "token-mean",
    normalizer: Tensor | float | None = None,
    **hyperparameters: Any,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss_sum, num_tokens, metrics), loss = loss_sum / normalizer, where normalizer spans the optimizer mini-batch.

    loss_sum    [] -sum_t c_t logprobs_t, each token also weighted 1/length for `seq-mean-token-mean`. Divided here only
                if `normalizer` is given: the action tokens of the whole mini-batch over all micro-batches and ranks for
                `token-mean`, its responses for `seq-mean-*`.
    num_tokens  [] int64, action tokens of this call whatever the aggregation
    metrics     fresh detached tensors that add over micro-batches and ranks, except `.../max` and `.../min`;
                `finalize_metrics` divides them
    """
    if isinstance(normalizer, int | float) and not 0 < normalizer < math.inf:
        raise LossError(
            f"normalizer={normalizer} is refused: pass the mini-batch's count of action tokens or responses."
        )
    weights, num_tokens, metrics = policy_weights(
        name,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        reference_logprobs=reference_logprobs,
        advantages=advantages,
        cu_seqlens=cu_seqlens,
        aggregation=aggregation,
        **hyperparameters,
    )
    loss_sum = -(weights * _finite(logprobs.to(weights.dtype))).sum()
    return loss_sum if normalizer is None else loss_sum / normalizer, num_tokens, metrics


def _finite(logprobs: Tensor) -> Tensor:
    """[T] with 0 for -inf: a token that cannot happen adds nothing to the loss's value and gets no gradient."""
    return torch.where(torch.isneginf(logprobs), 0.0, logprobs)


def _masked(loss: PolicyLoss, tokens: PackedTokens, terms: Terms) -> Terms:
    """No coefficient for tokens that the sampler cannot have drawn (behaviour log-prob -inf)."""
    if tokens.all_finite or not loss.uses_behavior:
        return terms
    coefficients = terms.coefficients.masked_fill(torch.isneginf(tokens.behavior_logprobs), 0.0)
    return Terms(coefficients, terms.weights, terms.clipped)
