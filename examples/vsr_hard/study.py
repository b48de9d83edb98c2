"""GRPO, static uniform expert prefixes and VSR on sums that the model hardly ever gets right, several seeds each.

    python examples/vsr_hard/study.py [section.key=value ...] [--dir runs/vsr_hard] [--seeds 0 1 2 3]
    python examples/vsr_hard/study.py --report [--dir runs/vsr_hard]          table and figure again, no runs

Makes a tiny model and its data, warms the model up once, and trains every method from there through
`python -m megatron_rlvr train`. Writes study.md and study.png into --dir.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
CONFIG = HERE / "vsr.yaml"
MODEL = ("--family", "qwen3", "--layers", "2", "--intermediate", "256")
TASK = ("--terms", "10", "10", "--wrong-probability", "0.45", "--train", "256", "--heldout", "128")
DEMONSTRATIONS = ("--experts", "--demonstrations", "64000")


@dataclass(frozen=True)
class Method:
    """One line of the comparison: what its runs change in vsr.yaml."""

    label: str
    overrides: tuple[str, ...]
    standard: bool = True  # part of the study; others run by --methods alone


METHODS = {
    "grpo": Method("GRPO", ("replay.ratio=0",)),
    "uniform": Method("static uniform expert prefixes", ("replay.static=true", "replay.sampling=uniform")),
    "vsr": Method("VSR", ()),
    "unscored": Method("VSR without the score", ("replay.sampling=uniform",), standard=False),
    "adaptive": Method("Reinforce-Ada-Est", ("replay.ratio=0", "rollout.allocation=adaptive"), standard=False),
}


@dataclass(frozen=True)
class Curve:
    """What one run says: at each evaluation updates, tokens sampled so far and held-out accuracy; tokens per update."""

    updates: tuple[int, ...]
    sampled: tuple[int, ...]
    accuracy: tuple[float, ...]
    tokens: float

    @property
    def mean_accuracy(self) -> float:
        """Mean over the evaluations, which are evenly spaced: the accuracy over training."""
        return float(np.mean(self.accuracy))


def read_curve(run_dir: Path) -> Curve:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    points = [(row["step"], value) for row in rows for name, value in row.items() if name.startswith("val-core/")]
    updates, accuracy = zip(*points, strict=True)
    trained = [row for row in rows if "rollout/generated_tokens" in row]
    totals = {0: 0} | {row["step"]: row["rollout/total_tokens"] for row in trained}
    tokens = np.mean([row["rollout/generated_tokens"] for row in trained])
    return Curve(updates, tuple(totals[update] for update in updates), accuracy, float(tokens))


def run(*words: str | Path) -> None:
    """One command, shown first; raises SystemExit with its last lines when it fails."""
    command = [sys.executable, *map(str, words)]
    print(f"$ {shlex.join(['python', *command[1:]])}", flush=True)
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, text=True, errors="replace", capture_output=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def paths(root: Path) -> list[str]:
    return [
        f"data.train={root}/data/train.jsonl",
        f"data.validation={root}/data/heldout.jsonl",
        f"replay.experts={root}/data/experts.jsonl",
        f"sft.demonstrations={root}/data/demonstrations.jsonl",
        f"sft.output={root}/warm",
    ]


def prepare(root: Path, ranks: int) -> None:
    """Model, data and warm-up; the learning rate of the warm-up falls to zero, so that its noise does not stay."""
    run("tools/make_tiny_model.py", root / "init", *MODEL)
    run("examples/arithmetic.py", "--out", root / "data", *TASK, *DEMONSTRATIONS)
    warm_up = ["optimizer.schedule=linear", f"actor.data_parallel={ranks}", f"run_dir={root}/warm_up"]
    run("-m", "megatron_rlvr", "sft", CONFIG, f"model.path={root}/init", *paths(root), *warm_up)


def train(root: Path, name: str, seed: int, overrides: Sequence[str]) -> None:
    started = time.monotonic()
    place = [f"run_dir={run_dir(root, name, seed)}", f"model.path={root}/warm", f"name={name}", f"seed={seed}"]
    run("-m", "megatron_rlvr", "train", CONFIG, *paths(root), *place, *METHODS[name].overrides, *overrides)
    print(f"{name}, seed {seed}: {time.monotonic() - started:.0f} s", flush=True)


def train_all(root: Path, runs: Sequence[tuple[str, int]], options: argparse.Namespace) -> None:
    """All runs, `options.jobs` at a time; after a failure those that wait are not started."""
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(train, root, name, seed, options.overrides) for name, seed in runs]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run_dir(root: Path, name: str, seed: int) -> Path:
    return root / "runs" / f"{name}_{seed}"


def table(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Markdown: one line a method, +- the standard deviation over seeds; then the differences, paired by seed."""
    lines = [
        "| method | seeds | accuracy over training | before | after | tokens per update |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in curves.items():
        over, after = [c.mean_accuracy for c in found], [c.accuracy[-1] for c in found]
        lines.append(
            f"| {METHODS[name].label} | {len(found)} | {spread(over)} | {np.mean([c.accuracy[0] for c in found]):.3f} "
            f"| {spread(after)} | {np.mean([c.tokens for c in found]):,.0f} |"
        )
    return "\n".join([*lines, "", *differences(curves)])


def differences(curves: Mapping[str, Sequence[Curve]]) -> list[str]:
    """Accuracy over training and tokens of VSR against each other method, and whether the bars are apart."""
    if "vsr" not in curves:
        return []
    vsr, lines = curves["vsr"], []
    for name, found in curves.items():
        if name == "vsr":
            continue
        gaps = [a.mean_accuracy - b.mean_accuracy for a, b in zip(vsr, found, strict=True)]
        ratio = np.mean([c.tokens for c in vsr]) / np.mean([c.tokens for c in found])
        verdict = "apart" if separated(vsr, found) else "not apart"
        lines.append(
            f"VSR - {METHODS[name].label}: {spread(gaps)} over training, ahead in {sum(gap > 0 for gap in gaps)} of "
            f"{len(gaps)} seeds, bars {verdict}; tokens per update x {ratio:.2f}.\n"
        )
    return lines


def separated(above: Sequence[Curve], below: Sequence[Curve]) -> bool:
    """True where the mean less its standard deviation over seeds is above the other's mean plus its own."""
    high, low = ([c.mean_accuracy for c in curves] for curves in (above, below))
    return bool(np.mean(high) - deviation(high) > np.mean(low) + deviation(low))


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} +- {deviation(values):.3f}"


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Accuracy against updates and against sampled tokens; a band is one standard deviation over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name, found in curves.items():
        values = np.array([curve.accuracy for curve in found])
        middle, band = values.mean(0), np.array([deviation(column) for column in values.T])
        sampled = np.mean([curve.sampled for curve in found], axis=0) / 1000
        for axis, places in zip(axes, (found[0].updates, sampled), strict=True):
            (line,) = axis.plot(places, middle)
            axis.fill_between(places, middle - band, middle + band, alpha=0.2)
        line.set_label(METHODS[name].label)
    axes[0].set(xlabel="optimizer updates", ylabel="held-out accuracy, sampled")
    axes[1].set(xlabel="sampled tokens, thousands")
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(root: Path, names: Sequence[str], seeds: Sequence[int]) -> str:
    """Write study.md and study.png; returns the table."""
    curves = {name: [read_curve(run_dir(root, name, seed)) for seed in seeds] for name in names}
    draw(curves, root / "study.png")
    text = table(curves)
    (root / "study.md").write_text(f"{text}\n![held-out accuracy](study.png)\n")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/vsr_hard"), help="everything is written here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    standard = [name for name, method in METHODS.items() if method.standard]
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=standard, help=f"default: {' '.join(standard)}"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, and ranks of the warm-up")
    parser.add_argument("--report", action="store_true", help="read finished runs, start none")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to vsr.yaml for all methods")
    options = parser.parse_intermixed_args(arguments)
    root, started = options.dir.absolute(), time.monotonic()
    if not options.report:
        if not (root / "warm").exists():
            prepare(root, options.jobs)
        train_all(root, [(name, seed) for seed in options.seeds for name in options.methods], options)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = f"{time.monotonic() - started:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU time in its runs"
    print(f"\n{report(root, options.methods, options.seeds)}\n{root}/study.md; {cost}")


if __name__ == "__main__":
    main()
