"""What a buffer holds, as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_rlvr.replay.trajectory import StoredTrajectory

EXACT_UP_TO = 100_000  # prefixes; of a larger buffer every k-th is looked at, so that a step never waits for metrics
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def buffer_statistics(trajectories: Sequence[StoredTrajectory], size: int, step: int) -> dict[str, float]:
    """Metrics of `size` prefixes at update `step`; an empty buffer has a size and nothing else.

    replay/size, replay/trajectories        prefixes and trajectories
    replay/expert_share                     trajectories that are an expert's
    replay/age/{mean,max}                   updates since insertion, over trajectories
    replay/position/mean                    tokens of the response, over prefixes
    replay/position_fraction/mean           a = position / |tau|, over prefixes
    replay/score/{mean,p10,p50,p90}         sigma-hat, over prefixes
    replay/score/zero                       share of prefixes that are never drawn by score

    Above 100,000 prefixes the last four lines are over every k-th prefix.
    """
    counts = {"replay/size": float(size), "replay/trajectories": float(len(trajectories))}
    if not trajectories:
        return counts
    ages = np.array([step - trajectory.step for trajectory in trajectories])
    return {
        **counts,
        "replay/expert_share": float(np.mean([trajectory.expert for trajectory in trajectories])),
        "replay/age/mean": float(ages.mean()),
        "replay/age/max": float(ages.max()),
        **_over_prefixes(trajectories, 1 + (size - 1) // EXACT_UP_TO),
    }


def _over_prefixes(trajectories: Iterable[StoredTrajectory], every: int) -> dict[str, float]:
    parts = [
        (each.positions_of(k), each.fractions_of(k), each.scores_of(k)) for each, k in _thinned(trajectories, every)
    ]
    positions, fractions, scores = (np.concatenate(values) for values in zip(*parts, strict=True))
    return {
        "replay/position/mean": float(positions.mean()),
        "replay/position_fraction/mean": float(fractions.mean()),
        "replay/score/mean": float(scores.mean()),
        "replay/score/zero": float(np.mean(scores == 0.0)),
        **{f"replay/score/{name}": float(np.quantile(scores, at)) for name, at in QUANTILES.items()},
    }


def _thinned(trajectories: Iterable[StoredTrajectory], every: int) -> Iterable[tuple[StoredTrajectory, np.ndarray]]:
    """Trajectories with the indices of their prefixes among every `every`-th of the whole buffer."""
    skip = every // 2  # the middle of each stretch: from its start, equal lengths would favour early positions
    for trajectory in trajectories:
        size = trajectory.num_prefixes
        if skip < size:
            yield trajectory, np.arange(skip, size, every)
        skip = (skip - size) % every if skip < size else skip - size
