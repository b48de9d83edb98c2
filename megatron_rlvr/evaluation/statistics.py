"""What a reviewer asks of scores: mean@k, pass@k, majority vote, averages, bootstrap errors, paired contrasts. Numpy.

Scores of one benchmark are [problems, samples] of 0 and 1. Averages and errors are those of ReSPO App. D.3 (eqs. 35 to
37): problems are the clusters, and all samples of a problem stay together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Average = Literal["macro", "micro"]
_BLOCK = 2**22  # drawn indices that are held at once


@dataclass(frozen=True)
class Contrast:
    """The difference of two runs' averages with its bootstrap standard error and percentile interval."""

    difference: float
    standard_error: float
    low: float
    high: float


def mean_at_k(scores: ArrayLike) -> float:
    """The share of right samples: mean over problems of the mean over samples. Raises ValueError without any."""
    return float(_table(scores).mean())


def pass_at_k(scores: ArrayLike, k: int) -> float:
    """The chance that at least one of k samples of a problem is right, mean over problems.

    Unbiased for k of n samples: 1 - C(n - c, k) / C(n, k) with c right ones. Raises ValueError for k outside 1..n.
    """
    table = _table(scores)
    samples = table.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples a problem, there are {samples}")
    right, problems = np.unique((table > 0).sum(1), return_counts=True)
    missed = [comb(samples - int(count), k) / comb(samples, k) for count in right]
    return float(1 - np.dot(missed, problems) / len(table))


def majority_vote(answers: Sequence[Sequence[str | None]], scores: ArrayLike) -> float:
    """The share of problems whose most frequent answer is right.

    answers   [problems][samples] in one spelling; None: the response gave none and does not vote

    Of equally frequent answers the one given first wins; a problem without any is wrong. The verdict on an answer is
    that on the first response which gave it.
    """
    table = _table(scores)
    return float(np.mean([_vote(given, row) for given, row in zip(answers, table, strict=True)]))


def _vote(given: Sequence[str | None], scores: Floats) -> float:
    votes = Counter(answer for answer in given if answer is not None)
    if not votes:
        return 0.0
    winner = votes.most_common(1)[0][0]  # keeps the order of the first occurrence among equals
    return float(scores[list(given).index(winner)] > 0)


def weights(tables: Mapping[str, ArrayLike], average: Average) -> dict[str, float]:
    """What each benchmark's mean@k counts in the average; the weights add up to 1.

    macro   every benchmark alike
    micro   every response alike: benchmarks by their numbers of responses
    """
    if average == "macro":
        return {name: 1 / len(tables) for name in tables}
    sizes = {name: _table(scores).size for name, scores in tables.items()}
    return {name: size / sum(sizes.values()) for name, size in sizes.items()}


def average(tables: Mapping[str, ArrayLike], kind: Average) -> float:
    """The macro or micro average of the benchmarks' mean@k. Raises ValueError without benchmarks."""
    if not tables:
        raise ValueError("an average needs at least one benchmark")
    shares = weights(tables, kind)
    return float(sum(shares[name] * mean_at_k(scores) for name, scores in tables.items()))


def resample(runs: Sequence[Mapping[str, ArrayLike]], resamples: int = 10_000, seed: int = 0) -> dict[str, Floats]:
    """Bootstrap replicates [resamples, runs] of each benchmark's mean@k.

    In a replicate, each benchmark's problems are drawn with replacement, as many as it has and apart from those of the
    other benchmarks; all runs get the same problems. Each benchmark has a generator of its own, by its place.
    Raises ValueError where runs differ in benchmarks or in their numbers of problems.
    """
    if any(list(run) != list(runs[0]) for run in runs):
        raise ValueError("the runs do not have the same benchmarks in the same order")
    found: dict[str, Floats] = {}
    for index, name in enumerate(runs[0]):
        means = np.stack([_table(run[name]).mean(1) for run in runs], axis=1)
        found[name] = _replicates(means, resamples, np.random.default_rng([seed, index]))
    return found


def averaged(replicates: Mapping[str, Floats], shares: Mapping[str, float]) -> Floats:
    """[resamples, runs] replicates of the average that `weights` gives shares for."""
    return np.asarray(sum(shares[name] * values for name, values in replicates.items()))


def _replicates(means: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    """[resamples, runs] means over problems drawn from the rows of `means` [problems, runs]."""
    problems = len(means)
    rows = max(1, _BLOCK // problems)
    blocks = []
    for start in range(0, resamples, rows):
        drawn = generator.integers(problems, size=(min(rows, resamples - start), problems))
        blocks.append(np.stack([column[drawn].mean(1) for column in means.T], axis=1))
    return np.concatenate(blocks)


def standard_error(replicates: ArrayLike) -> float:
    """The standard deviation of bootstrap replicates, with B - 1 (ReSPO eq. 37)."""
    return float(np.std(np.asarray(replicates, np.float64), ddof=1))


def contrast(difference: float, replicates: ArrayLike, level: float = 0.95) -> Contrast:
    """A difference with the spread of its paired replicates [resamples]: the same problems in both runs."""
    values = np.asarray(replicates, np.float64)
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Contrast(difference, standard_error(values), float(low), float(high))


@dataclass(frozen=True)
class LengthBins:
    """Bins of response length: (.., bounds[0]], (bounds[0], bounds[1]], ..; the last bin holds the capped responses.

    bounds   [bins - 1] tokens, the longest length in each uncapped bin
    """

    bounds: tuple[int, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"Q{number}" for number in range(1, len(self.bounds) + 2))

    def place(self, lengths: ArrayLike, capped: ArrayLike) -> NDArray[np.int64]:
        """The bin of each response; lengths beyond the last bound belong to the last uncapped bin."""
        inside = np.searchsorted(self.bounds, np.asarray(lengths), side="left")
        return np.where(np.asarray(capped, bool), len(self.bounds), np.minimum(inside, len(self.bounds) - 1))

    def count(self, lengths: ArrayLike, capped: ArrayLike, values: ArrayLike | None = None) -> Floats:
        """Responses in each bin, or the sum of their `values`."""
        where = self.place(lengths, capped)
        given = None if values is None else np.asarray(values, np.float64)
        return np.bincount(where, given, minlength=len(self.bounds) + 1).astype(np.float64)


def length_bins(lengths: ArrayLike, capped: ArrayLike, bins: int = 10) -> LengthBins:
    """Bins shared by everything that is pooled here: `bins` - 1 of equal frequency, then one for the cap.

    lengths   tokens of all responses of all runs and benchmarks; capped: at the cap, which is a bin of its own
              whatever its share (ReSPO App. E.2)

    A bound is a length that occurs, so that equal lengths stay together. Raises ValueError without uncapped responses.
    """
    free = np.asarray(lengths)[~np.asarray(capped, bool)]
    if not len(free) or bins < 2:
        raise ValueError("length bins need at least one response below the cap, and two bins")
    bounds = np.quantile(free, np.arange(1, bins) / (bins - 1), method="inverted_cdf")
    return LengthBins(tuple(int(bound) for bound in bounds))


def _table(scores: ArrayLike) -> Floats:
    table = np.asarray(scores, np.float64)
    if table.ndim != 2 or not table.size:
        raise ValueError(f"scores are [problems, samples] with at least one, got shape {table.shape}")
    return table
