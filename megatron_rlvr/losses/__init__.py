"""Policy losses on packed action tokens: coefficients, losses, diagnostics. Needs torch alone."""

from megatron_rlvr.losses.aggregation import AGGREGATIONS, aggregation_count, response_weights
from megatron_rlvr.losses.alarms import alarms, step_zero_alarms
from megatron_rlvr.losses.errors import LossError, NonFiniteLogprobError
from megatron_rlvr.losses.metrics import (
    finalize_metrics,
    flatten_metrics,
    merge_metrics,
    reduction_of,
    unflatten_metrics,
)
from megatron_rlvr.losses.policy import PolicyWeights, policy_loss, policy_weights, token_coefficients
from megatron_rlvr.losses.registry import (
    available_losses,
    check_hyperparameters,
    find_loss,
    hyperparameters_for,
    uses_reference,
)
from megatron_rlvr.losses.variance import correction_variance, first_corrections, group_variances

__all__ = [
    "AGGREGATIONS",
    "LossError",
    "NonFiniteLogprobError",
    "PolicyWeights",
    "aggregation_count",
    "alarms",
    "available_losses",
    "check_hyperparameters",
    "correction_variance",
    "finalize_metrics",
    "find_loss",
    "first_corrections",
    "flatten_metrics",
    "group_variances",
    "hyperparameters_for",
    "merge_metrics",
    "policy_loss",
    "policy_weights",
    "reduction_of",
    "response_weights",
    "step_zero_alarms",
    "token_coefficients",
    "unflatten_metrics",
    "uses_reference",
]
