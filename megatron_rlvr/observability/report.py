"""Reports from run directories: report.md when a run ends, and what the `plot` command draws of one run or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.files import write_whole
from megatron_rlvr.observability.comparison import write_page
from megatron_rlvr.observability.drawing import Curve, can_draw, draw_phases, new_axes, save
from megatron_rlvr.observability.groups import group_runs, read_run
from megatron_rlvr.observability.page import Section, Table, to_markdown
from megatron_rlvr.observability.series import Row, held_out, moving_average, phase_seconds, points
from megatron_rlvr.observability.summary import summarise_training
from megatron_rlvr.types import UserError

# Few, for they are drawn at the end of every run; the plot command draws more.
CURVES: tuple[Curve, ...] = (
    Curve("reward.png", "reward", ("critic/rewards/mean", "critic/score/mean")),
    Curve("loss.png", "loss (nats)", ("actor/loss", "actor/pg_loss")),
    Curve("response_length.png", "response length (tokens)", ("response_length/mean",)),
    Curve("entropy.png", "entropy (nats)", ("actor/entropy",)),
    Curve("grad_norm.png", "gradient norm", ("actor/grad_norm",)),
)
_NOTE = "Lines are trailing means over a twentieth of the run; the pale lines are the single updates."


def write_report(run_dir: Path) -> list[Path]:
    """Draw the curves of one run and write its report.md (without curves where matplotlib is missing).

    Returns what was written. Raises UserError: run_dir holds no readable metrics.jsonl.
    """
    run = read_run(run_dir)
    files = RunFiles(run_dir)
    plots: list[Path] = []
    if can_draw():
        drawn = [_draw_curve(curve, run.rows, files.plots / curve.file) for curve in CURVES]
        drawn.append(draw_phases(phase_seconds(run.rows), files.plots / "phases.png"))
        plots = [path for path in drawn if path is not None]
    sections = [_summary(run.rows, run.batch), *_phases(run.rows)]
    sections += [Section("Curves", [_NOTE], pictures=plots)] if plots else []
    write_whole(files.report, to_markdown(run.name, sections, run_dir).encode())
    return [files.report, *plots]


def plot(run_dirs: Sequence[Path], output: Path | None = None, alpha: float = 0.1) -> list[Path]:
    """The `plot` command: report.md of each run; report.html of the one run, or of several (or in `output`) of all.

    alpha   weight of the newest value in the exponential averages: 0.1 as in ReSPO, 0.2 as in Proximal KL

    Raises UserError: a run directory holds no readable metrics.jsonl, is named twice, or alpha is not in (0, 1].
    """
    if not 0 < alpha <= 1:
        raise UserError(f"--ema is {alpha:g}; give a weight above 0 and up to 1, such as 0.1")
    if len({path.resolve() for path in run_dirs}) < len(run_dirs):
        raise UserError("a run directory is named twice; name each once")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    written = [path for run in runs for path in write_report(run.path)]
    if len(runs) == 1 and output is None:
        (run,) = runs
        pictures = RunFiles(run.path).plots / "page"
        return written + write_page(run.name, group_runs(runs), run.path, pictures, alpha, markdown=False)
    target = output or Path("comparison")
    title = f"{len(runs)} runs" if len(runs) > 1 else runs[0].name
    written += write_page(title, group_runs(runs), target, target, alpha, markdown=True)
    return written


def _draw_curve(curve: Curve, rows: Sequence[Row], path: Path) -> Path | None:
    steps, values = points(rows, curve.names)
    if not steps:
        return None
    figure, axes = new_axes(curve.label)
    window = max(1, len(values) // 20)
    (line,) = axes.plot(steps, moving_average(values, window))
    if window > 1:
        axes.plot(steps, values, color=line.get_color(), alpha=0.25, linewidth=0.8)
    if curve.file == "reward.png":
        _add_held_out(axes, rows)
    return save(figure, path)


def _add_held_out(axes: Any, rows: Sequence[Row]) -> None:
    """Held-out accuracy on an axis of its own, from 0 to 1."""
    found = held_out(rows)
    if not found:
        return
    right = axes.twinx()
    right.set_ylabel("held-out accuracy (points)")
    right.set_ylim(0, 1)
    for number, (name, (steps, values)) in enumerate(found.items()):
        color = "black" if len(found) == 1 else f"C{number + 1}"
        right.plot(steps, values, "o--", color=color, markersize=5, linewidth=0.8, label=name)
    if len(found) > 1:
        right.legend()


def _summary(rows: Sequence[Row], batch: int) -> Section:
    if not rows:
        return Section("", ["No update was reported."])
    table = Table(["", "first", "last", "mean of the last tenth", "largest"], _summary_rows(rows))
    text = [f"Updates {rows[0]['step']} to {rows[-1]['step']}, from `metrics.jsonl`."]
    found = summarise_training(rows, batch)
    if found is not None:
        start, end = (f"{place:g}" for place in found.window)
        text.append(
            f"Training accuracy: early peak {found.early_peak:.4g} (up to update 256), late mean {found.late_mean:.4g} "
            f"with temporal SD {found.late_sd:.2g} (updates {start} to {end}), final {found.final:.4g}."
        )
    return Section("", text, [table])


def _summary_rows(rows: Sequence[Row]) -> list[list[str]]:
    sets = held_out(rows)
    named = [("held-out accuracy" if len(sets) == 1 else f"accuracy on {name}", found) for name, found in sets.items()]
    named += [(curve.label, points(rows, curve.names)) for curve in CURVES]
    lines = []
    for label, (_, values) in named:
        if values:
            tail = values[-max(1, len(values) // 10) :]
            figures = (values[0], values[-1], math.fsum(tail) / len(tail), max(values))
            lines.append([label, *(f"{value:.4g}" for value in figures)])
    return lines


def _phases(rows: Sequence[Row]) -> list[Section]:
    totals = phase_seconds(rows)
    whole = math.fsum(totals.values())
    if not whole:
        return []
    names = sorted(totals, key=lambda name: -totals[name])
    lines = [[name, f"{totals[name]:.1f}", f"{totals[name] / whole:.1%}"] for name in names]
    return [Section("Where the time went", tables=[Table(["phase", "seconds", "share"], lines)])]
