"""The numbers that ReSPO prints of a training run: Figure 2's summaries, Table 8, and the tails of Tables 5 to 7."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_rlvr.observability.series import Row, points, training_accuracy

EARLY, LATE = 256, 128  # updates: until where the early peak counts, and how many the late window has
LATE_METRICS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("response length (tokens)", ("response_length/mean",)),
    ("cap-hit rate", ("response_length/clip_ratio",)),
    ("approximate KL (nats)", ("kl/behavior/k3", "actor/ppo_kl")),
    ("entropy (nats)", ("actor/entropy",)),
    ("gradient norm", ("actor/grad_norm",)),
)
DEEP_BINS = (("log W < -1", "deep"), ("-5 <= log W < -2", "-5..-2"))


@dataclass(frozen=True)
class TrainingSummary:
    """Of the training accuracy: the largest value up to update 256, time-weighted mean and standard deviation over the
    last 128 updates, the last value; and time-weighted means of other metrics over the same window (Table 8).

    window   first and last update of the late window; shorter than 128 where the run is
    """

    early_peak: float
    late_mean: float
    late_sd: float
    final: float
    window: tuple[float, float]
    late: dict[str, float]


def summarise_training(rows: Sequence[Row], batch: int = 1) -> TrainingSummary | None:
    """None for a run without rewards. `batch`: updates that share a rollout batch."""
    steps, values = training_accuracy(rows, batch)
    if not steps:
        return None
    window = (max(steps[0], steps[-1] - LATE), steps[-1])
    mean, deviation = weighted_moments(steps, values, window)
    late = {}
    for label, names in LATE_METRICS:
        found = points(rows, names)
        if found[0]:
            late[label] = weighted_moments(*found, window)[0]
    early = [value for step, value in zip(steps, values, strict=True) if step <= EARLY] or values[:1]
    return TrainingSummary(max(early), mean, deviation, values[-1], window, late)


def weighted_moments(
    steps: Sequence[float], values: Sequence[float], window: tuple[float, float]
) -> tuple[float, float]:
    """Mean and standard deviation of the linear interpolation over `window`, both by exact integration.

    Outside the points the interpolation is constant. One point, or a window without width: that value, and 0.
    """
    inside = [step for step in steps if window[0] < step < window[1]]
    places = [window[0], *inside, window[1]]
    heights = [_interpolate(steps, values, place) for place in places]
    width = window[1] - window[0]
    if width <= 0:
        return heights[-1], 0.0
    first = second = 0.0
    for (x0, x1), (y0, y1) in zip(pairwise(places), pairwise(heights), strict=True):
        first += (x1 - x0) * (y0 + y1) / 2
        second += (x1 - x0) * (y0 * y0 + y0 * y1 + y1 * y1) / 3
    mean = first / width
    return mean, math.sqrt(max(0.0, second / width - mean * mean))


@dataclass(frozen=True)
class TailBin:
    """Positive responses in a bin of log W over several updates (Table 7).

    length    tokens, weighted by counts; None: no response
    relative  length over that of all positive responses
    count     responses; None where the run did not log how many there were
    """

    label: str
    length: float | None
    relative: float | None
    count: float | None


def deep_tail(rows: Sequence[Row]) -> list[tuple[str, float, float, float]]:
    """Table 5 over the second half of the updates: bin, share of positive responses p, of their mass m, and m / p."""
    logged = [row for row in rows if any(name.startswith("tail/positive/p/") for name in row)]
    late = logged[len(logged) // 2 :]
    found = []
    for label, name in DEEP_BINS:
        share, mass = (_mean_or_zero(late, f"tail/positive/{kind}/{name}") for kind in "pm")
        if share:
            found.append((label, share, mass, mass / share))
    return found


def positive_branch(rows: Sequence[Row], batch: int = 1) -> list[tuple[int, float | None, float | None]]:
    """Table 6: rollout batch, mean log W and mean length of positive responses; the first, middle and last batch."""
    logged = [row for row in rows if row.get("log_w/positive/mean") is not None]
    numbers = sorted({-(-row["step"] // batch) for row in logged})
    if not numbers:
        return []
    chosen = dict.fromkeys([numbers[0], numbers[(len(numbers) - 1) // 2], numbers[-1]])
    found = []
    for number in chosen:
        part = [row for row in logged if -(-row["step"] // batch) == number]
        found.append((number, _mean(part, "log_w/positive/mean"), _branch_length(part)))
    return found


def tail_labels(rows: Sequence[Row]) -> list[str]:
    """The bins of log W that the run logged, from the lowest up."""
    start = "tail/positive/p/"
    found = {name.removeprefix(start) for row in rows for name in row if name.startswith(start)} - {"deep"}
    return sorted(found, key=_lower_edge)


def _lower_edge(label: str) -> float:
    if label.startswith("below_"):
        return -math.inf
    return float(label.removeprefix("from_").partition("..")[0])


def tail_lengths(rows: Sequence[Row]) -> list[TailBin]:
    """Table 7: count-weighted length by bin of log W over all updates; updates weigh alike without counts."""
    labels = tail_labels(rows)
    counts = {label: 0.0 for label in labels}
    tokens = dict(counts)
    counted = all(row.get("tail/positive/n") is not None for row in rows if "tail/positive/p/deep" in row)
    for row in rows:
        for label in labels:
            share, length = row.get(f"tail/positive/p/{label}"), row.get(f"tail/positive/mean_length/{label}")
            if share and length is not None:
                count = share * (row["tail/positive/n"] if counted else 1.0)
                counts[label] += count
                tokens[label] += count * length
    total = math.fsum(counts.values())
    if not total:
        return []
    whole = math.fsum(tokens.values()) / total
    return [_tail_bin(label, counts[label], tokens[label], whole, counted) for label in labels]


def _tail_bin(label: str, count: float, tokens: float, whole: float, counted: bool) -> TailBin:
    length = tokens / count if count else None
    return TailBin(label, length, length / whole if length is not None else None, count if counted else None)


def _branch_length(rows: Sequence[Row]) -> float | None:
    """Mean length of the positive responses: over the bins of log W by their shares, then over updates."""
    lengths = []
    for row in rows:
        names = [name.rpartition("/")[2] for name in row if name.startswith("tail/positive/mean_length/")]
        bins = [name for name in names if name != "deep"]
        share = math.fsum(row[f"tail/positive/p/{name}"] or 0.0 for name in bins)
        if share:
            parts = (row[f"tail/positive/p/{name}"] * row[f"tail/positive/mean_length/{name}"] for name in bins)
            lengths.append(math.fsum(parts) / share)
    return math.fsum(lengths) / len(lengths) if lengths else None


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return math.fsum(values) / len(values) if values else None


def _mean_or_zero(rows: Sequence[Row], name: str) -> float:
    return _mean(rows, name) or 0.0


def _interpolate(steps: Sequence[float], values: Sequence[float], place: float) -> float:
    if place <= steps[0]:
        return values[0]
    for (x0, x1), (y0, y1) in zip(pairwise(steps), pairwise(values), strict=True):
        if place <= x1:
            return y0 + (y1 - y0) * (place - x0) / (x1 - x0)
    return values[-1]
