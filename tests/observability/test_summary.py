"""The summaries against golden values, closed forms and tables counted by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_rlvr.observability.series import exponential_average, training_accuracy
from megatron_rlvr.observability.summary import (
    deep_tail,
    positive_branch,
    summarise_training,
    tail_labels,
    tail_lengths,
    weighted_moments,
)

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden" / "statistics.json"


def test_training_summaries_are_the_golden_ones() -> None:
    if not GOLDEN.is_file():
        pytest.skip("the golden statistics are not on this machine")
    golden = json.loads(GOLDEN.read_text())["training_curve"]
    rows = [{"step": step, "critic/score/mean": score} for step, score in golden["score_mean"]]
    found = summarise_training(rows, batch=16)
    assert found is not None and found.window == (896, 1024)
    assert found.early_peak == pytest.approx(golden["early_peak_256"], abs=1e-15)
    assert found.late_mean == pytest.approx(golden["late_mean"], abs=1e-14)
    assert found.late_sd == pytest.approx(golden["late_sd_exact"], rel=1e-10)
    assert found.final == (golden["score_mean"][-1][1] + 1) / 2
    averages = exponential_average(training_accuracy(rows, 16)[1], 0.1)
    assert averages == pytest.approx(golden["ema_0_1"], abs=1e-14)


def test_accuracy_is_that_of_rollout_batches_and_penalised_where_rewards_are_shaped() -> None:
    rows = [{"step": n, "critic/score/mean": [-1, 0, 1, 0.5][n - 1]} for n in range(1, 5)]
    assert training_accuracy(rows) == ([1, 2, 3, 4], [0.0, 0.5, 1.0, 0.75])
    assert training_accuracy(rows, 2) == ([2, 4], [0.25, 0.875])
    shaped = [{**row, "critic/rewards/mean": row["critic/score/mean"] - 0.5} for row in rows]
    assert training_accuracy(shaped, 4) == ([4], [pytest.approx((0.125 - 0.5 + 1) / 2)])


def test_moments_of_the_interpolation_are_exact() -> None:
    steps, values = [0, 3, 4, 10, 14], [1.0, -2.0, 0.5, 0.5, 4.0]
    grid = np.linspace(2, 12, 2_000_001)
    curve = np.interp(grid, steps, values)
    mean, deviation = weighted_moments(steps, values, (2, 12))
    assert mean == pytest.approx(np.trapezoid(curve, grid) / 10, rel=1e-9)
    assert deviation == pytest.approx(math.sqrt(np.trapezoid((curve - mean) ** 2, grid) / 10), rel=1e-9)
    assert weighted_moments([0, 12], [0.0, 1.0], (0, 12)) == pytest.approx((0.5, 1 / math.sqrt(12)))  # uniform
    assert weighted_moments([7], [3.0], (7, 7)) == (3.0, 0.0)


def test_a_short_run_is_summarised_whole_with_its_other_metrics() -> None:
    rows = [{"step": n, "critic/score/mean": n / 10, "actor/entropy": float(n)} for n in range(1, 6)]
    found = summarise_training(rows)
    assert found is not None and found.window == (1, 5)
    assert found.late_mean == pytest.approx(0.65) and found.early_peak == found.final == 0.75
    assert found.late == {"entropy (nats)": pytest.approx(3.0)}
    assert summarise_training([{"step": 1, "actor/loss": 2.0}]) is None


def _tail(step: int, n: float, bins: dict[str, tuple[float, float, float]]) -> dict[str, float]:
    """Bins as label: (share p, mass m, mean length)."""
    row: dict[str, float] = {"step": step, "tail/positive/n": n, "log_w/positive/mean": -step / 10}
    for label, (share, mass, length) in bins.items():
        row |= {f"tail/positive/p/{label}": share, f"tail/positive/m/{label}": mass}
        row |= {f"tail/positive/mean_length/{label}": length} if share else {}
    return row


def test_tails_are_weighted_as_in_the_papers_tables() -> None:
    empty = (0.0, 0.0, 0.0)
    early = {"below_-20": empty, "-5..-2": (0.5, 0.5, 90.0), "from_20": (0.5, 0.5, 10.0), "deep": (0.5, 0.5, 90.0)}
    late = {"below_-20": empty, "-5..-2": (0.25, 0.5, 30.0), "from_20": (0.75, 0.5, 50.0), "deep": (0.25, 0.5, 30.0)}
    rows = [_tail(1, 10, early), _tail(2, 30, early), _tail(3, 40, late), _tail(4, 80, late)]
    assert tail_labels(rows) == ["below_-20", "-5..-2", "from_20"]
    wanted = [("log W < -1", 0.25, 0.5, 2.0), ("-5 <= log W < -2", 0.25, 0.5, 2.0)]
    assert deep_tail(rows) == wanted  # the second half alone
    whole = (40 * 0.5 * 90 + 40 * 0.5 * 10 + 120 * 0.25 * 30 + 120 * 0.75 * 50) / 160
    none, low, high = tail_lengths(rows)
    assert (none.length, none.relative, none.count) == (None, None, 0)
    assert low.count == 50 and low.length == pytest.approx((20 * 90 + 30 * 30) / 50)
    assert high.count == 110 and high.relative == pytest.approx((20 * 10 + 90 * 50) / 110 / whole)
    assert positive_branch(rows, batch=2) == [
        (1, pytest.approx(-0.15), pytest.approx(50.0)),
        (2, pytest.approx(-0.35), pytest.approx(45.0)),
    ]
    for row in rows:
        row.pop("tail/positive/n")
    assert [found.count for found in tail_lengths(rows)] == [None] * 3
    assert deep_tail([{"step": 1}]) == [] and tail_lengths([{"step": 1}]) == [] and positive_branch([{"step": 1}]) == []
