"""Correlations and means with bootstrap intervals over clusters; plain numpy.

A resample draws as many clusters as there are, with replacement. It is kept as the number of times that each point
occurs, [resamples, points]: every statistic here takes such counts as weights, which gives to rounding what it would
give on the points written out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Statistic = Callable[..., Floats]
_BLOCK = 2**21  # weights that are held at once


@dataclass(frozen=True)
class Estimate:
    """A statistic of the data with its percentile interval; NaN where it is undefined.

    undefined   share of the resamples in which the statistic has no value; the interval is that of the others
    """

    value: float
    low: float
    high: float
    undefined: float = 0.0

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pearson(weights: ArrayLike, x: ArrayLike, y: ArrayLike) -> Floats:
    """[rows] Pearson correlation of `x` and `y` [points] by each row of `weights` [rows, points]; NaN: a constant."""
    columns = np.broadcast_arrays(np.asarray(x, np.float64), np.asarray(y, np.float64))
    return _pearson(np.asarray(weights, np.float64), *columns)


def spearman(weights: ArrayLike, x: ArrayLike, y: ArrayLike) -> Floats:
    """[rows] Spearman correlation, ties at their mean rank; arguments as for `pearson`."""
    counts = np.asarray(weights, np.float64)
    return _pearson(counts, _mean_ranks(counts, np.asarray(x)), _mean_ranks(counts, np.asarray(y)))


def mean(weights: ArrayLike, x: ArrayLike) -> Floats:
    """[rows] mean of `x` [points] under each row of `weights`; NaN where a row is all zero."""
    counts = np.asarray(weights, np.float64)
    total = counts.sum(-1)
    return np.divide(counts @ np.asarray(x, np.float64), total, out=np.full(len(total), np.nan), where=total > 0)


def cluster_bootstrap(
    statistic: Statistic,
    clusters: Sequence[Hashable],
    *columns: ArrayLike,
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """`statistic(weights, *columns)` of all points, with the percentile interval of its values in the resamples.

    clusters   [points] which cluster each point belongs to; a cluster's points come and go together

    Raises ValueError for no points, or columns of another length.
    """
    if not clusters or any(len(np.asarray(column)) != len(clusters) for column in columns):
        raise ValueError(f"{len(clusters)} points need columns of that length, at least one point")
    (value,) = statistic(np.ones((1, len(clusters))), *columns)
    drawn = np.concatenate([statistic(weights, *columns) for weights in _resample(clusters, resamples, seed)])
    defined = drawn[~np.isnan(drawn)]
    tail = (1 - level) / 2
    low, high = np.quantile(defined, [tail, 1 - tail]) if len(defined) else (np.nan, np.nan)
    return Estimate(float(value), float(low), float(high), 1 - len(defined) / resamples)


def _resample(clusters: Sequence[Hashable], resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """[some, points] counts at a time, `resamples` rows in all."""
    number = {cluster: index for index, cluster in enumerate(dict.fromkeys(clusters))}
    of_point = np.array([number[cluster] for cluster in clusters])
    generator = np.random.default_rng(seed)
    rows = max(1, _BLOCK // len(clusters))
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        yield generator.multinomial(len(number), np.full(len(number), 1 / len(number)), size)[:, of_point]


def _pearson(weights: Floats, x: Floats, y: Floats) -> Floats:
    """`x` and `y` are [points] or [rows, points]."""
    total = weights.sum(-1, keepdims=True)
    varies = _varies(weights, x) & _varies(weights, y)
    dx = x - (weights * x).sum(-1, keepdims=True) / total
    dy = y - (weights * y).sum(-1, keepdims=True) / total
    covariance = (weights * dx * dy).sum(-1)
    scale = np.sqrt((weights * dx * dx).sum(-1) * (weights * dy * dy).sum(-1))
    varies &= scale > 0
    ratio = np.divide(covariance, scale, out=np.full(len(weights), np.nan), where=varies)
    return np.clip(ratio, -1.0, 1.0)


def _varies(weights: Floats, x: Floats) -> NDArray[np.bool_]:
    """Whether points of weight differ; a variance would be tiny instead of 0 where they do not."""
    present = weights > 0
    low = np.where(present, x, np.inf).min(-1)
    return np.asarray(np.where(present, x, -np.inf).max(-1) > low)


def _mean_ranks(weights: Floats, x: NDArray[np.generic]) -> Floats:
    """[rows, points] rank of each point where point j occurs weights[:, j] times."""
    _, index = np.unique(x, return_inverse=True)
    order = np.argsort(index, kind="stable")
    starts = np.flatnonzero(np.diff(index[order], prepend=-1))
    occurrences = np.add.reduceat(weights[:, order], starts, axis=-1)
    ranks = occurrences.cumsum(-1) - occurrences / 2 + 0.5
    return np.asarray(ranks[:, index])
