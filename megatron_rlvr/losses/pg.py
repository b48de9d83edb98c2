"""PG: the policy gradient with one importance ratio per token, c_t = w_t A, nothing clipped (SPEC 3)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rlvr.losses.core import PackedTokens, PolicyLoss, Terms
from megatron_rlvr.losses.hyperparameters import Hyperparameters, log_weight_clamp


@dataclass(frozen=True)
class PgHyperparameters(Hyperparameters):
    """The cap on log w of a token, there to keep exp finite."""

    log_w_clamp: float = log_weight_clamp()


def terms(tokens: PackedTokens, hp: PgHyperparameters) -> Terms:
    """Per token."""
    weights = tokens.token_weights(hp.log_w_clamp)
    return Terms(weights * tokens.token_advantages, weights, tokens.log_ratio > hp.log_w_clamp)


LOSS = PolicyLoss("pg", PgHyperparameters, terms)
