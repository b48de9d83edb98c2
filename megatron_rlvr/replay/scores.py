"""How uncertain the outcome of a continuation is, guessed from numbers that the rollout has already paid for."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray


@overload
def prefix_score(position: float, length: float, success_rate: float, reward: float = 1.0) -> float: ...
@overload
def prefix_score(
    position: ArrayLike, length: ArrayLike, success_rate: ArrayLike, reward: ArrayLike = 1.0
) -> NDArray[np.float64] | float: ...
def prefix_score(
    position: ArrayLike, length: ArrayLike, success_rate: ArrayLike, reward: ArrayLike = 1.0
) -> NDArray[np.float64] | float:
    """sigma-hat = sqrt(p (1 - p)), p = (1 - a) p0 + a R, a = position / length (VSR, Algorithm 1 line 9).

    position      tokens (or steps) of the trajectory before the prefix ends, in [0, length]
    length        |tau| in the same unit, > 0
    success_rate  p0 in [0, 1]: share of successes in the fresh group of the prompt
    reward        R in [0, 1]: the trajectory's own outcome, 1 for success

    Scalars give a scalar, arrays broadcast. Zero where the outcome counts as known: p0 = R, or position = length
    with R in {0, 1}. Raises ValueError for values outside these ranges, NaN included.
    """
    positions, lengths = np.asarray(position, dtype=np.float64), np.asarray(length, dtype=np.float64)
    rates, rewards = np.asarray(success_rate, dtype=np.float64), np.asarray(reward, dtype=np.float64)
    if not np.all((lengths > 0) & (positions >= 0) & (positions <= lengths)):
        raise ValueError(f"position must lie in [0, length] with length > 0, got {positions} of {lengths}")
    check_unit_interval("success_rate", rates)
    check_unit_interval("reward", rewards)
    probability = success_at(positions / lengths, rates, rewards)
    return np.sqrt(probability * (1.0 - probability))


def success_at(fraction: Any, success_rate: Any, reward: Any) -> Any:
    """p at `fraction` = a of the way, unchecked: rounding never takes it out of [0, 1], and p0 = R gives exactly p0."""
    return success_rate + fraction * (reward - success_rate)


def check_unit_interval(name: str, value: float | NDArray[np.float64]) -> None:
    """Raises ValueError where `value` leaves [0, 1] or is NaN."""
    inside = 0.0 <= value <= 1.0 if isinstance(value, float) else np.all((value >= 0.0) & (value <= 1.0))
    if not inside:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")
