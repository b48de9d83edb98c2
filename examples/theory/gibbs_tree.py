"""A token tree small enough to enumerate: 3 actions, 3 tokens, 27 responses, 13 histories, one logit row per history.

Every expectation is an exact sum over the 27 responses, and every update is made of the coefficients that training
uses (`token_coefficients`), so what holds here holds for the code that trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from megatron_rlvr.losses import token_coefficients

ACTIONS, DEPTH = 3, 3
RESPONSES = torch.tensor(list(product(range(ACTIONS), repeat=DEPTH)))  # [27, 3] actions
# [27, 3] history of each token: 0 the root, 1..3 after one token, 4..12 after two
HISTORIES = torch.stack(
    [torch.zeros(27, dtype=torch.long), 1 + RESPONSES[:, 0], 4 + 3 * RESPONSES[:, 0] + RESPONSES[:, 1]], dim=1
)
NUM_HISTORIES = 13
EXACT = {"horizon": "full", "cost_clip": None, "log_w_clamp": 80.0}  # Theorem 1 speaks of the unclipped full credit


@dataclass(frozen=True)
class Mixture:
    """Behaviour: one version is drawn per response and kept. policies: [13, 3] log-probs each; weights sum to 1."""

    policies: list[Tensor]
    weights: list[float] = field(default_factory=lambda: [1.0])


def random_policy(generator: torch.Generator, spread: float = 1.0) -> Tensor:
    """[13, 3] float64 log-probs."""
    return log_policy(spread * torch.randn(NUM_HISTORIES, ACTIONS, generator=generator, dtype=torch.float64))


def log_policy(logits: Tensor) -> Tensor:
    """[13, 3] logits -> log-probs."""
    return torch.log_softmax(logits, dim=-1)


def token_logprobs(policy: Tensor) -> Tensor:
    """[13, 3] -> [27, 3]: log-prob of each token of each response."""
    return policy[HISTORIES, RESPONSES]


def response_probabilities(policy: Tensor) -> Tensor:
    """[13, 3] -> [27]."""
    return token_logprobs(policy).sum(1).exp()


def objective(policy: Tensor, reference: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """[] J_k = E[R] - beta KL(policy || reference) (Proximal KL Eq. 1)."""
    cost = (token_logprobs(policy) - token_logprobs(reference)).sum(1)
    return (response_probabilities(policy) * (rewards - beta * cost)).sum()


def gibbs_policy(reference: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """[13, 3] the maximiser of J_k: pi_k(a|h) Z(ha)/Z(h), by backward induction (Eq. D.1, E.3-E.5)."""
    log_z = rewards / beta  # of whole responses, then of ever shorter histories
    rows: list[Tensor] = []
    for first, last in ((4, 13), (1, 4), (0, 1)):
        joint = reference[first:last] + log_z.view(-1, ACTIONS)
        log_z = torch.logsumexp(joint, dim=1)
        rows.insert(0, joint - log_z[:, None])
    return torch.cat(rows)


def expected_update(
    loss: str,
    logits: Tensor,
    behavior: Mixture,
    reference: Tensor,
    advantages: Tensor,
    whole_response: bool = False,
    **settings,
) -> Tensor:
    """[13, 3] E_behav[sum_i c_i grad log pi_theta(a_i|h_i)] in the logits, summed over all responses (Eq. E.2).

    advantages [27];  whole_response: weigh each response by its full likelihood ratio too (Eq. E.1)
    """
    logits = logits.detach().requires_grad_()
    learner = token_logprobs(log_policy(logits))
    total = torch.zeros((), dtype=torch.float64)
    for weight, policy in zip(behavior.weights, behavior.policies, strict=True):
        coefficients = token_coefficients(
            loss,
            logprobs=learner.reshape(-1),
            behavior_logprobs=token_logprobs(policy).reshape(-1),
            reference_logprobs=token_logprobs(reference).reshape(-1),
            advantages=advantages,
            cu_seqlens=torch.arange(0, RESPONSES.numel() + 1, DEPTH),
            **settings,
        ).view_as(learner)
        measure = weight * response_probabilities(policy)
        if whole_response:
            measure = measure * (learner.detach() - token_logprobs(policy)).sum(1).exp()
        total = total + (measure[:, None] * coefficients * learner).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient


def distance(policy: Tensor, target: Tensor) -> float:
    """KL(policy || target) over whole responses, nats."""
    return float((response_probabilities(policy) * (token_logprobs(policy) - token_logprobs(target)).sum(1)).sum())


def flow(
    loss: str,
    start: Tensor,
    behaviors: list[Mixture],
    reference: Tensor,
    rewards: Tensor,
    steps: int,
    size: float,
    **settings,
) -> list[Tensor]:
    """All policies [13, 3] on Euler steps of the expected update from `start`, under a behaviour that changes."""
    logits, path = start.clone(), [log_policy(start)]
    for step in range(steps):
        behavior = behaviors[step * len(behaviors) // steps]
        logits = logits + size * expected_update(loss, logits, behavior, reference, rewards, **settings)
        path.append(log_policy(logits))
    return path
