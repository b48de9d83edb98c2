"""What a policy does in the maze, enumerated: where it is (d), how often it succeeds (p), how sure that is (sigma).

All quantities are computed for R policies at once; n cells, float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from maze import Maze
from torch import Tensor


@dataclass(frozen=True)
class Enumeration:
    """Exact quantities of R policies.

    occupancy   [R, n]     d: share of an episode's moves made from each cell, the goal left out
    success     [R, n]     p: probability to reach the goal within the limit on moves
    value       [R, n, 4]  q: the same after each action, so p = sum_a pi q
    """

    occupancy: Tensor
    success: Tensor
    value: Tensor

    @property
    def deviation(self) -> Tensor:
        """[R, n] sigma = sqrt(p (1 - p)): standard deviation of the terminal reward in {0, 1}."""
        return (self.success * (1 - self.success)).clamp_min(0).sqrt()

    @property
    def proposal(self) -> Tensor:
        """[R, n] mu_var, proportional to d * sigma (VSR Eq. 19)."""
        return normalized(self.occupancy * self.deviation)


def enumerate_policies(maze: Maze, policies: Tensor, limit: int, episode: int) -> Enumeration:
    """policies [R, n, 4] -> exact quantities.

    limit     moves that an attempt from any cell has to reach the goal
    episode   moves over which the occupancy of a walk from S is taken; it ends early at the goal
    """
    runs, n = policies.shape[:2]
    step = torch.zeros(runs, n, n, dtype=policies.dtype)
    step.scatter_add_(2, maze.moves.expand(runs, n, 4), policies)
    success = torch.zeros(runs, n, dtype=policies.dtype)
    success[:, maze.goal] = 1
    for _ in range(limit):
        before, success = success, (step @ success[..., None])[..., 0]
        success[:, maze.goal] = 1
    value = before[:, maze.moves]
    return Enumeration(_occupancy(maze, step, episode), success, value)


def _occupancy(maze: Maze, step: Tensor, episode: int) -> Tensor:
    here = torch.zeros(step.shape[0], 1, step.shape[1], dtype=step.dtype)
    here[:, :, maze.start] = 1
    visits = here.clone()
    for _ in range(episode - 1):
        here = here @ step
        here[:, :, maze.goal] = 0
        visits += here
    return normalized(visits[:, 0])


def normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
