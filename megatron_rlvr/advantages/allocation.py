"""How many responses each prompt gets when a fixed budget is shared out by difficulty (VSR's control Reinforce-Ada)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rlvr.advantages.group import AdvantageError


def allocate_responses(
    successes: Sequence[int], samples: int, total: int, *, low: int = 4, high: int = 32
) -> list[int]:
    """[P] -> [P]: N_x in [low, high] with sum exactly `total`, larger where a pilot found the prompt harder.

    successes   right answers of each prompt among its `samples` pilot responses (which count towards N_x)
    total       responses of the whole batch, prompts * group size

    N_x is proportional to 1 / p_x, the weight that the log-likelihood objective of Reinforce-Ada (arXiv 2510.04996)
    gives a prompt of success rate p_x, clipped to the bounds; p_x is estimated as (successes + 1) / (samples + 2), so
    that no prompt is infinitely hard. What rounding leaves over goes to the largest remainders, earlier prompts first.
    Raises AdvantageError for a total that the bounds cannot reach.
    """
    count = len(successes)
    if not count * low <= total <= count * high:
        raise AdvantageError(
            f"{total} responses cannot be shared out over {count} prompts with {low} to {high} each: choose a "
            "rollout.group_size between the bounds of rollout.allocation_range."
        )
    weights = (samples + 2) / (np.asarray(successes, np.float64) + 1)
    shares = np.clip(_scale(weights, total, low, high) * weights, low, high)
    return _round(shares, total)


def _scale(weights: np.ndarray, total: int, low: int, high: int) -> float:
    """The factor with which the clipped shares sum to `total`; the sum grows with it, so halving finds it."""
    below, above = 0.0, high / weights.min()
    for _ in range(200):
        middle = (below + above) / 2
        if np.clip(middle * weights, low, high).sum() < total:
            below = middle
        else:
            above = middle
    return above


def _round(shares: np.ndarray, total: int) -> list[int]:
    """Whole shares with the sum `total`: fewer are missing after rounding down than have a remainder."""
    sizes = np.floor(shares + 1e-9).astype(int)
    largest = np.argsort(sizes - shares, kind="stable")
    sizes[largest[: total - sizes.sum()]] += 1
    return sizes.tolist()
