"""The variance of both proposals on the tanh networks themselves, whose gradients are not uniform (VSR App. B.4)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from exact import Enumeration, enumerate_policies
from maze import Maze
from torch import Tensor
from training import Policies, Settings, ascent_loss
from variance import Problem, estimator_variance, is_regular


def network_problems(maze: Maze, settings: Settings, updates: list[int]) -> Iterator[tuple[int, list[Problem]]]:
    """(update, one Problem per seed) at each of `updates`, trained on mu itself instead of cells drawn from it."""
    policies = Policies(len(maze.cells), settings.seeds)
    optimizer = torch.optim.SGD(policies.parameters, lr=settings.lr)
    for update in range(max(updates) + 1):
        logprobs = policies.log_probabilities()
        exact = enumerate_policies(maze, logprobs.detach().exp(), settings.limit, settings.episode)
        if update in updates:
            yield update, _problems(policies, logprobs, exact)
        optimizer.zero_grad()
        ascent_loss(logprobs, exact, exact.proposal).backward()
        optimizer.step()


def variance_rows(maze: Maze, settings: Settings, updates: list[int]) -> list[tuple[int, float, float, int]]:
    """Per update: V(d) and V(mu), means over the seeds, and the number of seeds for which Assumption B.6 holds."""
    rows = []
    for update, problems in network_problems(maze, settings, updates):
        on_policy = [estimator_variance(problem, problem.occupancy) for problem in problems]
        driven = [estimator_variance(problem, problem.proposal) for problem in problems]
        regular = sum(is_regular(problem) for problem in problems)
        rows.append((update, sum(on_policy) / len(problems), sum(driven) / len(problems), regular))
    return rows


def _problems(policies: Policies, logprobs: Tensor, exact: Enumeration) -> list[Problem]:
    """On the states that are visited and undecided, the others carry no gradient."""
    scores = torch.stack(
        [torch.stack([_score(policies, x) for x in cell.unbind(-1)], 1) for cell in logprobs.unbind(1)], 1
    )
    whole = (
        Problem(exact.occupancy[k], logprobs[k].detach().exp(), exact.value[k], scores[k]) for k in range(len(scores))
    )
    return [problem.restrict((problem.occupancy * problem.deviation > 1e-12).nonzero()[:, 0]) for problem in whole]


def _score(policies: Policies, logprob: Tensor) -> Tensor:
    """[K] log-probabilities, one per network -> [K, P] gradients; the networks share no parameter."""
    gradients = torch.autograd.grad(logprob.sum(), policies.parameters, retain_graph=True)
    return torch.cat([gradient.flatten(1) for gradient in gradients], 1)
