"""GiGPO: credit for the episodes of a group plus credit for steps taken from the same environment state (SPEC 1).

A = A_episode + omega A_step (arXiv 2505.10978): A_episode compares the G episodes of a task, A_step compares the
discounted returns of all steps of the group that start from the same state, the anchor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rlvr.advantages.group import AdvantageError, group_advantages, relative_to_group


@torch.no_grad()
def gigpo_advantages(
    episode_rewards: Tensor,
    step_rewards: Tensor,
    step_episodes: Tensor,
    step_anchors: Tensor,
    group_size: int,
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    normalization: str = "grpo",
    eps: float = 1e-6,
) -> Tensor:
    """[N] one advantage per step; a step whose state nobody else of its group visited has only its episode's.

    episode_rewards [E] groups of `group_size` stand together
    step_rewards    [N] reward of each step; the steps of an episode stand together, in order
    step_episodes   [N] int64, index of the step's episode
    step_anchors    [N] int64, equal for equal states (a hash or an index of the observation)
    """
    _check(episode_rewards, step_rewards, step_episodes, step_anchors, omega, gamma)
    episode = group_advantages(episode_rewards, group_size, normalization=normalization, eps=eps).double()
    returns = discounted_returns(step_rewards.detach().double(), step_episodes, gamma)
    places = torch.stack([step_episodes // group_size, step_anchors], dim=1)
    _, anchor, sizes = torch.unique(places, dim=0, return_inverse=True, return_counts=True)
    order = anchor.argsort(stable=True)  # the steps of one anchor side by side
    step = torch.empty_like(returns)
    step[order] = relative_to_group(returns[order], sizes, normalization, eps)
    advantages = episode[step_episodes] + omega * step
    return advantages.to(step_rewards.dtype if step_rewards.dtype == torch.float64 else torch.float32)


def discounted_returns(rewards: Tensor, episodes: Tensor, gamma: float) -> Tensor:
    """[N] -> [N]: sum_k gamma^k r_{t+k} to the end of the episode, by doubling the reach: log2(N) passes."""
    returns, reach = rewards.clone(), 1
    while reach < len(rewards):
        same = episodes[:-reach] == episodes[reach:]
        later = torch.where(same, returns[reach:], 0.0)
        returns[:-reach] += gamma**reach * later
        reach *= 2
    return returns


def _check(
    episode_rewards: Tensor, step_rewards: Tensor, episodes: Tensor, anchors: Tensor, omega: float, gamma: float
) -> None:
    if not len(step_rewards) == len(episodes) == len(anchors):
        raise AdvantageError(
            f"{len(step_rewards)} step rewards, {len(episodes)} episode indices, {len(anchors)} anchors do not match: "
            "pass one of each per step."
        )
    last = len(episode_rewards) - 1
    if bool((episodes.diff() < 0).any() | (episodes < 0).any() | (episodes > last).any()):
        raise AdvantageError(
            f"step_episodes leave 0 .. {last} or fall: keep the steps of an episode together, in order."
        )
    if not bool(torch.isfinite(step_rewards).all()):
        raise AdvantageError(
            "step_rewards hold NaN or infinity: give every step a finite reward, 0 where there is none."
        )
    if not (0 <= gamma <= 1 and omega >= 0):
        raise AdvantageError(f"gamma={gamma} and omega={omega} are refused: give gamma from 0 to 1 and omega from 0.")
