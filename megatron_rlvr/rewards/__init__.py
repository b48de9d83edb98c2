"""Rewards: verifiers of a final answer, shaping by length, and the scoring of a rollout batch."""

from megatron_rlvr.rewards.box import normalized_box, strict_box
from megatron_rlvr.rewards.notation import normalize_notation
from megatron_rlvr.rewards.overlong import overlong_penalty
from megatron_rlvr.rewards.scoring import get_verifier, score_groups, training_accuracy

__all__ = [
    "get_verifier",
    "normalize_notation",
    "normalized_box",
    "overlong_penalty",
    "score_groups",
    "strict_box",
    "training_accuracy",
]
