"""Contrasts between runs whose numbers of samples differ."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rlvr.evaluation.compare import compare
from megatron_rlvr.evaluation.results import Scores
from megatron_rlvr.evaluation.scoring import BenchmarkScores
from megatron_rlvr.evaluation.suite import load_suite


def scored(correct: np.ndarray) -> BenchmarkScores:
    table = correct.astype(int).tolist()
    zeros = np.zeros_like(correct, dtype=int).tolist()
    ids = [f"p:{number}" for number in range(len(correct))]
    votes: list[list[str | None]] = [[None] * correct.shape[1] for _ in correct]
    lengths = (np.arange(correct.size).reshape(correct.shape) % 7 + 1).tolist()
    return BenchmarkScores(ids, ["1"] * len(ids), 100, table, lengths, zeros, zeros, votes, {})


def test_a_micro_contrast_weighs_each_run_by_its_own_samples() -> None:
    """Its bootstrap lies around the difference of the two averages, with the error of the closed form."""
    generator = np.random.default_rng(0)
    shapes = {"first": {"a": (40, 8), "b": (60, 1)}, "second": {"a": (40, 1), "b": (60, 8)}}
    chance = {"a": 0.9, "b": 0.2}
    tables = {
        run: {name: generator.random(shape) < chance[name] for name, shape in sizes.items()}
        for run, sizes in shapes.items()
    }
    runs: dict[str, Scores] = {
        run: {name: scored(table) for name, table in found.items()} for run, found in tables.items()
    }
    overrides = ["model=m", "average=micro", "bootstrap.resamples=4000", "verifier.name=normalized_box"]
    suite = load_suite("respo", overrides)
    (found,) = compare(runs, {"first": suite, "second": suite})["contrasts"]
    micro = {run: np.concatenate([t.ravel() for t in found.values()]).mean() for run, found in tables.items()}
    variance = 0.0
    for name in chance:
        share = {run: t[name].size / sum(x.size for x in t.values()) for run, t in tables.items()}
        gaps = share["second"] * tables["second"][name].mean(1) - share["first"] * tables["first"][name].mean(1)
        variance += gaps.var() / len(gaps)
    average = found["average"]
    assert average["difference"] == pytest.approx(micro["second"] - micro["first"])
    assert average["low"] < average["difference"] < average["high"]
    assert average["standard_error"] == pytest.approx(variance**0.5, rel=0.05)
