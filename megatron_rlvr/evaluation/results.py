"""From scores to what is published: one tree of numbers, and its Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_rlvr.evaluation import statistics
from megatron_rlvr.evaluation.scoring import BenchmarkScores
from megatron_rlvr.evaluation.suite import SuiteConfig

Scores = Mapping[str, BenchmarkScores]
Tree = dict[str, Any]
Kind = statistics.Average
KINDS: tuple[Kind, ...] = ("macro", "micro")


def summarise(suite: SuiteConfig, scores: Scores) -> Tree:
    """All results of one run; shares lie in [0, 1], lengths are tokens, errors are bootstrap standard errors."""
    tables = tables_of(scores)
    replicates = statistics.resample([tables], suite.bootstrap.resamples, suite.bootstrap.seed)
    tree = {
        "suite": suite.suite,
        "model": suite.model,
        "engine": suite.engine.name,
        "seed": suite.seed,
        "verifier": verifier_name(suite),
        "bootstrap": suite.bootstrap.model_dump(),
        "headline": suite.average,
        "average": {kind: _average(tables, replicates, kind) for kind in KINDS},
        "benchmarks": {name: _benchmark(scores[name], replicates[name]) for name in scores},
    }
    bins = shared_bins([scores], suite.length_bins)
    return tree | ({} if bins is None else {"length_bins": binned(bins, scores)})


def verifier_name(suite: SuiteConfig) -> str:
    """What judged, with the settings that change verdicts: "math_verify", "math_verify with guard", "custom a.b:f"."""
    verifier = suite.verifier
    name = f"custom {verifier.function}" if verifier.name == "custom" else verifier.name
    return f"{name} with guard" if verifier.guard and verifier.name == "math_verify" else name


def tables_of(scores: Scores) -> dict[str, ArrayLike]:
    """Benchmark to [problems, samples] of 0 and 1."""
    return {name: np.asarray(found.correct) for name, found in scores.items()}


def shared_bins(runs: Sequence[Scores], bins: int) -> statistics.LengthBins | None:
    """Length bins shared by all benchmarks of all runs; None where every response is at the cap."""
    pooled = [_pooled(scores) for scores in runs]
    lengths, capped = (np.concatenate([column[part] for column in pooled]) for part in (0, 1))
    return None if capped.all() else statistics.length_bins(lengths, capped, bins)


def binned(bins: statistics.LengthBins, scores: Scores) -> Tree:
    """Responses and accuracy in each bin, the benchmarks together and apart; accuracy is None in an empty bin."""
    return {
        "upper_bounds": [*bins.bounds, max(found.cap for found in scores.values())],
        "labels": list(bins.labels),
        **_in_bins(bins, scores),
        "benchmarks": {name: _in_bins(bins, {name: found}) for name, found in scores.items()},
    }


def markdown(tree: Tree) -> str:
    """The results as a page with one row like a published table, and the details below it."""
    kind = tree["headline"]
    names = list(tree["benchmarks"])
    lines = [
        f"# {tree['suite']}: {tree['model']}",
        "",
        results_table([tree]),
        "",
        f"Share of right responses (mean over samples); Avg. is the {kind} average ± its bootstrap standard error over "
        f"problems (B = {tree['bootstrap']['resamples']:,}, seed {tree['bootstrap']['seed']}). "
        f"Verifier: {tree['verifier']}.",
        "",
        *_details(tree, names),
        *_bin_lines(tree),
    ]
    return "\n".join(lines).rstrip() + "\n"


def results_table(trees: Sequence[Tree], labels: Sequence[str] | None = None) -> str:
    """One row for each run, as in ReSPO's Table 1: benchmarks, then the average with its error."""
    names = list(trees[0]["benchmarks"])
    rows = []
    for label, tree in zip(labels or [tree["model"] for tree in trees], trees, strict=True):
        cells = [f"{tree['benchmarks'][name]['mean']:.3f}" for name in names]
        average = tree["average"][tree["headline"]]
        rows.append([label, *cells, f"{average['mean']:.3f} ± {average['standard_error']:.3f}"])
    return table(["run", *names, "Avg."], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns after the first are aligned to the right."""
    clean = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in clean]
    lines.insert(1, "|---|" + "---:|" * (len(header) - 1))
    return "\n".join(lines)


def _benchmark(found: BenchmarkScores, replicates: ArrayLike) -> Tree:
    correct, samples = np.asarray(found.correct), found.samples
    tree = {
        "problems": len(correct),
        "samples": samples,
        **_estimate(statistics.mean_at_k(correct), replicates),
        "pass_at": {str(k): statistics.pass_at_k(correct, k) for k in _ks(samples)},
        "truncated": float(np.mean(found.truncated)),
        "looping": float(np.mean(found.looping)),
        "mean_length": float(np.mean(found.lengths)),
        "outcomes": found.outcomes,
    }
    return tree | ({"majority": statistics.majority_vote(found.votes, correct)} if samples > 1 else {})


def _average(tables: Mapping[str, ArrayLike], replicates: Mapping[str, statistics.Floats], kind: Kind) -> Tree:
    shares = statistics.weights(tables, kind)
    return _estimate(statistics.average(tables, kind), statistics.averaged(replicates, shares))


def _ks(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself."""
    powers = [2**power for power in range(samples.bit_length()) if 2**power < samples]
    return [*powers, samples]


def _estimate(value: float, replicates: ArrayLike) -> Tree:
    drawn = statistics.contrast(value, np.asarray(replicates)[:, 0])
    return {"mean": value, "standard_error": drawn.standard_error, "interval": [drawn.low, drawn.high]}


def _pooled(scores: Scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths, at the cap or not, and right or not, of all responses."""
    parts = [(np.ravel(s.lengths), np.ravel(s.capped), np.ravel(s.correct)) for s in scores.values()]
    lengths, capped, correct = (np.concatenate(column) for column in zip(*parts, strict=True))
    return lengths, capped, correct


def _in_bins(bins: statistics.LengthBins, scores: Scores) -> Tree:
    lengths, capped, correct = _pooled(scores)
    counts, right = bins.count(lengths, capped), bins.count(lengths, capped, correct)
    accuracy = [float(r / n) if n else None for r, n in zip(right, counts, strict=True)]
    return {"counts": [int(n) for n in counts], "accuracy": accuracy}


def _details(tree: Tree, names: Sequence[str]) -> list[str]:
    header = [
        "benchmark",
        "problems",
        "samples",
        "mean@k",
        "± SE",
        "pass@k",
        "majority",
        "truncated",
        "looping",
        "tokens",
    ]
    rows = []
    for name in names:
        found = tree["benchmarks"][name]
        best = found["pass_at"][str(found["samples"])]
        majority = f"{found['majority']:.3f}" if "majority" in found else "-"
        shares = [f"{found['mean']:.3f}", f"{found['standard_error']:.3f}", f"{best:.3f}", majority]
        rates = [f"{found['truncated']:.1%}", f"{found['looping']:.1%}", f"{found['mean_length']:.0f}"]
        rows.append([name, str(found["problems"]), str(found["samples"]), *shares, *rates])
    notes = (
        "k is the number of samples. truncated: cut at the cap; looping: the last 64 characters stand in the response "
        "at least 4 times; tokens: mean length."
    )
    return [table(header, rows), "", notes, ""]


def _bin_lines(tree: Tree) -> list[str]:
    bins = tree.get("length_bins")
    if bins is None:
        return []
    rows = [
        ["upper bound (tokens)", *(f"{bound:,}" for bound in bins["upper_bounds"])],
        ["responses", *(f"{count:,}" for count in bins["counts"])],
        ["accuracy", *("-" if value is None else f"{value:.3f}" for value in bins["accuracy"])],
    ]
    return ["## By response length", "", table(["", *bins["labels"]], rows), "", "The last bin: responses at the cap."]
