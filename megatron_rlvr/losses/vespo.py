"""VESPO: phi = W^b exp(lam (1 - W)) of the whole response's weight W, one (b, lam) per sign of A (SPEC 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rlvr.losses.core import by_sign, sequence_loss
from megatron_rlvr.losses.hyperparameters import MAX_LOG_WEIGHT_CLAMP, Hyperparameters, log_weight_clamp, number


@dataclass(frozen=True)
class VespoHyperparameters(Hyperparameters):
    """Power beta and tilt lambda of either branch; the bound on |log W|."""

    beta_pos: float = number(2.0, low=0.0)
    lambda_pos: float = number(3.0, low=0.0)
    beta_neg: float = number(3.0, low=0.0)
    lambda_neg: float = number(2.0, low=0.0)
    log_w_clamp: float = log_weight_clamp()


def kernel(log_w: Tensor, lengths: Tensor, advantages: Tensor, hp: VespoHyperparameters) -> tuple[Tensor, Tensor]:
    """[S] phi(W) by the sign of A, and where the clamp cut log W; `log_w` is the complete sum over the response."""
    clamped = log_w.abs() > hp.log_w_clamp
    log_w = log_w.clamp(-hp.log_w_clamp, hp.log_w_clamp)
    excess = torch.expm1(log_w)
    positive = hp.beta_pos * log_w - hp.lambda_pos * excess
    negative = hp.beta_neg * log_w - hp.lambda_neg * excess
    log_phi = by_sign(advantages, positive, negative)
    return log_phi.clamp(max=MAX_LOG_WEIGHT_CLAMP).exp(), clamped | (log_phi > MAX_LOG_WEIGHT_CLAMP)


LOSS = sequence_loss("vespo", VespoHyperparameters, kernel)
