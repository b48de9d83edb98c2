"""Held-out evaluation through a rollout engine."""

from megatron_rlvr.evaluation.heldout import HeldOutResult, evaluate_held_out

__all__ = ["HeldOutResult", "evaluate_held_out"]
