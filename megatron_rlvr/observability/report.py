"""report.md and PNG curves, drawn from run directories; needs nothing but what metrics.jsonl holds."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.files import write_whole
from megatron_rlvr.observability.metrics import is_validation_accuracy
from megatron_rlvr.types import UserError

Row = Mapping[str, Any]
Points = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Curve:
    """One plot: file name, axis label, metrics in order of preference."""

    file: str
    label: str
    names: tuple[str, ...]


CURVES: tuple[Curve, ...] = (
    Curve("reward.png", "reward", ("critic/rewards/mean", "critic/score/mean")),
    Curve("loss.png", "loss (nats)", ("actor/loss", "actor/pg_loss")),
    Curve("response_length.png", "response length (tokens)", ("response_length/mean",)),
    Curve("entropy.png", "entropy (nats)", ("actor/entropy",)),
    Curve("grad_norm.png", "gradient norm", ("actor/grad_norm",)),
)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """One row per step in order: lines of the same step are merged, the later value wins (as after a resume).

    Raises UserError: there is none, or a line before the last is not JSON.
    """
    path = RunFiles(run_dir).metrics
    if not path.is_file():
        raise UserError(f"{run_dir} holds no metrics.jsonl; name a run directory that `train` or `sft` wrote")
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows.setdefault(int(row["step"]), {}).update(row)
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # a run that was killed may leave its last line unfinished
                raise UserError(f"{path} line {number} is not a metrics line; remove it or run again") from None
    return [rows[step] for step in sorted(rows)]


def points(rows: Iterable[Row], names: Sequence[str]) -> Points:
    """Steps and finite values of the first of `names` that any row holds."""
    rows = list(rows)
    for name in names:
        pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if pairs:
            return [step for step, _ in pairs], [float(value) for _, value in pairs]
    return [], []


def held_out(rows: Iterable[Row]) -> Points:
    """Steps and values of the held-out accuracy."""
    pairs = [(row["step"], row[name]) for row in rows for name in row if is_validation_accuracy(name)]
    pairs = [(step, value) for step, value in pairs if value is not None]
    return [step for step, _ in pairs], [float(value) for _, value in pairs]


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


# Drawing. Figures are made without pyplot, which would keep them in a global registry and look for a display.


def _axes(label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("optimizer update")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    figure.savefig(partial, dpi=110)
    os.replace(partial, path)
    return path


def _can_draw() -> bool:
    """False, with a sentence, where there is no matplotlib (a bare GPU image)."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    print("matplotlib is not installed, so no curves are drawn; install it and run the plot command", file=sys.stderr)
    return False


