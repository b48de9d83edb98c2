"""GSPO: the geometric mean s of a response's token ratios, clipped as PPO clips (GSPO Eq. 2; SPEC 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rlvr.losses.core import sequence_loss
from megatron_rlvr.losses.hyperparameters import Hyperparameters, clip_range, log_weight_clamp, number


@dataclass(frozen=True)
class GspoHyperparameters(Hyperparameters):
    """Clip range [1 - clip_low, 1 + clip_high] of s; the bound on |log s|."""

    clip_low: float = number(3e-4, low=0.0, high=1.0)
    clip_high: float = number(4e-4, low=0.0)
    log_w_clamp: float = log_weight_clamp()


def kernel(log_w: Tensor, lengths: Tensor, advantages: Tensor, hp: GspoHyperparameters) -> tuple[Tensor, Tensor]:
    """[S] s where the clip is inactive, else 0; and where it is active."""
    log_s = log_w / lengths.clamp(min=1)
    low, high = clip_range(hp.clip_low, hp.clip_high)
    clipped = torch.where(advantages >= 0, log_s > high, log_s < low)
    s = log_s.clamp(-hp.log_w_clamp, hp.log_w_clamp).exp()
    return torch.where(clipped, 0.0, s), clipped | (log_s.abs() > hp.log_w_clamp)


LOSS = sequence_loss("gspo", GspoHyperparameters, kernel)
