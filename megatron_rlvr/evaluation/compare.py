"""Paired contrasts between evaluated runs: the same resampled problems in both, and length bins shared by all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from megatron_rlvr.evaluation import statistics
from megatron_rlvr.evaluation.results import (
    Scores,
    binned,
    results_table,
    shared_bins,
    summarise,
    table,
    tables_of,
    verifier_name,
)
from megatron_rlvr.evaluation.suite import SuiteConfig
from megatron_rlvr.types import UserError

Tree = dict[str, Any]


def compare(runs: Mapping[str, Scores], suites: Mapping[str, SuiteConfig]) -> Tree:
    """Results of all runs with the first one's average, bootstrap and bins, and a contrast for each pair of them.

    runs     label to scores; suites: label to the suite that the run was evaluated with

    A contrast is second minus first. Raises UserError where the runs were not asked the same problems.
    """
    labels = list(runs)
    suite = suites[labels[0]]
    for label in labels[1:]:
        check_same_problems(labels[0], runs[labels[0]], label, runs[label])
    trees = {label: summarise(suite, scores) | _own(suites[label]) for label, scores in runs.items()}
    bins = shared_bins(list(runs.values()), suite.length_bins)
    for label, tree in trees.items():
        tree.pop("length_bins", None)
        if bins is not None:
            tree["length_bins"] = binned(bins, runs[label])
    tables = {label: tables_of(scores) for label, scores in runs.items()}
    replicates = statistics.resample(list(tables.values()), suite.bootstrap.resamples, suite.bootstrap.seed)
    contrasts = [
        {"first": labels[a], "second": labels[b], **_contrasts(tables, replicates, suite.average, a, b)}
        for a, b in combinations(range(len(labels)), 2)
    ]
    return {"runs": trees, "contrasts": contrasts}


def check_same_problems(first: str, before: Scores, second: str, after: Scores) -> None:
    """Raise UserError unless both have the same benchmarks with the same problems in the same order."""
    if list(before) != list(after):
        raise UserError(
            f"{first} has the benchmarks {', '.join(before)}, but {second} has {', '.join(after)}; compare runs of one "
            "suite"
        )
    for name in before:
        if (before[name].ids, before[name].answers) != (after[name].ids, after[name].answers):
            raise UserError(
                f"{first} and {second} were asked different problems of {name}; evaluate both on the same file"
            )


def markdown(tree: Tree) -> str:
    """The comparison as a page: one row a run, contrasts, and accuracy by response length."""
    runs: Mapping[str, Tree] = tree["runs"]
    first = next(iter(runs.values()))
    lines = [
        f"# {first['suite']}: {len(runs)} runs",
        "",
        results_table(list(runs.values()), list(runs)),
        "",
        f"Avg.: {first['headline']} average ± bootstrap standard error over problems.",
        "",
        "## Paired contrasts",
        "",
        *_verifier_lines(runs),
        *_contrast_lines(tree["contrasts"]),
        *_bin_lines(runs),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _own(suite: SuiteConfig) -> Tree:
    """What a run's results say of how it was evaluated itself."""
    return {"model": suite.model, "engine": suite.engine.name, "seed": suite.seed, "verifier": verifier_name(suite)}


def _verifier_lines(runs: Mapping[str, Tree]) -> list[str]:
    if len({tree["verifier"] for tree in runs.values()}) == 1:
        return []
    judges = ", ".join(f"{label} by {tree['verifier']}" for label, tree in runs.items())
    return [f"The runs were judged differently ({judges}): `eval rescore` them alike before reading a difference.", ""]


def _contrasts(
    tables: Mapping[str, Any], replicates: Mapping[str, Any], kind: statistics.Average, a: int, b: int
) -> Tree:
    first, second = (list(tables.values())[number] for number in (a, b))
    drawn = {name: values[:, b] - values[:, a] for name, values in replicates.items()}
    ours, theirs = (statistics.averaged(replicates, statistics.weights(scores, kind)) for scores in (first, second))
    total = theirs[:, b] - ours[:, a]  # each with its own numbers of samples, which weigh in a micro average
    whole = statistics.average(second, kind) - statistics.average(first, kind)
    return {
        "average": asdict(statistics.contrast(whole, total)),
        "benchmarks": {
            name: asdict(
                statistics.contrast(statistics.mean_at_k(second[name]) - statistics.mean_at_k(first[name]), drawn[name])
            )
            for name in first
        },
    }


def _contrast_lines(contrasts: Sequence[Tree]) -> list[str]:
    rows = []
    for found in contrasts:
        for name, entry in (*found["benchmarks"].items(), ("**average**", found["average"])):
            interval = f"[{entry['low']:+.3f}, {entry['high']:+.3f}]"
            pair = f"{found['second']} − {found['first']}"
            rows.append([pair, name, f"{entry['difference']:+.3f}", f"{entry['standard_error']:.3f}", interval])
    note = "The same resampled problems in both runs; the interval is the bootstrap's 2.5 % to 97.5 %."
    return [table(["contrast", "benchmark", "difference", "SE", "95 % interval"], rows), "", note, ""]


def _bin_lines(runs: Mapping[str, Tree]) -> list[str]:
    if any("length_bins" not in tree for tree in runs.values()):
        return []
    bins = next(iter(runs.values()))["length_bins"]
    rows = [["upper bound (tokens)", *(f"{bound:,}" for bound in bins["upper_bounds"])]]
    for label, tree in runs.items():
        rows.append([f"{label}: responses", *(f"{count:,}" for count in tree["length_bins"]["counts"])])
    for label, tree in runs.items():
        accuracy = tree["length_bins"]["accuracy"]
        rows.append([f"{label}: accuracy", *("-" if value is None else f"{value:.3f}" for value in accuracy)])
    return ["## By response length, bins shared by all runs", "", table(["", *bins["labels"]], rows)]
