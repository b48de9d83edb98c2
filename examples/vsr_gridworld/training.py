"""Policy gradient in the maze from states drawn by d (on-policy) or by mu = d * sigma (variance-driven), many seeds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from exact import Enumeration, enumerate_policies
from maze import Maze
from torch import Tensor

HIDDEN, ACTIONS = 32, 4


@dataclass(frozen=True)
class Settings:
    """limit and episode in moves, see `enumerate_policies`; states: cells drawn per update."""

    seeds: int = 10
    updates: int = 300
    states: int = 64
    lr: float = 8.0
    limit: int = 20
    episode: int = 256


@dataclass(frozen=True)
class History:
    """Per update (U of them, the untrained policy first) and seed (K).

    success   [U, K]      p at the start
    distance  [U, K]      mean distance to the goal under mu
    peak      [U, K]      distance of mu's most likely cell
    occupancy, deviation, proposal   [U, K, n]   d, sigma and mu
    """

    success: Tensor
    distance: Tensor
    peak: Tensor
    occupancy: Tensor
    deviation: Tensor
    proposal: Tensor

    def updates_to(self, level: float) -> Tensor:
        """[K] first update at which the success from the start is at least `level`; U where it never is."""
        reached = self.success >= level
        return torch.where(reached.any(0), reached.double().argmax(0), len(self.success))


class Policies:
    """K one-hidden-layer tanh networks from one-hot cells to four action logits, independent of each other.

    Initial weights are uniform in +-1/sqrt(fan in), torch.nn.Linear's default, so that actions start nearly uniform.
    """

    def __init__(self, cells: int, seeds: int) -> None:
        shapes = (((cells, HIDDEN), cells), ((1, HIDDEN), cells), ((HIDDEN, ACTIONS), HIDDEN), ((1, ACTIONS), HIDDEN))
        generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]

        def drawn(shape: tuple[int, int], fan_in: int) -> Tensor:
            each = [torch.rand(shape, generator=generator, dtype=torch.float64) for generator in generators]
            return ((2 * torch.stack(each) - 1) / fan_in**0.5).requires_grad_()

        self.parameters = [drawn(shape, fan_in) for shape, fan_in in shapes]

    def log_probabilities(self) -> Tensor:
        """[K, cells, 4]; one-hot inputs pick rows of the first layer."""
        first, bias, second, out_bias = self.parameters
        return torch.log_softmax(torch.tanh(first + bias) @ second + out_bias, -1)


def train(maze: Maze, variance_driven: bool, settings: Settings) -> History:
    """Train K policies that differ in their initial weights and their draws; only the states are drawn.

    Each update draws `states` cells from the proposal and follows the exact gradient of their success: the sum over
    actions is enumerated, as are d and p. Both proposals start from the same weights.
    """
    policies = Policies(len(maze.cells), settings.seeds)
    optimizer = torch.optim.SGD(policies.parameters, lr=settings.lr)
    generator = torch.Generator().manual_seed(settings.seeds)
    rows = []
    for update in range(settings.updates + 1):
        logprobs = policies.log_probabilities()
        exact = enumerate_policies(maze, logprobs.detach().exp(), settings.limit, settings.episode)
        rows.append(_row(maze, exact))
        if update == settings.updates:
            break
        proposal = exact.proposal if variance_driven else exact.occupancy
        drawn = torch.multinomial(proposal, settings.states, replacement=True, generator=generator)
        weights = torch.zeros_like(proposal).scatter_add_(1, drawn, torch.full_like(drawn, 1).double())
        optimizer.zero_grad()
        ascent_loss(logprobs, exact, weights / settings.states).backward()
        optimizer.step()
    return History(*(torch.stack(column) for column in zip(*rows, strict=True)))


def ascent_loss(logprobs: Tensor, exact: Enumeration, weights: Tensor) -> Tensor:
    """logprobs [K, n, 4], weights w [K, n] of the states -> [], summed over the K policies.

    Its gradient is minus sum_s w(s) sum_a pi(a|s) (q(s, a) - p(s)) grad log pi(a|s).
    """
    advantages = exact.value - exact.success[..., None]
    return -(weights[..., None] * logprobs.detach().exp() * advantages * logprobs).sum()


def _row(maze: Maze, exact: Enumeration) -> tuple[Tensor, ...]:
    mu = exact.proposal
    peak = maze.distance[mu.argmax(-1)]
    return exact.success[:, maze.start], mu @ maze.distance, peak, exact.occupancy, exact.deviation, mu
