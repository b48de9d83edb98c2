"""The validation of the prefix score for people: report.md and three plots."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

from megatron_rlvr.files import write_whole

_SOURCES = {"failure": "failed", "success": "successful", "expert": "expert"}


def report(result: dict[str, Any], settings: dict[str, Any]) -> str:
    """Markdown tables of what `analyse` returned."""
    group, samples = settings["group_size"], settings["samples"]
    return "\n".join(
        [
            "# Prefix score against continuations",
            "",
            f"{result['problems_sampled']:,} problems were sampled {group} times each; {result['problems_mixed']:,} "
            f"had right and wrong answers, {result['problems_used']:,} are used. {samples} continuations from each "
            f"prefix (limit {settings['rollout.max_response_length']} tokens, prefix included; temperature "
            f"{settings['rollout.temperature']:g}). In brackets: 95 % percentile intervals over "
            f"{result['bootstrap']['resamples']:,} resamples of the problems.",
            "",
            *_correlation_lines(result),
            *_prefix_lines(result),
            *_hint_lines(result),
        ]
    )


def draw(result: dict[str, Any], directory: Path) -> list[Path]:
    """The plots as PNG files in `directory`; none where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed, so nothing is drawn; install it and use --rescore")
        return []
    drawn = [_save(_scatter(result), directory / "scatter.png"), _save(_hints(result), directory / "hint_ratio.png")]
    if result["prefixes"]:
        drawn.append(_save(_prefixes(result), directory / "failed_prefixes.png"))
    return drawn


def _correlation_lines(result: dict[str, Any]) -> list[str]:
    lines = [
        "## Predicted against empirical standard deviation",
        "",
        "| prefixes | states | Pearson | Spearman | mean predicted | mean empirical |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["correlation"]:
        lines.append(
            f"| {row['position']} | {row['states']:,} | {_estimate(row['pearson'])} | {_estimate(row['spearman'])} | "
            f"{row['mean_predicted']:.3f} | {row['mean_empirical']:.3f} |"
        )
    undefined = max(row[name]["undefined"] for row in result["correlation"] for name in ("pearson", "spearman"))
    if undefined >= 0.0005:
        lines += ["", f"In up to {undefined:.1%} of the resamples a correlation had no value: one side was constant."]
    return [*lines, ""]


def _prefix_lines(result: dict[str, Any]) -> list[str]:
    lines = [
        "## Prefixes of failed and of successful trajectories of the same problems",
        "",
        "| trajectory | position | groups | mean success | all fail | mixed | all succeed |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["prefixes"]:
        shares = " | ".join(f"{row[name]:.1%}" for name in ("all_fail", "mixed", "all_succeed"))
        source = _SOURCES[row["source"]]
        lines.append(f"| {source} | {row['position']} | {row['groups']:,} | {_estimate(row['success'])} | {shares} |")
    return [*lines, ""]


def _hint_lines(result: dict[str, Any]) -> list[str]:
    lines = [
        "## Success by the share of a right trajectory that is given",
        "",
        "| trajectory | given | problems | mean success | 25th percentile | 75th percentile |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["hint_ratio"]:
        spread = f"{row['percentile_25']:.3f} | {row['percentile_75']:.3f}"
        given, source = f"{row['given']:.0%}", _SOURCES[row["source"]]
        lines.append(f"| {source} | {given} | {row['problems']:,} | {_estimate(row['mean'])} | {spread} |")
    return [*lines, ""]


def _estimate(estimate: dict[str, float | None]) -> str:
    if estimate["value"] is None:
        return "-"
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


# Figures are made without pyplot, which would keep them in a global registry and look for a display.


def _figure(x_label: str, y_label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    content = io.BytesIO()
    figure.savefig(content, dpi=110, format="png")
    write_whole(path, content.getvalue())
    return path


def _scatter(result: dict[str, Any]) -> Any:
    figure, axes = _figure("predicted standard deviation", "empirical standard deviation")
    states = [state for state in result["states"] if state["source"] == "success" and 0 < state["fraction"] < 1]
    for fraction in sorted({state["fraction"] for state in states}):
        part = [state for state in states if state["fraction"] == fraction]
        x, y = [state["predicted"] for state in part], [state["empirical"] for state in part]
        axes.scatter(x, y, s=18, alpha=0.6, label=f"{fraction:.0%}")
    axes.plot([0, 0.5], [0, 0.5], color="black", linewidth=0.8, linestyle=":")
    axes.set_title(f"pooled Pearson {_estimate(result['correlation'][0]['pearson'])}", fontsize=10)
    axes.legend(title="prefix at")
    return figure


def _prefixes(result: dict[str, Any]) -> Any:
    figure, axes = _figure("prefix at", "share")
    axes.set_ylim(0, 1)
    for source, style in (("failure", "o-"), ("success", "s--")):
        rows = [row for row in result["prefixes"] if row["source"] == source]
        positions = [row["position"] for row in rows]
        for value, color in (("success", "C0"), ("all_fail", "C3")):
            shares = [row["success"]["value"] if value == "success" else row["all_fail"] for row in rows]
            label = f"{_SOURCES[source]}: {'mean success' if value == 'success' else 'groups that all fail'}"
            axes.plot(positions, shares, style, color=color, label=label)
    axes.legend()
    return figure


def _hints(result: dict[str, Any]) -> Any:
    figure, axes = _figure("share of the trajectory that is given", "success of continuations")
    axes.set_ylim(0, 1.02)
    for source, color in (("success", "C0"), ("expert", "C1")):
        rows = [row for row in result["hint_ratio"] if row["source"] == source]
        if rows:
            given = [row["given"] for row in rows]
            low, high = ([row[f"percentile_{p}"] for row in rows] for p in (25, 75))
            axes.plot(given, [row["mean"]["value"] for row in rows], "o-", color=color, label=_SOURCES[source])
            axes.fill_between(given, low, high, color=color, alpha=0.2, linewidth=0)
    axes.legend(title="mean, 25th to 75th percentile")
    return figure
