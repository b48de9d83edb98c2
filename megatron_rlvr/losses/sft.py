"""SFT: the mean negative log-likelihood of the response tokens, c_t = 1 whatever the advantage (SPEC 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rlvr.losses.core import PackedTokens, PolicyLoss, Terms
from megatron_rlvr.losses.hyperparameters import Hyperparameters


@dataclass(frozen=True)
class SftHyperparameters(Hyperparameters):
    """None."""


def terms(tokens: PackedTokens, hp: SftHyperparameters) -> Terms:
    """Per token."""
    ones = torch.ones_like(tokens.logprobs)
    return Terms(ones, ones)


LOSS = PolicyLoss("sft", SftHyperparameters, terms, uses_behavior=False)