def _window(count: int) -> int:
    return max(1, count // 20)


def _draw_curve(curve: Curve, runs: Mapping[str, Sequence[Row]], path: Path) -> Path | None:
    figure, axes = _axes(curve.label)
    drawn = False
    for name, rows in runs.items():
        steps, values = points(rows, curve.names)
        if not steps:
            continue
        drawn = True
        window = _window(len(values))
        (line,) = axes.plot(steps, moving_average(values, window), label=name)
        if window > 1:
            axes.plot(steps, values, color=line.get_color(), alpha=0.25, linewidth=0.8)
    if not drawn:
        return None
    if curve.file == "reward.png":
        _add_held_out(axes, runs)
    if len(runs) > 1:
        axes.legend()
    return _save(figure, path)


def _add_held_out(axes: Any, runs: Mapping[str, Sequence[Row]]) -> None:
    """Held-out accuracy on an axis of its own, from 0 to 1."""
    found = {name: held_out(rows) for name, rows in runs.items()}
    if not any(steps for steps, _ in found.values()):
        return
    right = axes.twinx()
    right.set_ylabel("held-out accuracy (points)")
    right.set_ylim(0, 1)
    for number, (steps, values) in enumerate(found.values()):
        color = "black" if len(found) == 1 else f"C{number}"
        right.plot(steps, values, "o--", color=color, markersize=5, linewidth=0.8)


def _draw_phases(rows: Sequence[Row], path: Path) -> Path | None:
    totals = phase_seconds(rows)
    if not totals:
        return None
    figure, axes = _axes("")
    names = sorted(totals, key=lambda name: totals[name])
    whole = math.fsum(totals.values())
    bars = axes.barh(names, [totals[name] for name in names])
    axes.bar_label(bars, [f"{totals[name] / whole:.0%}" for name in names], padding=3)
    axes.set_xlabel("seconds over the run")
    return _save(figure, path)


# Text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _summary_lines(rows: Sequence[Row]) -> list[str]:
    lines = ["| | first | last | mean of the last tenth | largest |", "|---|---|---|---|---|"]
    accuracy = held_out(rows)
    named = [("held-out accuracy", accuracy)] + [(curve.label, points(rows, curve.names)) for curve in CURVES]
    for label, (_, values) in named:
        if values:
            tail = values[-max(1, len(values) // 10) :]
            figures = (values[0], values[-1], math.fsum(tail) / len(tail), max(values))
            lines.append(f"| {label} | {' | '.join(_number(v) for v in figures)} |")
    return lines


def _phase_lines(rows: Sequence[Row]) -> list[str]:
    totals = phase_seconds(rows)
    whole = math.fsum(totals.values())
    if not whole:
        return []
    lines = ["", "## Where the time went", "", "| phase | seconds | share |", "|---|---|---|"]
    for name in sorted(totals, key=lambda name: -totals[name]):
        lines.append(f"| {name} | {totals[name]:.1f} | {totals[name] / whole:.1%} |")
    return lines


def _markdown(title: str, rows: Sequence[Row], plots: Sequence[Path], root: Path) -> str:
    lines = [f"# {title}", ""]
    if rows:
        lines += [f"Updates {rows[0]['step']} to {rows[-1]['step']}, from `metrics.jsonl`.", "", *_summary_lines(rows)]
        lines += _phase_lines(rows)
    else:
        lines.append("No update was reported.")
    if plots:
        lines += ["", "## Curves", ""]
        lines.append("Lines are trailing means over a twentieth of the run; the pale lines are the single updates.")
        lines += [f"\n![{plot.stem}]({plot.relative_to(root).as_posix()})" for plot in plots]
    return "\n".join(lines) + "\n"


def write_report(run_dir: Path) -> list[Path]:
    """Draw the curves of one run and write its report.md (without curves where matplotlib is missing).

    Returns what was written. Raises UserError: run_dir holds no readable metrics.jsonl.
    """
    rows = read_metrics(run_dir)
    files = RunFiles(run_dir)
    plots: list[Path] = []
    if _can_draw():
        drawn = [_draw_curve(curve, {run_dir.name: rows}, files.plots / curve.file) for curve in CURVES]
        drawn.append(_draw_phases(rows, files.plots / "phases.png"))
        plots = [path for path in drawn if path is not None]
    write_whole(files.report, _markdown(run_dir.absolute().name, rows, plots, run_dir).encode())
    return [files.report, *plots]


def write_comparison(run_dirs: Sequence[Path], output: Path) -> list[Path]:
    """Draw every curve with all runs in it, into `output`; returns what was written.

    Raises UserError: a run directory holds no readable metrics.jsonl.
    """
    runs: dict[str, Sequence[Row]] = {str(run_dir): read_metrics(run_dir) for run_dir in run_dirs}
    if not _can_draw():
        return []
    drawn = [_draw_curve(curve, runs, output / curve.file) for curve in CURVES]
    return [path for path in drawn if path is not None]


def plot(run_dirs: Sequence[Path], output: Path | None = None) -> list[Path]:
    """The `plot` command: a report per run, and with several runs (or `output`) the comparison as well."""
    written = [path for run_dir in run_dirs for path in write_report(run_dir)]
    if len(run_dirs) > 1 or output is not None:
        written += write_comparison(run_dirs, output or Path("comparison"))
    return written
