"""The page of the `plot` command: the papers' figures and tables of one run, or of several with their seeds grouped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_rlvr.files import write_whole
from megatron_rlvr.observability.drawing import ACCURACY, DIAGNOSTICS, TAILS, can_draw, draw_curves, draw_held_out
from megatron_rlvr.observability.groups import RunGroup
from megatron_rlvr.observability.page import Section, Table, to_html, to_markdown
from megatron_rlvr.observability.series import Row, held_out
from megatron_rlvr.observability.summary import (
    LATE_METRICS,
    TrainingSummary,
    deep_tail,
    positive_branch,
    summarise_training,
    tail_lengths,
)


def write_page(
    title: str, groups: Sequence[RunGroup], output: Path, pictures: Path, alpha: float, *, markdown: bool
) -> list[Path]:
    """Draw into `pictures` and write output/report.html, and with `markdown` output/report.md; what was written."""
    sections = [_overview(groups), *_training(groups), *_held_out(groups), *_diagnostics(groups), *_tails(groups)]
    drawn: list[Path] = []
    if can_draw():
        for section in sections:
            section.pictures += _draw(section.title, groups, pictures, alpha)
            drawn += section.pictures
    output.mkdir(parents=True, exist_ok=True)
    written = [output / "report.html"]
    write_whole(written[0], to_html(title, sections).encode())
    if markdown:
        written.append(output / "report.md")
        write_whole(written[1], to_markdown(title, sections, output).encode())
    return [*written, *drawn]


_TRAINING, _HELD_OUT, _DIAGNOSTICS = "Training accuracy", "Held-out accuracy", "Diagnostics"
_TAILS = "Positive responses by importance weight"


def _draw(title: str, groups: Sequence[RunGroup], pictures: Path, alpha: float) -> list[Path]:
    if title == _HELD_OUT:
        return draw_held_out(groups, pictures)
    curves = {_TRAINING: (ACCURACY,), _DIAGNOSTICS: DIAGNOSTICS, _TAILS: TAILS}.get(title, ())
    return draw_curves(curves, groups, pictures, alpha)


def _overview(groups: Sequence[RunGroup]) -> Section:
    rows = []
    for group in groups:
        seeds = [str((run.config or {}).get("seed", "?")) for run in group.runs]
        updates = max((run.rows[-1]["step"] for run in group.runs if run.rows), default=0)
        names = ", ".join(run.name for run in group.runs)
        rows.append([group.label, names, ", ".join(seeds), str(updates), str(group.runs[0].batch)])
    return Section("", tables=[Table(["group", "runs", "seeds", "updates", "N"], rows)])


def _training(groups: Sequence[RunGroup]) -> list[Section]:
    rows = []
    for group in groups:
        found = _summaries(group)
        if found:
            means = [summary.late_mean for summary in found]
            columns = (
                [summary.early_peak for summary in found],
                means,
                [summary.late_sd for summary in found],
                [summary.final for summary in found],
            )
            spread = _number(_deviation(means)) if len(found) > 1 else "-"
            rows.append([group.label, str(len(found)), *(_number(_average(c)) for c in columns), spread])
    if not rows:
        return []
    header = ["group", "seeds", "early peak", "late mean", "temporal SD", "final", "SD of late mean over seeds"]
    text = (
        "(score + 1) / 2 per rollout batch, the reward in the score's place where it is shaped. Early peak: largest up "
        "to update 256. Late mean and temporal SD: time-weighted over the last 128 updates, or all of a shorter run."
    )
    return [Section(_TRAINING, [text], [Table(header, rows)])]


def _held_out(groups: Sequence[RunGroup]) -> list[Section]:
    rows = []
    for group in groups:
        for name in sorted({name for run in group.runs for name in held_out(run.rows)}):
            found = [held_out(run.rows)[name] for run in group.runs if name in held_out(run.rows)]
            best = [max(zip(values, steps, strict=True), key=lambda pair: pair[0]) for steps, values in found]
            ends = [_number(_average([values[place] for _, values in found])) for place in (0, -1)]
            where = ", ".join(str(step) for _, step in best)
            rows.append([group.label, name, *ends, _number(_average([value for value, _ in best])), where])
    if not rows:
        return []
    header = ["group", "set", "first", "last", "best", "at update"]
    text = "Means over seeds. The best of several evaluations on a set is not an estimate for that set."
    return [Section(_HELD_OUT, [text], [Table(header, rows)])]


def _diagnostics(groups: Sequence[RunGroup]) -> list[Section]:
    rows = []
    for group in groups:
        found = _summaries(group)
        cells = [[s.late[label] for s in found if label in s.late] for label, _ in LATE_METRICS]
        if any(cells):
            rows.append([group.label, *(_number(_average(values)) if values else "-" for values in cells)])
    tables = [Table(["group", *(label for label, _ in LATE_METRICS)], rows)] if rows else []
    text = ["Time-weighted means over the late window (ReSPO Table 8)."] if rows else []
    return [Section(_DIAGNOSTICS, text, tables)]


def _tails(groups: Sequence[RunGroup]) -> list[Section]:
    pooled = {group.label: _pooled(group) for group in groups}
    deep = [
        [label, name, f"{share:.2%}", f"{mass:.2%}", f"{ratio:.2f}x"]
        for label, rows in pooled.items()
        for name, share, mass, ratio in deep_tail(rows)
    ]
    if not deep:
        return []
    branch = [
        [group.label, str(number), _number(log_w), _number(length, 0)]
        for group in groups
        for number, log_w, length in positive_branch(pooled[group.label], group.runs[0].batch)
    ]
    bins = [
        [label, found.label, _number(found.length, 0), _number(found.relative, 2), _number(found.count, 0)]
        for label, rows in pooled.items()
        for found in tail_lengths(rows)
    ]
    tables = [
        Table(["group", "bin", "share p", "coefficient mass m", "amplification m/p"], deep),
        Table(["group", "rollout batch", "mean log W", "mean length"], branch),
        Table(["group", "log W", "mean length", "relative", "n"], bins),
    ]
    text = (
        "W is the whole response's importance weight. First table: second half of the updates (ReSPO Table 5); second: "
        "first, middle and last rollout batch (Table 6); third: all updates, lengths in tokens (Table 7)."
    )
    return [Section(_TAILS, [text], tables)]


def _summaries(group: RunGroup) -> list[TrainingSummary]:
    found = (summarise_training(run.rows, run.batch) for run in group.runs)
    return [summary for summary in found if summary is not None]


def _pooled(group: RunGroup) -> list[Row]:
    """The rows of all seeds by update."""
    return sorted((row for run in group.runs for row in run.rows), key=lambda row: row["step"])


def _average(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    mean = _average(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _number(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if digits is None else f"{value:,.{digits}f}"
