"""Curves over updates as PNG files: one line a group, with a band of one standard deviation where it has seeds."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rlvr.observability.groups import LoggedRun, RunGroup
from megatron_rlvr.observability.series import Points, exponential_average, held_out, points, training_accuracy


@dataclass(frozen=True)
class Curve:
    """One plot: file name, axis label, metrics in order of preference."""

    file: str
    label: str
    names: tuple[str, ...]


# ReSPO Figures 2, 5 and 6, and what Proximal KL adds; the first, training accuracy, is no metric but made of one.
ACCURACY = Curve("training_accuracy.png", "training accuracy", ("critic/rewards/mean", "critic/score/mean"))
DIAGNOSTICS: tuple[Curve, ...] = (
    Curve("loss.png", "loss (nats)", ("actor/loss", "actor/pg_loss")),
    Curve("response_length.png", "response length (tokens)", ("response_length/mean",)),
    Curve("cap_hits.png", "responses at the cap (share)", ("response_length/clip_ratio",)),
    Curve("entropy.png", "entropy (nats)", ("actor/entropy",)),
    Curve("kl.png", "KL from the sampler, k3 (nats)", ("kl/behavior/k3", "actor/ppo_kl")),
    Curve("grad_norm.png", "gradient norm", ("actor/grad_norm",)),
)
TAILS: tuple[Curve, ...] = (
    Curve("log_w.png", "mean log W, positive responses (nats)", ("log_w/positive/mean",)),
    Curve("amplification.png", "amplification of log W < -1, positive", ("tail/positive/amplification/deep",)),
    Curve("ess.png", "effective sample size after the kernel (share)", ("ess/kernel/share",)),
    Curve("clipped.png", "tokens clipped or clamped (share)", ("actor/pg_clipfrac",)),
)


def can_draw() -> bool:
    """False, with a sentence, where there is no matplotlib (a bare GPU image)."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    print("matplotlib is not installed, so no curves are drawn; install it and run the plot command", file=sys.stderr)
    return False


def new_axes(label: str) -> tuple[Any, Any]:
    """A figure made without pyplot, which would keep it in a global registry and look for a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("optimizer update")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: Any, path: Path) -> Path:
    """Write the picture whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    figure.savefig(partial, dpi=110)
    os.replace(partial, path)
    return path


def draw_curves(curves: Sequence[Curve], groups: Sequence[RunGroup], directory: Path, alpha: float) -> list[Path]:
    """Each curve that any run has, smoothed by an exponential average of weight `alpha`; what was written."""
    drawn = []
    for curve in curves:
        path = draw_groups(curve.label, groups, partial(_series, curve), directory / curve.file, alpha)
        drawn += [path] if path is not None else []
    return drawn


def draw_held_out(groups: Sequence[RunGroup], directory: Path) -> list[Path]:
    """Held-out accuracy, a picture for each set, unsmoothed."""
    names = sorted({name for group in groups for run in group.runs for name in held_out(run.rows)})
    drawn = []
    for name in names:
        target = directory / f"held_out_{name}.png"
        path = draw_groups(f"accuracy on {name}", groups, partial(_held_out, name), target, 1.0, marker="o")
        drawn += [path] if path is not None else []
    return drawn


def draw_groups(
    label: str,
    groups: Sequence[RunGroup],
    series: Callable[[LoggedRun], Points],
    path: Path,
    alpha: float,
    marker: str | None = None,
) -> Path | None:
    """One picture of all groups; None where no run has the series."""
    found = {group.label: [p for run in group.runs if (p := series(run))[0]] for group in groups}
    if not any(found.values()):
        return None
    figure, axes = new_axes(label)
    for number, (name, members) in enumerate(found.items()):
        if members:
            _draw_group(axes, name, members, f"C{number}", alpha, marker)
    if len(groups) > 1:
        axes.legend()
    return save(figure, path)


def band(members: Sequence[Points]) -> tuple[list[int], list[float], list[float]]:
    """Steps that all members have, the mean over members there, and their standard deviation (0 for one member)."""
    tables = [dict(zip(*member, strict=True)) for member in members]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    means, deviations = [], []
    for step in steps:
        values = [table[step] for table in tables]
        mean = math.fsum(values) / len(values)
        means.append(mean)
        squares = math.fsum((value - mean) ** 2 for value in values)
        deviations.append(math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0)
    return steps, means, deviations


def _draw_group(axes: Any, name: str, members: Sequence[Points], color: str, alpha: float, marker: str | None) -> None:
    smooth = [(steps, exponential_average(values, alpha)) for steps, values in members]
    steps, means, deviations = band(smooth)
    if len(members) == 1 and alpha < 1:
        axes.plot(*members[0], color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps, means, color=color, label=name, marker=marker, markersize=4)
    if len(members) > 1:
        low, high = ([m + sign * d for m, d in zip(means, deviations, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)


def _held_out(name: str, run: LoggedRun) -> Points:
    return held_out(run.rows).get(name, ([], []))


def _series(curve: Curve, run: LoggedRun) -> Points:
    return training_accuracy(run.rows, run.batch) if curve is ACCURACY else points(run.rows, curve.names)


def draw_phases(totals: Mapping[str, float], path: Path) -> Path | None:
    """Seconds of each phase as bars with their shares."""
    if not totals:
        return None
    figure, axes = new_axes("")
    names = sorted(totals, key=lambda name: totals[name])
    whole = math.fsum(totals.values())
    bars = axes.barh(names, [totals[name] for name in names])
    axes.bar_label(bars, [f"{totals[name] / whole:.0%}" for name in names], padding=3)
    axes.set_xlabel("seconds over the run")
    return save(figure, path)
