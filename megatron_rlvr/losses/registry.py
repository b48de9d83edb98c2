"""The table of policy losses. To add one: write its file with a `LOSS`, then add it to the line below."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_rlvr.losses import cispo, grpo, gspo, pg, proximal_kl, respo, sft, vespo
from megatron_rlvr.losses.core import PolicyLoss
from megatron_rlvr.losses.errors import LossError, unknown_name
from megatron_rlvr.losses.hyperparameters import Hyperparameters, build

_MODULES = (respo, vespo, grpo, gspo, cispo, pg, proximal_kl, sft)
_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType({module.LOSS.name: module.LOSS for module in _MODULES})


def available_losses() -> tuple[str, ...]:
    """The names that `token_coefficients` and `policy_loss` accept."""
    return tuple(_LOSSES)


def find_loss(name: str) -> PolicyLoss:
    """The registry entry of a loss: its hyperparameter type, whether it needs reference log-probs, its kernel."""
    if name not in _LOSSES:
        raise unknown_name("loss", str(name), _LOSSES)
    return _LOSSES[name]


def hyperparameters_for(name: str) -> type[Hyperparameters]:
    """The frozen dataclass that holds and checks this loss's hyperparameters."""
    return find_loss(name).hyperparameters


def check_hyperparameters(name: str, values: Mapping[str, Any]) -> list[str]:
    """Refuse bad names and values; return warnings about allowed values that break a condition of the paper."""
    return build(name, hyperparameters_for(name), values).warnings()


def uses_reference(name: str, enabled: bool | None) -> bool:
    """Whether a run with this loss keeps a reference policy; `enabled` None: where the loss needs one.

    Raises LossError for a loss that needs one when it is switched off.
    """
    loss = find_loss(name)
    if enabled is False and loss.reference == "required":
        raise LossError(f"reference.enabled is false, but loss {name!r} needs a reference policy: leave it out.")
    return loss.reference == "required" if enabled is None else enabled
