"""GiGPO against plain loops, and the cases in which it is GRPO."""

import math
import statistics
from collections import defaultdict

import pytest
import torch

from megatron_rlvr.advantages import AdvantageError, gigpo_advantages, group_advantages
from megatron_rlvr.advantages.gigpo import discounted_returns

EPISODES = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
ANCHORS = torch.tensor([7, 8, 9, 7, 8, 7, 7, 9, 9, 8])
STEP_REWARDS = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.5, 1.0, 0.0, 0.1, 0.0, 1.0], dtype=torch.float64)
EPISODE_REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)


def naive_returns(gamma: float) -> list[float]:
    steps = EPISODES.tolist()
    return [
        sum(gamma ** (k - t) * float(STEP_REWARDS[k]) for k in range(t, len(steps)) if steps[k] == steps[t])
        for t in range(len(steps))
    ]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_discounted_returns(gamma):
    got = discounted_returns(STEP_REWARDS, EPISODES, gamma)
    assert got.tolist() == pytest.approx(naive_returns(gamma))


@pytest.mark.parametrize("omega", [0.0, 0.5, 1.0])
def test_by_definition(omega):
    """Two groups of two episodes: anchors are shared inside a group, never across."""
    returns, by_place = naive_returns(0.9), defaultdict(list)
    places = [(int(e) // 2, int(a)) for e, a in zip(EPISODES, ANCHORS, strict=True)]
    for place, value in zip(places, returns, strict=True):
        by_place[place].append(value)
    expected = []
    for t, place in enumerate(places):
        peers = by_place[place]
        spread = statistics.stdev(peers) + 1e-6 if len(set(peers)) > 1 else math.inf
        episode = group_advantages(EPISODE_REWARDS, 2)[EPISODES[t]]
        expected.append(float(episode) + omega * (returns[t] - statistics.fmean(peers)) / spread)
    got = gigpo_advantages(EPISODE_REWARDS, STEP_REWARDS, EPISODES, ANCHORS, 2, omega=omega, gamma=0.9)
    assert got.tolist() == pytest.approx(expected)


def test_without_shared_states_it_is_grpo():
    got = gigpo_advantages(EPISODE_REWARDS, STEP_REWARDS, EPISODES, torch.arange(10), 4)
    assert torch.equal(got, group_advantages(EPISODE_REWARDS, 4)[EPISODES])


def test_refusals():
    with pytest.raises(AdvantageError, match="do not match"):
        gigpo_advantages(EPISODE_REWARDS, STEP_REWARDS, EPISODES[:3], ANCHORS, 2)
    with pytest.raises(AdvantageError, match="keep the steps of an episode together"):
        gigpo_advantages(EPISODE_REWARDS, STEP_REWARDS, EPISODES.flip(0), ANCHORS, 2)
    with pytest.raises(AdvantageError, match="gamma=2"):
        gigpo_advantages(EPISODE_REWARDS, STEP_REWARDS, EPISODES, ANCHORS, 2, gamma=2)
    with pytest.raises(AdvantageError, match="finite reward"):
        gigpo_advantages(EPISODE_REWARDS, STEP_REWARDS * math.nan, EPISODES, ANCHORS, 2)
