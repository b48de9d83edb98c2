"""The Proximal KL paper's theorems on an enumerated token tree, with the coefficients that training uses."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "theory"))

import gibbs_tree as tree
import page
import shared_head

BETA = 0.4
PROXIMAL = {"beta": BETA, **tree.EXACT}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture
def problem(generator):
    """(reference, rewards, target): the Gibbs policy of a random reference and random terminal rewards."""
    reference = tree.random_policy(generator)
    rewards = torch.rand(27, generator=generator, dtype=torch.float64)
    return reference, rewards, tree.gibbs_policy(reference, rewards, BETA)


def mixture(generator: torch.Generator, versions: int = 3) -> tree.Mixture:
    weights = torch.rand(versions, generator=generator, dtype=torch.float64)
    return tree.Mixture([tree.random_policy(generator) for _ in range(versions)], (weights / weights.sum()).tolist())


def test_the_gibbs_policy_is_the_maximiser(problem):
    """Eq. D.1 by brute force, and a vanishing gradient of J_k."""
    reference, rewards, target = problem
    direct = tree.response_probabilities(reference) * torch.exp(rewards / BETA)
    torch.testing.assert_close(tree.response_probabilities(target), direct / direct.sum())
    logits = target.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(tree.objective(tree.log_policy(logits), reference, rewards, BETA), logits)
    assert gradient.abs().max() < 1e-12


def test_theorem_1_the_update_vanishes_at_the_gibbs_policy_for_any_behaviour(problem, generator):
    reference, rewards, target = problem
    for baseline in (0.0, 0.7):
        for versions in (1, 2, 4):
            field = tree.expected_update(
                "proximal_kl", target, mixture(generator, versions), reference, rewards - baseline, **PROXIMAL
            )
            assert field.abs().max() < 1e-12


def test_theorem_1_and_nowhere_else(problem, generator):
    reference, rewards, target = problem
    others = [
        reference,
        *(tree.random_policy(generator) for _ in range(5)),
        target + 0.05 * tree.random_policy(generator),
    ]
    for policy in others:
        field = tree.expected_update("proximal_kl", policy, mixture(generator), reference, rewards, **PROXIMAL)
        assert field.abs().max() > 1e-4
    for loss, settings in (("proximal_kl", PROXIMAL | {"horizon": 1}), ("pg", {}), ("grpo", {})):
        field = tree.expected_update(loss, target, mixture(generator), reference, rewards, **settings)
        assert field.abs().max() > 1e-4, (loss, settings)


def test_prop_e1_response_level_correction_is_the_true_gradient(problem, generator):
    reference, rewards, _ = problem
    for _ in range(3):
        policy = tree.random_policy(generator)
        logits = policy.clone().requires_grad_()
        value = tree.objective(tree.log_policy(logits), reference, rewards, BETA)
        (gradient,) = torch.autograd.grad(value, logits)
        settings = PROXIMAL | {"weighting": "none"}
        field = tree.expected_update(
            "proximal_kl", policy, mixture(generator), reference, rewards, whole_response=True, **settings
        )
        torch.testing.assert_close(field, gradient, rtol=1e-9, atol=1e-12)
        token_wise = tree.expected_update("proximal_kl", policy, mixture(generator), reference, rewards, **PROXIMAL)
        assert (token_wise - gradient).abs().max() > 1e-4  # the same target, another path to it
        on_policy = tree.expected_update("proximal_kl", policy, tree.Mixture([policy]), reference, rewards, **PROXIMAL)
        torch.testing.assert_close(on_policy, gradient, rtol=1e-9, atol=1e-12)


def test_theorem_e2_the_flow_converges_under_changing_mixtures(problem, generator):
    reference, rewards, target = problem
    behaviors = [mixture(generator) for _ in range(6)]
    start = tree.random_policy(generator)
    path = tree.flow("proximal_kl", start, behaviors, reference, rewards, 800, 6.0, **PROXIMAL)
    gaps = [tree.distance(policy, target) for policy in path]
    assert gaps[0] > 0.3 and gaps[-1] < 1e-6
    assert gaps[400] < 0.1 * gaps[0]
    local = tree.flow("proximal_kl", start, behaviors, reference, rewards, 400, 6.0, **(PROXIMAL | {"horizon": 1}))
    assert tree.distance(local[-1], target) > 1e-3


def test_a_shifted_baseline_moves_the_clipped_update_alone(problem, generator):
    """Eq. C.2-C.3: a constant added to all advantages cancels without a clip, and does not with one."""
    reference, rewards, _ = problem
    policy, behavior = tree.random_policy(generator), mixture(generator)
    advantages = rewards - rewards.mean()

    def moved(loss: str, **settings) -> float:
        plain, shifted = (
            tree.expected_update(loss, policy, behavior, reference, advantages + shift, **settings)
            for shift in (0.0, 1.0)
        )
        return float((plain - shifted).abs().max())

    assert moved("proximal_kl", beta=0.3, log_w_clamp=80.0) < 1e-12
    assert moved("proximal_kl", beta=0.3, horizon=2, tail_decay=True, log_w_clamp=80.0) < 1e-12
    assert moved("pg", log_w_clamp=80.0) < 1e-12
    assert moved("grpo") > 1e-2


def test_prop_d1_success_odds_grow_by_e_to_the_one_over_beta(generator):
    rewards = (torch.arange(27) % 4 == 0).double()
    for beta in (0.2, 1.0, 3.0):
        reference = tree.random_policy(generator)
        before, after = (
            float((tree.response_probabilities(policy) * rewards).sum())
            for policy in (reference, tree.gibbs_policy(reference, rewards, beta))
        )
        assert (after / (1 - after)) / (before / (1 - before)) == pytest.approx(math.exp(1 / beta))


def test_prop_d2_reward_gradient_and_proximal_updates_part_ways():
    reward = shared_head.reward_gradient_path(1 / 64)
    assert reward[0].tolist() == pytest.approx([0.5, 1 / 64])
    assert reward[-1, 0] > 0.99 and reward[-1, 1] < 1e-4
    assert (reward.mean(1) <= 0.5).all()
    proximal = shared_head.proximal_path(1 / 64, beta=0.5, rounds=6)
    steps = torch.arange(7, dtype=torch.float64) / 0.5
    start = torch.tensor([0.0, -math.log(63)], dtype=torch.float64)
    torch.testing.assert_close(proximal, torch.sigmoid(start + steps[:, None]), rtol=1e-6, atol=1e-9)
    assert (proximal[-1] > 0.999).all()


def test_the_page_is_written(tmp_path):
    pytest.importorskip("matplotlib", reason="the theory page draws with matplotlib")
    page.main(tmp_path, updates=20)
    names = ("kernels", "stationarity", "interference", "odds")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in names)
    assert [(tmp_path / "page.md").read_text().count(f"({name}.png)") for name in names] == [1, 1, 1, 1]
