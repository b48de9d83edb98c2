"""The exact gridworld: its enumeration against simulation, the curriculum, and the variance statements to 1e-10."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "vsr_gridworld"


@pytest.fixture(scope="module", autouse=True)
def parts():
    sys.path.insert(0, str(FOLDER))
    names = ("maze", "exact", "training", "variance", "run")
    yield {name: __import__(name) for name in names}
    sys.path.remove(str(FOLDER))
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def maze(parts):
    return parts["maze"].read_maze()


@pytest.fixture(scope="module")
def histories(parts, maze):
    settings = parts["training"].Settings()
    return [parts["training"].train(maze, driven, settings) for driven in (False, True)]


def test_the_drawing_is_read_and_a_closed_maze_is_refused(parts, maze):
    assert len(maze.cells) == sum(mark != "#" for row in parts["maze"].LAYOUT for mark in row)
    assert maze.distance[maze.goal] == 0 and maze.distance[maze.start] == 12  # the length of the straight way
    left = maze.moves[maze.start][2]
    assert left == maze.start  # out of the grid
    with pytest.raises(ValueError, match="cannot reach the goal"):
        parts["maze"].read_maze(("S#.", "###", "..G"))


def test_the_enumeration_agrees_with_simulated_walks(parts, maze):
    policy = torch.softmax(torch.randn(1, len(maze.cells), 4, generator=torch.Generator().manual_seed(3)).double(), -1)
    exact = parts["exact"].enumerate_policies(maze, policy, limit=40, episode=25)
    rng, chances, moves = np.random.default_rng(0), policy[0].numpy(), maze.moves.numpy()
    walks, visits, arrived = 4000, np.zeros(len(maze.cells)), 0
    start = int(np.flatnonzero(maze.distance.numpy() == 3)[0])
    for _ in range(walks):
        cell, hit = maze.start, start
        for _ in range(25):
            if cell == maze.goal:
                break
            visits[cell] += 1
            cell = moves[cell][rng.choice(4, p=chances[cell])]
        for _ in range(40):
            if hit != maze.goal:
                hit = moves[hit][rng.choice(4, p=chances[hit])]
        arrived += hit == maze.goal
    assert np.abs(visits / visits.sum() - exact.occupancy[0].numpy()).max() < 0.01
    assert arrived / walks == pytest.approx(float(exact.success[0, start]), abs=0.03)
    assert exact.success[0] == pytest.approx(
        torch.where(torch.arange(len(maze.cells)) == maze.goal, 1.0, (policy * exact.value).sum(-1)[0])
    )


def test_the_peak_of_mu_walks_from_the_goal_to_the_start(parts, maze, histories):
    driven = histories[1]
    curve = driven.distance.mean(1).numpy()
    assert parts["run"].rank_correlation(curve) > 0.8
    assert min(parts["run"].rank_correlation(seed) for seed in driven.distance.T.numpy()) > 0.8
    early, late = driven.peak[: len(curve) // 5].mean(0), driven.peak[-len(curve) // 5 :].mean(0)
    assert (late > early).all() and (driven.peak[-1] == maze.distance[maze.start]).all()


def test_mu_learns_in_fewer_updates_than_d(histories):
    slow, fast = (history.updates_to(0.9).double() for history in histories)
    assert float(fast.mean()) < float(slow.mean())
    assert int((fast < slow).sum()) >= 8  # of 10 seeds; a fair coin does so in 5 % of cases
    early = [history.success[60].mean() for history in histories]
    assert early[1] > 2 * early[0]


def real_problem(parts, maze, seed, updates):
    """A network after some training, with the gradient of every log-probability from autograd."""
    training, variance = parts["training"], parts["variance"]
    policies = training.Policies(len(maze.cells), 1)
    with torch.no_grad():
        for parameter in policies.parameters:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    optimizer = torch.optim.SGD(policies.parameters, lr=2.0)
    settings = training.Settings()
    for _ in range(updates + 1):
        logprobs = policies.log_probabilities()
        exact = parts["exact"].enumerate_policies(maze, logprobs.detach().exp(), settings.limit, settings.episode)
        optimizer.zero_grad()
        training._loss(logprobs, exact, exact.proposal).backward(retain_graph=True)
        optimizer.step()
    logprobs = policies.log_probabilities()
    exact = parts["exact"].enumerate_policies(maze, logprobs.detach().exp(), settings.limit, settings.episode)
    scores = [
        [torch.cat([g.flatten() for g in torch.autograd.grad(chance, policies.parameters, retain_graph=True)])
         for chance in row]
        for row in logprobs[0]
    ]  # fmt: skip
    whole = variance.Problem(
        exact.occupancy[0],
        logprobs[0].detach().exp(),
        exact.value[0],
        torch.stack([torch.stack(row) for row in scores]),
    )
    return whole.restrict((whole.occupancy * whole.deviation > 1e-12).nonzero()[:, 0])


@pytest.fixture(scope="module")
def problems(parts, maze):
    return [real_problem(parts, maze, seed, updates) for seed, updates in ((0, 0), (1, 20), (2, 100))]


def test_lemma_b8_is_exact_on_trained_networks(parts, problems):
    variance = parts["variance"]
    for problem in problems:
        gap = variance.estimator_variance(problem, problem.proposal) - variance.estimator_variance(
            problem, problem.occupancy
        )
        assert variance.variance_gap(problem) == pytest.approx(gap, abs=1e-10)


def test_eq_21_under_uniform_gradients(parts):
    """Two actions of equal chance in tabular softmax: g = +-(1/2, -1/2), so H = 1/2 whatever the reward."""
    variance, generator = parts["variance"], torch.Generator().manual_seed(0)
    n = 9
    scores = torch.zeros(n, 2, 2 * n, dtype=torch.float64)
    for s in range(n):
        scores[s, :, 2 * s : 2 * s + 2] = torch.eye(2) - 0.5
    occupancy = torch.rand(n, generator=generator, dtype=torch.float64)
    value = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    problem = variance.Problem(occupancy / occupancy.sum(), torch.full((n, 2), 0.5).double(), value, scores)
    _, cov = variance.moments(problem.occupancy)
    saved = variance.estimator_variance(problem, problem.occupancy) - variance.estimator_variance(
        problem, problem.proposal
    )
    assert saved == pytest.approx(0.5 * float(cov(problem.deviation, problem.deviation)), abs=1e-10)
    assert saved > 0


def test_theorem_b7_wherever_its_assumption_holds(parts, problems):
    """Sets of states with like K = M / sigma^2, of every size, from three networks: those that satisfy Eq. 23."""
    variance, held = parts["variance"], 0
    for problem in problems:
        order = (problem.second_moment / problem.deviation**2).argsort()
        for size in range(2, len(order) + 1):
            for start in range(len(order) - size + 1):
                part = problem.restrict(order[start : start + size])
                if variance.is_regular(part):
                    held += 1
                    assert variance.variance_gap(part) < 0
    assert held >= 20


def test_the_closed_mirror_step_maximises_its_objective(parts):
    generator = torch.Generator().manual_seed(1)
    policy = torch.softmax(torch.randn(5, 4, generator=generator, dtype=torch.float64), -1)
    value, step_size = torch.randn(5, 4, generator=generator, dtype=torch.float64), 0.7
    found = parts["variance"].mirror_step(policy, value, step_size)
    logits = torch.zeros(5, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=200, tolerance_grad=1e-13, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def objective():
        optimizer.zero_grad()
        logp = torch.log_softmax(logits, -1)
        loss = -(logp.exp() * (step_size * value - logp + policy.log())).sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    assert torch.softmax(logits, -1).detach() == pytest.approx(found, abs=1e-7)
    assert found.sum(-1) == pytest.approx(torch.ones(5).double())
