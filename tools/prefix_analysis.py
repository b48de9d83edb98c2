"""Statistics of the validation of the prefix score, from the journal's rows alone; no sampling, no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_rlvr.evaluation.correlation import Estimate, cluster_bootstrap, mean, pearson, spearman
from megatron_rlvr.replay import prefix_score
from megatron_rlvr.types import UserError

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Measured:
    """One prefix with what came of it.

    initial     p0: share of right responses in the problem's initial group; NaN where the problem had none
    success     share of right continuations
    predicted   sigma-hat = sqrt(p (1 - p)), p interpolated between p0 and 1; NaN but for prefixes of successes
    empirical   sqrt(success (1 - success))
    """

    source: str
    problem: str
    fraction: float
    position: int
    length: int
    initial: float
    success: float
    predicted: float
    empirical: float


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made: percentiles over resampled problems."""

    resamples: int = 10_000
    seed: int = 0

    def __call__(self, statistic: Callable[..., Any], states: Sequence[Measured], *columns: Any) -> Estimate:
        problems = [state.problem for state in states]
        return cluster_bootstrap(statistic, problems, *columns, resamples=self.resamples, seed=self.seed)


def measured_states(rows: Rows) -> list[Measured]:
    """All prefixes in the order they were sampled."""
    groups = [group for row in rows if row["stage"] == "initial" for group in row["groups"]]
    initial = {group["problem"]: float(np.mean(group["scores"])) for group in groups}
    found = [state for row in rows if row["stage"] == "continuations" for state in row["states"]]
    return [_measure(state, initial.get(state["problem"], math.nan)) for state in found]


def _measure(state: dict[str, Any], initial: float) -> Measured:
    success = float(np.mean(state["scores"]))
    predicted = math.nan
    if state["source"] == "success":
        predicted = float(prefix_score(state["position"], state["length"], initial))
    place = {key: state[key] for key in ("source", "problem", "fraction", "position", "length")}
    return Measured(
        **place, initial=initial, success=success, predicted=predicted, empirical=math.sqrt(success * (1 - success))
    )


def analyse(rows: Rows, bootstrap: Bootstrap) -> dict[str, Any]:
    """Everything that the report shows, as plain values: NaN is None.

    Raises UserError where no continuation of a success has been sampled.
    """
    states = measured_states(rows)
    scored = [state for state in states if state.source == "success" and 0 < state.fraction < 1]
    if not scored:
        raise UserError(
            "there are no continuations yet, so that nothing can be computed; let the sampling finish first"
        )
    groups = [group for row in rows if row["stage"] == "initial" for group in row["groups"]]
    result = {
        "problems_sampled": len(groups),
        "problems_mixed": sum(0 < sum(group["scores"]) < len(group["scores"]) for group in groups),
        "problems_used": len({state.problem for state in scored}),
        "bootstrap": asdict(bootstrap),
        "correlation": correlation_rows(scored, bootstrap),
        "prefixes": prefix_rows(states, bootstrap),
        "hint_ratio": hint_rows(states, bootstrap),
        "states": [asdict(state) for state in states],
    }
    return _without_nan(result)


def correlation_rows(states: Sequence[Measured], bootstrap: Bootstrap) -> list[dict[str, Any]]:
    """Predicted against empirical standard deviation: pooled, then within each position."""
    parts = {"pooled": list(states)}
    for fraction in sorted({state.fraction for state in states}):
        parts[f"{fraction:.0%}"] = [state for state in states if state.fraction == fraction]
    rows = []
    for name, part in parts.items():
        predicted, empirical = [s.predicted for s in part], [s.empirical for s in part]
        rows.append(
            {
                "position": name,
                "states": len(part),
                "pearson": asdict(bootstrap(pearson, part, predicted, empirical)),
                "spearman": asdict(bootstrap(spearman, part, predicted, empirical)),
                "mean_predicted": float(np.mean(predicted)),
                "mean_empirical": float(np.mean(empirical)),
            }
        )
    return rows


def prefix_rows(states: Sequence[Measured], bootstrap: Bootstrap) -> list[dict[str, Any]]:
    """What comes of prefixes of failed and of successful trajectories of the same problems, by position."""
    both = {state.problem for state in states if state.source == "failure"}
    rows = []
    for source in ("failure", "success"):
        for fraction in sorted({state.fraction for state in states if 0 < state.fraction < 1}):
            part = [s for s in states if s.source == source and s.fraction == fraction and s.problem in both]
            if not part:
                continue
            success = np.array([state.success for state in part])
            rows.append(
                {
                    "source": source,
                    "position": f"{fraction:.0%}",
                    "groups": len(part),
                    "success": asdict(bootstrap(mean, part, success)),
                    "all_fail": float(np.mean(success == 0)),
                    "mixed": float(np.mean((success > 0) & (success < 1))),
                    "all_succeed": float(np.mean(success == 1)),
                }
            )
    return rows


def hint_rows(states: Sequence[Measured], bootstrap: Bootstrap) -> list[dict[str, Any]]:
    """Success of continuations by the share of a right trajectory that is given, and its spread over problems."""
    rows = []
    for source in ("success", "expert"):
        for fraction in sorted({state.fraction for state in states if state.source == source}):
            part = [state for state in states if state.source == source and state.fraction == fraction]
            success = [state.success for state in part]
            low, high = np.quantile(success, [0.25, 0.75])
            rows.append(
                {
                    "source": source,
                    "given": fraction,
                    "problems": len(part),
                    "mean": asdict(bootstrap(mean, part, success)),
                    "percentile_25": float(low),
                    "percentile_75": float(high),
                }
            )
    return rows


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value
