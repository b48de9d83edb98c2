"""CISPO: the token ratio clipped as a weight, c_t = clip(w_t, low, high) A; no token loses its gradient (SPEC 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rlvr.losses.core import PackedTokens, PolicyLoss, Terms
from megatron_rlvr.losses.errors import LossError
from megatron_rlvr.losses.hyperparameters import MAX_LOG_WEIGHT_CLAMP, Hyperparameters, number


@dataclass(frozen=True)
class CispoHyperparameters(Hyperparameters):
    """Range of the weight."""

    weight_low: float = number(0.0, low=0.0)
    weight_high: float = number(5.0, above=0.0, high=math.exp(MAX_LOG_WEIGHT_CLAMP))

    def check_relations(self) -> None:
        if self.weight_low > self.weight_high:
            raise LossError(f"weight_low={self.weight_low:g} is above weight_high={self.weight_high:g}: exchange them.")


def terms(tokens: PackedTokens, hp: CispoHyperparameters) -> Terms:
    """Per token; `clipped` marks weights that the range cut."""
    raw = tokens.token_weights(MAX_LOG_WEIGHT_CLAMP)
    weights = raw.clamp(hp.weight_low, hp.weight_high)
    return Terms(weights * tokens.token_advantages, weights, weights != raw)


LOSS = PolicyLoss("cispo", CispoHyperparameters, terms)
