"""Rewards: verifiers of a final answer, shaping by length, and the scoring of a rollout batch."""

from megatron_rlvr.rewards.box import normalized_box, strict_box
from megatron_rlvr.rewards.custom import load_function
from megatron_rlvr.rewards.notation import normalize_notation
from megatron_rlvr.rewards.overlong import overlong_penalty
from megatron_rlvr.rewards.pool import VerifierPool
from megatron_rlvr.rewards.scoring import Scorer, get_verifier, score_groups, training_accuracy
from megatron_rlvr.rewards.verdict import Verdict

__all__ = [
    "Scorer",
    "Verdict",
    "VerifierPool",
    "get_verifier",
    "load_function",
    "normalize_notation",
    "normalized_box",
    "overlong_penalty",
    "score_groups",
    "strict_box",
    "training_accuracy",
]
