"""Correlations against published values and resamples that are written out point by point."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_rlvr.evaluation.correlation import cluster_bootstrap, mean, pearson, spearman


def one(statistic, *columns):
    return float(statistic(np.ones((1, len(columns[0]))), *columns)[0])


def ranks(values):
    """1 + those below + half of the other equal ones, by counting."""
    return [1 + sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]


def by_hand(x, y):
    mx, my = math.fsum(x) / len(x), math.fsum(y) / len(y)
    dx, dy = [a - mx for a in x], [b - my for b in y]
    scale = math.fsum(a * a for a in dx) * math.fsum(b * b for b in dy)
    return math.fsum(a * b for a, b in zip(dx, dy, strict=True)) / math.sqrt(scale)


def test_published_examples():
    """The values that SciPy's reference pages of pearsonr and spearmanr print."""
    assert one(pearson, [1, 2, 3, 4, 5, 6, 7], [10, 9, 2.5, 6, 4, 3, 2]) == pytest.approx(-0.828503883588428, abs=1e-14)
    assert one(spearman, [1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8207826816681233, abs=1e-14)


def test_ties_take_their_mean_rank():
    # ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: covariance 4.5, variances 4.5 and 5
    assert one(spearman, [1, 2, 2, 3], [10, 30, 20, 40]) == pytest.approx(4.5 / math.sqrt(4.5 * 5), abs=1e-14)
    assert one(spearman, [1, 2, 3], [1, 8, 27]) == 1.0


def test_counts_are_the_points_written_out():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, 12) / 6, rng.integers(0, 4, 12) / 4
    weights = rng.multinomial(12, np.full(12, 1 / 12), 200)
    for row, p, s, m in zip(weights, pearson(weights, x, y), spearman(weights, x, y), mean(weights, x), strict=True):
        xs, ys = np.repeat(x, row).tolist(), np.repeat(y, row).tolist()
        assert p == pytest.approx(by_hand(xs, ys), abs=1e-12)
        assert s == pytest.approx(by_hand(ranks(xs), ranks(ys)), abs=1e-12)
        assert m == pytest.approx(math.fsum(xs) / 12, abs=1e-14)


def test_a_constant_has_no_correlation_even_where_its_mean_rounds():
    assert math.isnan(one(pearson, [0.1] * 3, [1, 2, 3])) and math.isnan(one(spearman, [1, 2, 3], [0.1] * 3))
    # both columns are constant within a cluster: resamples of one cluster alone, half of all of two, have no value
    found = cluster_bootstrap(pearson, ["a", "a", "b", "b"], [0.1, 0.1, 0.7, 0.7], [0.3, 0.3, 0.2, 0.2])
    assert found.value == found.low == found.high == pytest.approx(-1) and found.undefined == pytest.approx(
        0.5, abs=0.02
    )
    assert math.isnan(mean([[0, 0]], [1.0, 2.0])[0])


def test_intervals_are_the_quantiles_of_resampled_clusters():
    rng = np.random.default_rng(3)
    x, y, clusters = rng.normal(size=15), rng.normal(size=15), np.repeat(list("vwxyz"), 3).tolist()
    got = cluster_bootstrap(pearson, clusters, x, y, resamples=400, seed=7)
    values = []
    for counts in np.random.default_rng(7).multinomial(5, np.full(5, 1 / 5), 400):
        rows = [3 * cluster + k for cluster in range(5) for _ in range(counts[cluster]) for k in range(3)]
        values.append(by_hand(x[rows].tolist(), y[rows].tolist()))
    assert (got.low, got.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])), abs=1e-12)
    assert got.value == pytest.approx(by_hand(x.tolist(), y.tolist()))
    with pytest.raises(ValueError, match="columns of that length"):
        cluster_bootstrap(mean, ["a"], [1.0, 2.0])


def test_intervals_cover_where_points_of_a_cluster_are_alike():
    """True correlation 0.6 between clusters; resampling points instead would cover far too rarely."""
    rng = np.random.default_rng(1)
    covered = {"clusters": 0, "points": 0}
    clusters = np.repeat(np.arange(40), 4).tolist()
    for _ in range(100):
        shared = rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], 40).repeat(4, axis=0)
        for kind, groups in (("clusters", clusters), ("points", list(range(160)))):
            found = cluster_bootstrap(pearson, groups, shared[:, 0], shared[:, 1], resamples=200)
            covered[kind] += found.low <= 0.6 <= found.high
    assert covered["clusters"] >= 86 and covered["points"] < 75
