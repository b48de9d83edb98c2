"""Variance of the state-resampled policy gradient, and what the paper proves of it (VSR App. B and C).

The estimator draws s ~ mu, a ~ pi, r ~ Bernoulli(q) and is (d(s)/mu(s)) (r - b(s)) g(s, a), with g = grad log pi(a|s),
H = |g|^2 and the baseline b(s) = p(s), the mean reward. n states, A actions, float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """occupancy d [n] > 0, sums to 1; policy [n, A]; value q [n, A] in [0, 1]; scores g [n, A, P]."""

    occupancy: Tensor
    policy: Tensor
    value: Tensor
    scores: Tensor

    @property
    def success(self) -> Tensor:
        """[n] p(s) = sum_a pi q."""
        return (self.policy * self.value).sum(-1)

    @property
    def deviation(self) -> Tensor:
        """[n] sigma(s)."""
        return (self.success * (1 - self.success)).clamp_min(0).sqrt()

    @property
    def second_moment(self) -> Tensor:
        """[n] M(s) = E[(r - b)^2 H | s] (Eq. 15 with b = p)."""
        baseline = self.success[:, None]
        square = self.value * (1 - baseline) ** 2 + (1 - self.value) * baseline**2
        return (self.policy * square * self.scores.square().sum(-1)).sum(-1)

    @property
    def proposal(self) -> Tensor:
        """[n] mu_var, proportional to d sigma (Eq. 19)."""
        weights = self.occupancy * self.deviation
        return weights / weights.sum()

    def restrict(self, states: Tensor) -> Problem:
        """The problem on some of its states, with their occupancy renormalised."""
        occupancy = self.occupancy[states]
        return Problem(occupancy / occupancy.sum(), self.policy[states], self.value[states], self.scores[states])


def estimator_variance(problem: Problem, proposal: Tensor) -> float:
    """tr Cov of the estimator under `proposal` [n], summed over every (state, action, reward) with its own gradient."""
    total, mean = 0.0, torch.zeros(problem.scores.shape[-1], dtype=torch.float64)
    for s, chance in enumerate(proposal.tolist()):
        for a in range(problem.policy.shape[1]):
            for reward, likelihood in ((1.0, problem.value[s, a]), (0.0, 1 - problem.value[s, a])):
                weight = chance * float(problem.policy[s, a] * likelihood)
                importance = float(problem.occupancy[s]) / chance
                sample = importance * (reward - float(problem.success[s])) * problem.scores[s, a]
                total += weight * float(sample @ sample)
                mean += weight * sample
    return total - float(mean @ mean)


def variance_gap(problem: Problem) -> float:
    """V(mu_var) - V(d) by the closed form of Lemma B.8, Eq. 25, all moments under d on the states with sigma > 0.

    -E[K] Var(sigma) + E[sigma] Cov(sigma, K) - Cov(sigma^2, K), with K = M / sigma^2. Where H does not depend on state
    or reward, K is its value G0, the covariances vanish and Eq. 21 is left: V(d) - V(mu_var) = G0 Var(sigma).
    """
    sigma = problem.deviation
    ratio = problem.second_moment / sigma**2
    mean, cov = moments(problem.occupancy)
    coupling = mean(sigma) * cov(sigma, ratio) - cov(sigma**2, ratio)
    return float(-mean(ratio) * cov(sigma, sigma) + coupling)


def is_regular(problem: Problem) -> bool:
    """Assumption B.6 (Eq. 23): sd(K) / E[K] < (2/3) sd(sigma); Theorem B.7 then says V(mu_var) < V(d).

    Rewards in {0, 1} have sigma <= 1/2, so E[sigma] <= 1/2 and sd(sigma^2) <= sd(sigma) (Lemma B.9), and by
    Cauchy-Schwarz the covariances of Eq. 25 add at most (3/2) sd(sigma) sd(K), which is then below E[K] Var(sigma).
    """
    sigma = problem.deviation
    ratio = problem.second_moment / sigma**2
    mean, cov = moments(problem.occupancy)
    return bool(cov(ratio, ratio).clamp_min(0).sqrt() / mean(ratio) < 2 / 3 * cov(sigma, sigma).clamp_min(0).sqrt())


def moments(weights: Tensor):
    """Mean and covariance under a distribution [n], as functions of values [n]."""

    def mean(x: Tensor) -> Tensor:
        return weights @ x

    def cov(x: Tensor, y: Tensor) -> Tensor:
        return weights @ ((x - mean(x)) * (y - mean(y)))

    return mean, cov


def mirror_step(policy: Tensor, value: Tensor, step_size: float) -> Tensor:
    """SVMD's step (VSR Alg. 2, line 7) in every state: the p on the simplex that maximises eta <Q, p> - KL(p || pi).

    policy pi [n, A] > 0, rows sum to 1; value Q [n, A]; step_size eta > 0 -> [n, A], pi(a) e^(eta Q(a)) / Z.
    """
    return torch.softmax(policy.log() + step_size * value, -1)
