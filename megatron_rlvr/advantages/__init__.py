"""Advantages per group of responses, and the rule that drops groups which teach nothing. Needs torch alone."""

from megatron_rlvr.advantages.allocation import allocate_responses
from megatron_rlvr.advantages.dynamic_sampling import DynamicSamplingExhausted, RefillBudget, informative_groups
from megatron_rlvr.advantages.gigpo import gigpo_advantages
from megatron_rlvr.advantages.group import AdvantageError, group_advantages

__all__ = [
    "AdvantageError",
    "DynamicSamplingExhausted",
    "RefillBudget",
    "allocate_responses",
    "gigpo_advantages",
    "group_advantages",
    "informative_groups",
]
