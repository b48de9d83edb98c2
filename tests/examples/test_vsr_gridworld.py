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
    names = ("maze", "exact", "training", "variance", "network_variance", "run")
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
    walks, visits, arrived = 2500, np.zeros(len(maze.cells)), 0
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


@pytest.mark.parametrize("moves", [1, 2, 7, 24, 256])
def test_visits_are_the_sum_of_the_walk(parts, maze, moves):
    exact, generator = parts["exact"], torch.Generator().manual_seed(6)
    policies = torch.softmax(torch.randn(3, len(maze.cells), 4, generator=generator, dtype=torch.float64), -1)
    step = exact.transitions(maze, policies)
    assert exact.visits(maze, step, moves) == pytest.approx(sum(exact.walk(maze, step, moves)), rel=1e-12, abs=1e-15)


def test_states_with_their_moves_left_give_the_gradient_of_success(parts, maze):
    """Policy gradient theorem: visits and values, enumerated apart, against autograd through the recursion for p."""
    exact, limit = parts["exact"], 20
    logits = torch.randn(1, len(maze.cells), 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    logits.requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    step = exact.transitions(maze, logprobs.exp())
    success = list(exact.chances(maze, step, limit))
    (direct,) = torch.autograd.grad(success[limit][0, maze.start], logits, retain_graph=True)
    scored = sum(
        (d[..., None] * logprobs.exp() * success[limit - t - 1][:, maze.moves]).detach() * logprobs
        for t, d in enumerate(exact.walk(maze, step, limit))
    )
    (gathered,) = torch.autograd.grad(scored.sum(), logits)
    assert direct.abs().max() > 1e-7
    assert gathered == pytest.approx(direct, abs=1e-14)


def test_no_policy_has_more_deviation_at_later_moves_than_at_the_first(parts, maze):
    logits = 3 * torch.randn(50, len(maze.cells), 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    limits = (14, 20, 60)
    for limit in limits:
        mass = parts["exact"].slice_mass(maze, torch.softmax(logits / 3 ** torch.arange(50)[:, None, None], -1), limit)
        assert mass.shape == (limit, 50) and (mass[0] > 0).all()
        assert (mass.diff(dim=0) <= 1e-15).all()


def test_mu_moves_from_the_goal_to_the_start(parts, maze, histories):
    correlation, driven, way = parts["run"].rank_correlation, histories[1], maze.distance[maze.start]
    assert correlation(driven.distance.mean(1).numpy()) > 0.8
    assert min(correlation(seed) for seed in driven.distance.T.numpy()) > 0.8
    assert (driven.peak[0] <= way / 2).all() and (driven.peak[-1] == way).all()
    assert min(correlation(seed) for seed in driven.peak[:61].T.numpy()) > 0.5
    medians = [float(driven.peak[update].median()) for update in parts["run"].snapshots(300)]
    assert medians == sorted(medians) and medians[0] < medians[2] < medians[3] == way


def test_mu_starts_near_the_start_where_a_walk_is_no_longer_than_an_attempt(parts, maze, histories):
    """Why `episode` is longer than `limit`: the README's account of what does not hold."""
    settings = parts["training"].Settings(updates=0, episode=parts["training"].Settings().limit)
    untrained = parts["training"].train(maze, True, settings)
    assert (untrained.peak[0] > maze.distance[maze.start] / 2).all()
    assert (untrained.distance[0] > histories[1].distance[0] + 2).all()


def test_mu_learns_in_fewer_updates_than_d(histories):
    slow, fast = (history.updates_to(0.9).double() for history in histories)
    assert (fast < slow).all()  # the same initial weights in each pair
    assert (slow < len(histories[0].success)).all()  # d gets there too, so the pairs compare two times
    assert float(fast.mean()) < 0.75 * float(slow.mean())


def test_rank_correlation_shares_the_ranks_of_equal_values(parts):
    correlation = parts["run"].rank_correlation
    assert correlation(np.array([1.0, 5.0, 9.0, 40.0])) == pytest.approx(1)
    assert correlation(np.array([3.0, 3.0, 2.0])) == pytest.approx(-(3**0.5) / 2)  # ranks 2.5 2.5 1 against 1 2 3


@pytest.fixture(scope="module")
def problems(parts, maze):
    """Three networks at five times in training, with the gradient of every log-probability from autograd."""
    settings = parts["training"].Settings(seeds=3)
    found = parts["network_variance"].network_problems(maze, settings, parts["run"].snapshots(settings.updates))
    return [problem for _, group in found for problem in group]


def test_scores_are_the_gradients_of_each_network(parts, maze):
    """Finite differences of one log-probability in every parameter of the second of two networks."""
    policies = parts["training"].Policies(len(maze.cells), 2)
    cell, action, step, slopes = 7, 2, 1e-5, []
    score = parts["network_variance"]._score(policies, policies.log_probabilities()[:, cell, action])
    with torch.no_grad():
        for parameter in policies.parameters:
            flat = parameter[1].view(-1)
            for k in range(0, len(flat), 7):
                flat[k] += step
                above = policies.log_probabilities()[1, cell, action]
                flat[k] -= 2 * step
                slopes.append((above - policies.log_probabilities()[1, cell, action]) / (2 * step))
                flat[k] += step
    sizes = [parameter[1].numel() for parameter in policies.parameters]
    every = torch.cat([part[::7] for part in score[1].split(sizes)])
    assert torch.stack(slopes) == pytest.approx(every, abs=1e-9)


def test_lemma_b8_is_exact_on_trained_networks(parts, problems):
    variance = parts["variance"]
    for problem in problems:
        gap = variance.estimator_variance(problem, problem.proposal) - variance.estimator_variance(
            problem, problem.occupancy
        )
        assert variance.variance_gap(problem) == pytest.approx(gap, abs=1e-10)


def test_eq_21_under_uniform_gradients(parts, maze):
    """The uniform tabular policy: g = e_a - 1/4 in the logits of its own cell, so H = 3/4 whatever the reward."""
    variance, settings, n = parts["variance"], parts["training"].Settings(), len(maze.cells)
    policy = torch.full((1, n, 4), 0.25, dtype=torch.float64)
    exact = parts["exact"].enumerate_policies(maze, policy, settings.limit, settings.episode)
    scores = torch.zeros(n, 4, n, 4, dtype=torch.float64)
    for s in range(n):
        scores[s, :, s] = torch.eye(4) - 0.25
    whole = variance.Problem(exact.occupancy[0], policy[0], exact.value[0], scores.flatten(2))
    problem = whole.restrict((whole.occupancy * whole.deviation > 0).nonzero()[:, 0])
    _, cov = variance.moments(problem.occupancy)
    saved = variance.estimator_variance(problem, problem.occupancy) - variance.estimator_variance(
        problem, problem.proposal
    )
    assert saved == pytest.approx(0.75 * float(cov(problem.deviation, problem.deviation)), abs=1e-10)
    assert saved > 1e-3


def test_theorem_b7_wherever_its_assumption_holds(parts, problems):
    """Whole mazes, and in each all sets of states of like K = M / sigma^2: those that satisfy Eq. 23."""
    variance, whole_held, held = parts["variance"], 0, []
    for whole in problems:
        if variance.is_regular(whole):
            whole_held += 1
            assert variance.estimator_variance(whole, whole.proposal) < variance.estimator_variance(
                whole, whole.occupancy
            )
        lengths = whole.scores.norm(dim=-1, keepdim=True)  # M and K know scores by their length alone
        problem = variance.Problem(whole.occupancy, whole.policy, whole.value, lengths)
        order = (problem.second_moment / problem.deviation**2).argsort()
        for size in range(2, len(order) + 1):
            for start in range(len(order) - size + 1):
                part = problem.restrict(order[start : start + size])
                if variance.is_regular(part):
                    held.append(size)
                    assert variance.variance_gap(part) < 0
    assert whole_held >= 2 and len(held) >= 500 and max(held) > 10


def test_without_the_assumption_mu_can_have_the_larger_variance(parts, problems):
    """The last three problems, after training: K varies as much as its mean, and the order is reversed."""
    variance = parts["variance"]
    for problem in problems[-3:]:
        assert not variance.is_regular(problem)
        assert variance.estimator_variance(problem, problem.proposal) > variance.estimator_variance(
            problem, problem.occupancy
        )


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
