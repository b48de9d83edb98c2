"""The emergent curriculum of variance-driven resampling (VSR Fig. 2): `python examples/vsr_gridworld/run.py [FOLDER]`.

Writes figure.png and table.md (default folder runs/vsr_gridworld) in under a minute on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
from maze import LAYOUT, Maze, read_maze
from network_variance import variance_rows
from training import History, Settings, train

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LEVEL = 0.9


def rank_correlation(values: np.ndarray) -> float:
    """Spearman's correlation of a curve with time; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float(np.corrcoef(np.arange(len(values)), ranks)[0, 1])


def snapshots(updates: int) -> list[int]:
    return [0, updates // 20, updates // 10, updates // 5, updates]


def main(folder: Path, settings: Settings) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    maze = read_maze()
    on_policy, driven = train(maze, False, settings), train(maze, True, settings)
    draw(maze, on_policy, driven, settings, folder / "figure.png")
    text = table(on_policy, driven, settings) + "\n" + variance_table(maze, settings)
    (folder / "table.md").write_text(text)
    print(text + f"\nwrote {folder / 'figure.png'}")


def table(on_policy: History, driven: History, settings: Settings) -> str:
    """The figure's numbers as Markdown: both learning curves, and where mu is."""
    slow, fast = on_policy.updates_to(LEVEL), driven.updates_to(LEVEL)
    correlations = [rank_correlation(curve) for curve in driven.distance.T.numpy()]
    lines = ["| update | success, d | success, mu | mean distance to G under mu | mu's peak, moves from G |"]
    lines.append("|" + "---|" * 5)
    for update in snapshots(settings.updates):
        cells = [f"{x[update].mean():.2f} +- {x[update].std():.2f}" for x in (on_policy.success, driven.success)]
        peak = driven.peak[update].median()
        lines.append(f"| {update} | {cells[0]} | {cells[1]} | {driven.distance[update].mean():.2f} | {peak:.0f} |")
    return "\n".join(
        [
            *lines,
            "",
            f"Updates to {LEVEL:.0%} success, {settings.seeds} seeds: d {slow.double().mean():.0f} "
            f"+- {slow.double().std():.0f}, mu {fast.double().mean():.0f} +- {fast.double().std():.0f}; "
            f"mu first in {int((fast < slow).sum())} of {settings.seeds}.",
            f"Rank correlation of mu's mean distance with time: {min(correlations):.2f} to {max(correlations):.2f} "
            f"over the seeds, {rank_correlation(driven.distance.mean(1).numpy()):.3f} for their mean.",
            "",
        ]
    )


def variance_table(maze: Maze, settings: Settings) -> str:
    """Variance of the importance-weighted estimator (Eq. 6) under both proposals along training, as Markdown."""
    lines = ["| update | V(d) | V(mu) | V(mu) / V(d) | seeds where Assumption B.6 holds |", "|" + "---|" * 5]
    for update, slow, fast, regular in variance_rows(maze, settings, snapshots(settings.updates)):
        lines.append(f"| {update} | {slow:.4f} | {fast:.4f} | {fast / slow:.2f} | {regular} of {settings.seeds} |")
    return "\n".join([*lines, ""])


def draw(maze: Maze, on_policy: History, driven: History, settings: Settings, target: Path) -> None:
    """d, sigma and mu over the maze at five times, and the curves with bands of one standard deviation over the seeds.

    Each map is the mean over the seeds, in shades from 0 to its own largest cell.
    """
    figure = plt.figure(figsize=(10, 9), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(2.1, 1), squeeze=False)[:, 0]
    quantities = (
        ("d", driven.occupancy, "Blues"),
        ("sigma", driven.deviation, "Greens"),
        ("mu", driven.proposal, "Reds"),
    )
    times = snapshots(settings.updates)
    for row, (name, values, colors) in zip(upper.subplots(3, len(times)), quantities, strict=True):
        for axis, update in zip(row, times, strict=True):
            _draw_maze(axis, maze, values[update].mean(0).numpy(), colors, f"{name}, update {update}")
    left, right = lower.subplots(1, 2)
    for name, history, color in (("states from d", on_policy, "tab:gray"), ("states from mu", driven, "tab:red")):
        _band(left, history.success.numpy(), color, name)
    left.axhline(LEVEL, color="black", linewidth=0.6, linestyle=":")
    left.set(xlabel="update", ylabel="success from S")
    left.legend(frameon=False)
    _band(right, driven.distance.numpy(), "tab:red", "mean over mu")
    right.set(xlabel="update", ylabel="moves to G")
    right.legend(frameon=False)
    figure.savefig(target, dpi=72)
    plt.close(figure)


def _draw_maze(axis, maze: Maze, mass: np.ndarray, colors: str, title: str) -> None:
    image = np.full((len(LAYOUT), len(LAYOUT[0])), np.nan)
    for cell, value in zip(maze.cells, mass, strict=True):
        image[cell] = value
    axis.set_facecolor("black")
    axis.imshow(image, cmap=colors, vmin=0)
    for number, name in ((maze.start, "S"), (maze.goal, "G")):
        row, column = maze.cells[number]
        axis.text(column, row, name, ha="center", va="center")
    axis.set(xticks=[], yticks=[], title=title)


def _band(axis, curves: np.ndarray, color: str, name: str) -> None:
    mean, spread = curves.mean(1), curves.std(1, ddof=1)
    axis.plot(mean, color=color, label=name)
    axis.fill_between(range(len(mean)), mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/vsr_gridworld"), Settings())
