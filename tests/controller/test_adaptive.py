"""A budget shared out over prompts: what each round samples, and that groups of unequal size are normalised apart."""

from __future__ import annotations

import numpy as np
import pytest

from tests.controller.test_controller import asked, make_controller

ADAPTIVE = {
    "rollout": {"group_size": 4, "max_response_length": 8, "allocation": "adaptive", "allocation_range": [2, 10]}
}


def test_a_pilot_decides_how_the_rest_of_the_budget_is_spent(one_rank):
    """4 prompts, 4 x 4 responses: pilots of 2 find 0, 1, 2, 2 right; weights 1/p = 4, 2, 4/3, 4/3 share 16 out."""
    engine, controller = make_controller([0, 1, 2, 2], **ADAPTIVE)
    groups = controller.collect()
    sizes = [len(group.trajectories) for group in groups]
    assert sum(sizes) == 16 and min(sizes) >= 2 and sizes == [7, 4, 3, 2]
    pilot, rest = asked(engine)
    assert pilot == [0, 1, 2, 3]
    assert rest == [0] * 5 + [1] * 2 + [2]
    assert [group.prompt.id for group in groups] == ["0", "1", "2", "3"]
    assert controller.metrics()["rollout/generated_tokens"] == controller.generated_tokens / 2


def test_advantages_are_relative_to_each_group_of_its_own_size(one_rank):
    _, controller = make_controller([0, 1, 2, 2], **ADAPTIVE)
    for group in controller.collect():
        rewards = np.array([t.reward for t in group.trajectories])
        spread = rewards.std(ddof=1) if len(set(rewards)) > 1 else np.inf
        expected = (rewards - rewards.mean()) / (spread + 1e-6)
        assert [t.advantage for t in group.trajectories] == pytest.approx(expected)


def test_unequal_groups_split_into_mini_batches_that_count_their_own_tokens(one_rank):
    _, controller = make_controller([0, 1, 2, 2], **ADAPTIVE)
    groups = controller.collect()
    counts = [batch.num_action_tokens for _, batch in controller.mini_batches(groups)]
    expected = [sum(t.response_length for g in part for t in g.trajectories) for part in (groups[:2], groups[2:])]
    assert counts == expected
    assert [batch.num_sequences for _, batch in controller.mini_batches(groups)] == [11, 5]
