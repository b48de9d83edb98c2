"""Two prompts, one action, two shared parameters: interference that reward gradients lose to (Proximal KL App. D.1).

p_m = sigmoid(u_m . theta), reward 1 for the action. From (p1, p2) = (1/2, p_init) gradient flow of the mean reward ends
at (1, 0); repeated proximal updates with the same head end at (1, 1) (Prop. D.2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rlvr.losses import token_coefficients

DIRECTIONS = torch.tensor([[1.0, 1.0], [1.0, -4.0]], dtype=torch.float64) / 5  # u_m


def start(p_init: float) -> Tensor:
    """[2] theta_0 = (-D, D)."""
    delta = math.log((1 - p_init) / p_init)
    return torch.tensor([-delta, delta], dtype=torch.float64)


def success(theta: Tensor) -> Tensor:
    """[2] probability of the rewarded action on each prompt."""
    return torch.sigmoid(DIRECTIONS @ theta)


def expected_update(loss: str, theta: Tensor, reference: Tensor, **settings) -> Tensor:
    """[2] on-policy E[sum c grad log pi] over both prompts and both actions, with the loss's own coefficients."""
    theta = theta.detach().requires_grad_()
    learner = _logprobs(theta)
    coefficients = token_coefficients(
        loss,
        logprobs=learner,
        behavior_logprobs=learner.detach(),
        reference_logprobs=_logprobs(reference),
        advantages=torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64),
        cu_seqlens=torch.arange(5),
        **settings,
    )
    (gradient,) = torch.autograd.grad((0.5 * learner.detach().exp() * coefficients * learner).sum(), theta)
    return gradient


def reward_gradient_path(p_init: float, steps: int = 600, length: float = 0.05) -> Tensor:
    """[steps+1, 2] success probabilities along the reward-gradient flow, in steps of equal length in theta.

    The flow slows down as e^-t; moving a fixed length along it changes the clock, not the path.
    """
    theta, path = start(p_init), [success(start(p_init))]
    for _ in range(steps):
        update = expected_update("pg", theta, theta)
        theta = theta + length * update / update.norm()
        path.append(success(theta))
    return torch.stack(path)


def proximal_path(p_init: float, beta: float, rounds: int, inner: int = 40) -> Tensor:
    """[rounds+1, 2] success probabilities after each proximal round: inner ascent on J_k, then the reference moves up.

    The inner steps are preconditioned by the Fisher matrix: in the logits they obey dz = 1 - beta (z - z_k).
    """
    theta, path = start(p_init), [success(start(p_init))]
    settings = {"beta": beta, "cost_clip": None, "log_w_clamp": 80.0}
    for _ in range(rounds):
        reference = theta
        for _ in range(inner):
            update = expected_update("proximal_kl", theta, reference, **settings)
            theta = theta + torch.linalg.solve(_fisher(theta), update) / (2 * beta)
        path.append(success(theta))
    return torch.stack(path)


def _fisher(theta: Tensor) -> Tensor:
    """[2, 2] mean of p (1-p) u u^T over the prompts."""
    p = success(theta)
    return torch.einsum("m,mi,mj->ij", 0.5 * p * (1 - p), DIRECTIONS, DIRECTIONS)


def _logprobs(theta: Tensor) -> Tensor:
    """[4] log-probs of action 1 and 0 on prompt 1, then on prompt 2."""
    logits = DIRECTIONS @ theta
    return torch.nn.functional.logsigmoid(torch.stack([logits, -logits], dim=1)).reshape(-1)
