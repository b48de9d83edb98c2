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
    return score_at(positions / lengths, rates, rewards)


def score_at(fraction: Any, success_rate: ArrayLike, reward: ArrayLike) -> Any:
    """sigma-hat at `fraction` = a in [0, 1] of the way, unchecked; scalar for scalar, exactly 0 where p0 = R."""
    probability = success_rate + fraction * np.subtract(reward, success_rate)
    return np.sqrt(np.maximum(probability * (1.0 - probability), 0.0))


def check_unit_interval(name: str, value: ArrayLike) -> None:
    """Raises ValueError where `value` leaves [0, 1] or is NaN."""
    values = np.asarray(value)
    if not np.all((values >= 0) & (values <= 1)):
        raise ValueError(f"{name} must lie in [0, 1], got {values}")
