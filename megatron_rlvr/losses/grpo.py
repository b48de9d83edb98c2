"""GRPO, decoupled: PPO's clip acts on rho = pi_theta/pi_k, the correction pi_k/pi_behav multiplies the rest (SPEC 3).

The product (pi_k/pi_behav) rho is pi_theta/pi_behav = w, so c_t = w_t A where the clip is inactive and 0 where it is
active; pi_k = pi_behav gives the ordinary clipped surrogate, clip_low != clip_high DAPO's asymmetric clip.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rlvr.losses.core import PackedTokens, PolicyLoss, Terms
from megatron_rlvr.losses.hyperparameters import Hyperparameters, clip_range, log_weight_clamp, number


@dataclass(frozen=True)
class GrpoHyperparameters(Hyperparameters):
    """Clip range [1 - clip_low, 1 + clip_high] of rho; the cap on log w of a token."""

    clip_low: float = number(0.2, low=0.0, high=1.0)
    clip_high: float = number(0.2, low=0.0)
    log_w_clamp: float = log_weight_clamp()


def terms(tokens: PackedTokens, hp: GrpoHyperparameters) -> Terms:
    """Per token: min(rho A, clip(rho) A) has no gradient above the range for A >= 0 and below it for A < 0."""
    log_rho, advantages = tokens.reference_log_ratio, tokens.token_advantages
    low, high = clip_range(hp.clip_low, hp.clip_high)
    clipped = torch.where(advantages >= 0, log_rho > high, log_rho < low)
    weights = tokens.token_weights(hp.log_w_clamp).masked_fill_(clipped, 0.0)
    return Terms(weights * advantages, weights, clipped | (tokens.log_ratio > hp.log_w_clamp))


LOSS = PolicyLoss("grpo", GrpoHyperparameters, terms, reference="optional")
