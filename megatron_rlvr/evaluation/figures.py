"""PNG plots of results: accuracy by benchmark, pass@k, accuracy by response length. Nothing without matplotlib."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Tree = Mapping[str, Any]


def draw(trees: Mapping[str, Tree], directory: Path) -> list[Path]:
    """Draw the results of one run or several (label to results) into `directory`; returns what was written."""
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed, so no plots are drawn; install it and run `eval rescore`", file=sys.stderr)
        return []
    directory.mkdir(parents=True, exist_ok=True)
    drawn = [_accuracy(trees, directory / "accuracy.png")]
    if any(len(found["pass_at"]) > 1 for tree in trees.values() for found in tree["benchmarks"].values()):
        drawn.append(_pass_at_k(trees, directory / "pass_at_k.png"))
    if all("length_bins" in tree for tree in trees.values()):
        drawn.append(_length_bins(trees, directory / "length_bins.png"))
    return drawn


def _axes(count: int = 1) -> tuple[Any, list[Any]]:
    """A figure made without pyplot, which would keep it in a global registry, with `count` axes in a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 3.2 * count), 4), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    figure.savefig(partial, dpi=110)
    os.replace(partial, path)
    return path


def _accuracy(trees: Mapping[str, Tree], path: Path) -> Path:
    """Bars with one bootstrap standard error, the average last."""
    figure, (axes,) = _axes()
    names = list(next(iter(trees.values()))["benchmarks"])
    width = 0.8 / len(trees)
    for number, (label, tree) in enumerate(trees.items()):
        found = [*(tree["benchmarks"][name] for name in names), tree["average"][tree["headline"]]]
        places = [place + (number - (len(trees) - 1) / 2) * width for place in range(len(found))]
        errors = [entry["standard_error"] for entry in found]
        axes.bar(places, [entry["mean"] for entry in found], width, yerr=errors, capsize=2, label=label)
    axes.set_xticks(range(len(names) + 1), [*names, "average"], rotation=20)
    axes.set_ylabel("share of right responses")
    _legend(axes, trees)
    return _save(figure, path)


def _pass_at_k(trees: Mapping[str, Tree], path: Path) -> Path:
    names = [name for name, found in next(iter(trees.values()))["benchmarks"].items() if len(found["pass_at"]) > 1]
    figure, panels = _axes(len(names))
    for axes, name in zip(panels, names, strict=True):
        for label, tree in trees.items():
            curve = tree["benchmarks"][name]["pass_at"]
            axes.plot([int(k) for k in curve], list(curve.values()), "o-", markersize=4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("k")
        axes.set_title(name)
    panels[0].set_ylabel("pass@k")
    _legend(panels[0], trees)
    return _save(figure, path)


def _length_bins(trees: Mapping[str, Tree], path: Path) -> Path:
    figure, (axes,) = _axes()
    for label, tree in trees.items():
        bins = tree["length_bins"]
        accuracy = [float("nan") if value is None else value for value in bins["accuracy"]]
        axes.plot(range(len(accuracy)), accuracy, "o-", markersize=4, label=label)
    bounds: Sequence[int] = bins["upper_bounds"]
    axes.set_xticks(
        range(len(bounds)), [f"{name}\n{bound:,}" for name, bound in zip(bins["labels"], bounds, strict=True)]
    )
    axes.set_xlabel("response length: bin and its upper bound (tokens)")
    axes.set_ylabel("share of right responses")
    _legend(axes, trees)
    return _save(figure, path)


def _legend(axes: Any, trees: Mapping[str, Tree]) -> None:
    if len(trees) > 1:
        axes.legend()
