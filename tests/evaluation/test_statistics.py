"""Every statistic against values that were computed elsewhere or by hand, and against ReSPO's own published table."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rlvr.evaluation import statistics

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden" / "statistics.json"
# ReSPO Table 1: AIME25, AIME24, AMC23, OlympiadBench, MinervaMath, MATH-500, then Avg., as printed; rows GRPO, GSPO,
# VESPO, ReSPO for N = 8, 16, 32, first Qwen3-1.7B, then Qwen3-30B-A3B.
TABLE_1 = """
0.042 0.075 0.353 0.284 0.286 0.665 0.284  0.062 0.077 0.402 0.304 0.272 0.658 0.296
0.073 0.127 0.478 0.388 0.307 0.742 0.353  0.090 0.133 0.484 0.368 0.289 0.726 0.348
0.071 0.083 0.431 0.303 0.278 0.663 0.305  0.046 0.075 0.419 0.319 0.283 0.672 0.302
0.065 0.106 0.464 0.364 0.301 0.712 0.335  0.094 0.123 0.467 0.358 0.299 0.717 0.343
0.052 0.040 0.383 0.289 0.278 0.653 0.283  0.046 0.054 0.381 0.299 0.299 0.663 0.290
0.081 0.131 0.456 0.341 0.282 0.698 0.332  0.088 0.117 0.488 0.367 0.280 0.729 0.345
0.152 0.248 0.738 0.511 0.436 0.852 0.490  0.181 0.267 0.713 0.521 0.439 0.861 0.497
0.154 0.273 0.700 0.517 0.454 0.853 0.492  0.252 0.306 0.791 0.427 0.411 0.783 0.495
0.138 0.246 0.733 0.490 0.424 0.831 0.477  0.156 0.265 0.700 0.493 0.452 0.848 0.486
0.152 0.300 0.700 0.515 0.436 0.854 0.493  0.213 0.321 0.792 0.512 0.457 0.857 0.525
0.123 0.313 0.717 0.503 0.444 0.850 0.492  0.146 0.231 0.664 0.475 0.423 0.835 0.462
0.177 0.277 0.709 0.500 0.444 0.852 0.493  0.202 0.269 0.795 0.510 0.451 0.844 0.512
"""
SIZES = {"aime25": (30, 16), "aime24": (30, 16), "amc23": (40, 16), "olympiad": (674, 4), "minerva": (272, 4)}
SIZES["math500"] = (500, 4)


def table_1() -> np.ndarray:
    return np.array(TABLE_1.split(), float).reshape(24, 7)


@pytest.fixture(scope="module")
def golden():
    if not GOLDEN.is_file():
        pytest.skip("the golden statistics are not on this machine")
    content = json.loads(GOLDEN.read_text())
    return content["scores"], content["evaluation"]


def test_means_averages_and_pass_at_k_are_the_golden_ones(golden):
    scores, wanted = golden
    assert {name: statistics.mean_at_k(table) for name, table in scores.items()} == pytest.approx(wanted["mean"])
    assert statistics.average(scores, "macro") == pytest.approx(wanted["macro"], abs=1e-15)
    assert statistics.average(scores, "micro") == pytest.approx(wanted["micro"], abs=1e-15)
    for name, values in wanted["pass_at"].items():
        found = {k: statistics.pass_at_k(scores[name], int(k)) for k in values}
        assert found == pytest.approx(values, abs=1e-12)


def test_pass_at_k_is_the_mean_over_all_subsets():
    table = np.random.default_rng(1).random((7, 6)) < np.linspace(0, 1, 7)[:, None]
    for k in range(1, 7):
        subsets = [table[:, list(chosen)].any(1) for chosen in itertools.combinations(range(6), k)]
        assert statistics.pass_at_k(table, k) == pytest.approx(np.mean(subsets), abs=1e-12)
    with pytest.raises(ValueError, match="pass@7 needs at least 7 samples a problem, there are 6"):
        statistics.pass_at_k(table, 7)


def test_bootstrap_error_is_that_of_its_limit(golden):
    scores, wanted = golden
    replicates = statistics.resample([scores])
    for kind, limit in (("macro", wanted["macro_bootstrap_se_limit"]), ("micro", _limit(scores, "micro"))):
        drawn = statistics.averaged(replicates, statistics.weights(scores, kind))[:, 0]
        error = statistics.standard_error(drawn)
        assert len(drawn) == 10_000
        assert error == pytest.approx(limit, rel=4 / np.sqrt(2 * len(drawn)))  # four errors of the error
        assert error == pytest.approx(np.sqrt(((drawn - drawn.mean()) ** 2).sum() / (len(drawn) - 1)), rel=1e-12)
    assert _limit(scores, "macro") == pytest.approx(wanted["macro_bootstrap_se_limit"], rel=1e-12)


def _limit(scores, kind):
    """The standard error of infinitely many replicates: problems are independent, so variances add up."""
    shares = statistics.weights(scores, kind)
    means = {name: np.mean(table, axis=1) for name, table in scores.items()}
    return np.sqrt(sum(shares[name] ** 2 * z.var() / len(z) for name, z in means.items()))


def test_contrasts_are_paired(golden):
    """Resampling the same problems in both runs, a difference that all problems share has no error."""
    scores, _ = golden
    better = {name: np.minimum(np.asarray(table) + 1, 1) for name, table in scores.items()}
    same = {name: np.asarray(table) for name, table in scores.items()}
    replicates = statistics.resample([scores, same, better])
    for name, drawn in replicates.items():
        assert np.array_equal(drawn[:, 0], drawn[:, 1]) and (drawn[:, 2] == 1).all()
        gap = drawn[:, 2] - drawn[:, 0]
        found = statistics.contrast(1 - statistics.mean_at_k(scores[name]), gap)
        assert (found.low, found.high) == (np.quantile(gap, 0.025), np.quantile(gap, 0.975))
        assert found.low < found.difference < found.high
        assert found.standard_error == pytest.approx(np.std(gap, ddof=1))
    assert all(np.array_equal(replicates[n], v) for n, v in statistics.resample([scores, same, better]).items())
    with pytest.raises(ValueError, match="same benchmarks"):
        statistics.resample([scores, {"a": scores["a"]}])


def test_respos_averages_follow_from_its_own_cells():
    cells = table_1()
    for row in cells:
        tables = {name: [[value]] for name, value in zip(SIZES, row, strict=False)}
        # six cells and the average are rounded to 0.001 each
        assert statistics.average(tables, "macro") == pytest.approx(row[6], abs=0.001 + 1e-9)
    assert np.abs(cells[:, :6].mean(1) - cells[:, 6]).max() <= 0.001


def test_bootstrap_of_a_score_file_reproduces_a_published_row():
    """Scores with the cells of ReSPO's 1.7B row at N=16 give its average, and with binary problems an error that the
    published one cannot exceed; responses that are independent within a problem give one that it cannot undercut."""
    cells, printed = table_1()[7, :6], (0.343, 0.015)
    draw = np.random.default_rng(0)
    binary, independent = {}, {}
    for (name, (problems, samples)), cell in zip(SIZES.items(), cells, strict=True):
        right = round(cell * problems * samples)
        flat = np.zeros(problems * samples, int)
        flat[:right] = 1
        binary[name] = flat.reshape(problems, samples)
        independent[name] = draw.permutation(flat).reshape(problems, samples)
    errors = []
    for tables in (independent, binary):
        assert round(statistics.average(tables, "macro"), 3) == printed[0]
        replicates = statistics.averaged(statistics.resample([tables]), statistics.weights(tables, "macro"))
        errors.append(statistics.standard_error(replicates))
    assert errors[0] < printed[1] + 0.0005 and errors[1] > printed[1] - 0.0005


def test_majority_votes_by_the_most_frequent_answer_that_came_first():
    answers = [["1", "2", "2", None], ["1", "2", "1", "2"], [None, None, None, None], ["7", None, None, None]]
    scores = [[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 1], [1, 0, 0, 0]]
    assert statistics.majority_vote(answers, scores) == (1 + 0 + 0 + 1) / 4


def test_length_bins_are_of_equal_frequency_below_the_cap_and_keep_equal_lengths_together():
    lengths = np.array([*range(1, 91), 100, 100, 100, 100])
    capped = lengths >= 100
    bins = statistics.length_bins(lengths, capped)
    assert bins.bounds == (10, 20, 30, 40, 50, 60, 70, 80, 90) and bins.labels[-1] == "Q10"
    assert bins.count(lengths, capped).tolist() == [10] * 9 + [4]
    right = lengths % 2
    assert bins.count(lengths, capped, right).tolist() == [5] * 9 + [0]
    assert bins.place([95, 10, 11], [False, False, False]).tolist() == [8, 0, 1]
    tied = statistics.length_bins([5] * 8 + [6, 7], [False] * 10, bins=3)
    assert tied.bounds == (5, 7) and tied.count([5] * 8 + [6, 7], [False] * 10).tolist() == [8, 2, 0]
    with pytest.raises(ValueError, match="below the cap"):
        statistics.length_bins([4], [True])
