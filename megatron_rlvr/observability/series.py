"""What metrics.jsonl of a run holds, as rows and as series over updates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.observability.metrics import is_validation_accuracy
from megatron_rlvr.types import UserError

Row = Mapping[str, Any]
Points = tuple[list[int], list[float]]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """One row per step in order: lines of the same step are merged, the later value wins (as after a resume).

    NaN and infinite values count as not logged.

    Raises UserError: there is none, or a line before the last is not JSON.
    """
    path = RunFiles(run_dir).metrics
    if not path.is_file():
        raise UserError(f"{run_dir} holds no metrics.jsonl; name a run directory that `train` or `sft` wrote")
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, parse_constant=_no_value)
            rows.setdefault(int(row["step"]), {}).update(row)
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # a run that was killed may leave its last line unfinished
                raise UserError(f"{path} line {number} is not a metrics line; remove it or run again") from None
    return [rows[step] for step in sorted(rows)]


def points(rows: Iterable[Row], names: Sequence[str]) -> Points:
    """Steps and finite values of the first of `names` that any row holds."""
    rows = list(rows)
    for name in names:
        pairs = [(row["step"], row[name]) for row in rows if _is_finite(row.get(name))]
        if pairs:
            return [step for step, _ in pairs], [float(value) for _, value in pairs]
    return [], []


def _no_value(constant: str) -> None:
    """NaN and infinities, which Python's JSON writes and others' do not: a row without that metric."""


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def held_out(rows: Iterable[Row]) -> dict[str, Points]:
    """Steps and values of the held-out accuracy by its set, in the order of the sets' names."""
    rows = list(rows)
    names = sorted({name for row in rows for name in row if is_validation_accuracy(name)})
    return {name.split("/")[1]: found for name in names if (found := points(rows, [name]))[0]}


def training_accuracy(rows: Iterable[Row], batch: int = 1) -> Points:
    """(score + 1) / 2 per rollout batch, as ReSPO plots it: at the last update of each batch, the mean over the batch.

    batch   N: updates that share a rollout batch

    Where rewards are shaped it is the penalised accuracy of ReSPO's 30B runs: the mean reward takes the score's place.
    """
    steps, values = points(rows, ("critic/rewards/mean", "critic/score/mean"))
    found: dict[int, list[float]] = {}
    for step, value in zip(steps, values, strict=True):
        found.setdefault(-(-step // batch) * batch, []).append((value + 1) / 2)
    return list(found), [math.fsum(part) / len(part) for part in found.values()]


def exponential_average(values: Sequence[float], alpha: float) -> list[float]:
    """m_t = alpha x_t + (1 - alpha) m_{t-1}, started at the first value."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else alpha * value + (1 - alpha) * out[-1])
    return out


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over at most `window` values."""
    out = []
    for i in range(len(values)):
        recent = values[max(0, i - window + 1) : i + 1]
        out.append(math.fsum(recent) / len(recent))
    return out


def phase_seconds(rows: Iterable[Row]) -> dict[str, float]:
    """Seconds of each phase over the run; `step` is the whole and left out."""
    totals: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            phase = name.removeprefix("timing_s/")
            if phase != name and phase != "step" and value is not None:
                totals[phase] = totals.get(phase, 0.0) + float(value)
    return totals
