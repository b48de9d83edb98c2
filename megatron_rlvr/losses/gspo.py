"""GSPO: the geometric mean s of a response's token ratios, clipped as PPO clips (GSPO Eq. 2; SPEC 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rlvr.losses.core import sequence_loss
from megatron_rlvr.losses.hyperparameters import Hyperparameters, log_weight_clamp, number


@dataclass(frozen=True)
class GspoHyperparameters(Hyperparameters):
    """Clip range [1 - clip_low, 1 + clip_high] of s; the bound on |log s|."""

    clip_low: float = number(3e-4, low=0.0, high=1.0)
    clip_high: float = number(4e-4, low=0.0)
    log_w_clamp: float = log_weight_clamp()


def kernel(log_w: Tensor, lengths: Tensor, advantages: Tensor, hp: GspoHyperparameters) -> tuple[Tensor, Tensor]:
    """[S] s where the clip is inactive, else 0; and where it is active."""
    s = (log_w / lengths.clamp(min=1)).clamp(-hp.log_w_clamp, hp.log_w_clamp).exp()
    clipped = torch.where(advantages >= 0, s > 1 + hp.clip_high, s < 1 - hp.clip_low)
    return torch.where(clipped, 0.0, s), clipped


LOSS = sequence_loss("gspo", GspoHyperparameters, kernel)
