"""What a policy does in the maze, enumerated: where it is (d), how often it succeeds (p), how sure that is (sigma).

All quantities are computed for R policies at once; n cells, float64.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        return deviation(self.success)

    @property
    def proposal(self) -> Tensor:
        """[R, n] mu_var, proportional to d * sigma (VSR Eq. 19)."""
        return normalized(self.occupancy * self.deviation)


def enumerate_policies(maze: Maze, policies: Tensor, limit: int, episode: int) -> Enumeration:
    """policies [R, n, 4] -> exact quantities.

    limit     moves that an attempt from any cell has to reach the goal
    episode   moves over which the occupancy of a walk from S is taken; it ends early at the goal
    """
    step = transitions(maze, policies)
    *_, before, success = chances(maze, step, limit)
    return Enumeration(normalized(visits(maze, step, episode)), success, before[:, maze.moves])


def transitions(maze: Maze, policies: Tensor) -> Tensor:
    """policies [R, n, 4] -> [R, n, n]: probability to be in the second cell one move after the first."""
    runs, n = policies.shape[:2]
    step = torch.zeros(runs, n, n, dtype=policies.dtype)
    return step.scatter_add_(2, maze.moves.expand(runs, n, 4), policies)


def chances(maze: Maze, step: Tensor, limit: int) -> Iterator[Tensor]:
    """limit + 1 tensors [R, n]: probability to reach the goal within 0, 1, ..., limit moves, 1 at the goal."""
    success = torch.zeros(step.shape[:2], dtype=step.dtype)
    success[:, maze.goal] = 1
    yield success
    for _ in range(limit):
        success = (step @ success[..., None])[..., 0]
        success[:, maze.goal] = 1
        yield success


def walk(maze: Maze, step: Tensor, moves: int) -> Iterator[Tensor]:
    """`moves` tensors [R, n]: probability to make move 0, 1, ... from each cell, starting at S; 0 at the goal."""
    here = torch.zeros(step.shape[0], 1, step.shape[1], dtype=step.dtype)
    here[:, :, maze.start] = 1
    for _ in range(moves):
        yield here[:, 0]
        here = here @ step
        here[:, :, maze.goal] = 0


def visits(maze: Maze, step: Tensor, moves: int) -> Tensor:
    """[R, n] expected visits in `moves` moves from S: the sum of `walk` in O(log moves) products."""
    start = torch.zeros(step.shape[0], 1, step.shape[1], dtype=step.dtype)
    start[:, :, maze.start] = 1
    inside = step.clone()
    inside[:, :, maze.goal] = 0
    total, power = torch.zeros_like(start), torch.eye(step.shape[1], dtype=step.dtype).expand_as(step)
    for bit in f"{moves:b}":  # total: visits in the first k moves; power: inside^k
        total, power = total + total @ power, power @ power
        if bit == "1":
            total, power = start + total @ inside, power @ inside
    return total[:, 0]


def slice_mass(maze: Maze, policies: Tensor, limit: int) -> Tensor:
    """policies [R, n, 4] -> [limit, R]: E[sigma] over the states before move t when moves left are part of the state.

    Then p is a martingale along a walk and sigma a concave function of it, so by Jensen the mass never grows with t:
    mu = d * sigma puts no later move above the first one, which is made from S alone, whatever the policy.
    """
    step = transitions(maze, policies)
    success = list(chances(maze, step, limit))
    return torch.stack([(d * deviation(success[limit - t])).sum(-1) for t, d in enumerate(walk(maze, step, limit))])


def deviation(success: Tensor) -> Tensor:
    """Standard deviation of a reward in {0, 1} with mean `success`: sqrt(p (1 - p))."""
    return (success * (1 - success)).clamp_min(0).sqrt()


def normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
