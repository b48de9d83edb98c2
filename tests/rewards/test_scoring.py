"""Scores, shaping and their sums over rollout groups; the overlong penalty against its reference values."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_rlvr.rewards import Scorer, overlong_penalty, score_groups, training_accuracy
from megatron_rlvr.types import Group, Prompt, Trajectory, UserError

GOLDEN = Path(__file__).resolve().parents[2] / "../shared/golden/losses.json"


def trajectory(text: str, response_length: int) -> Trajectory:
    mask = np.array([False, False] + [True] * response_length)
    zeros = np.zeros(len(mask))
    return Trajectory(
        token_ids=zeros.astype(np.int32),
        action_mask=mask,
        behavior_logprobs=zeros.astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason="stop",
        text=text,
    )


def groups() -> list[Group]:
    return [
        Group(Prompt("a", (1, 2), "7"), [trajectory(r"\boxed{7}", 3), trajectory(r"\boxed{8}", 6)]),
        Group(Prompt("b", (1, 2), "0.5"), [trajectory(r"\boxed{.50}", 8)]),
    ]


def flat(batch: list[Group]) -> list[Trajectory]:
    return [t for group in batch for t in group.trajectories]


def test_overlong_penalty_matches_the_reference_values() -> None:
    if not GOLDEN.exists():
        pytest.skip("the shared reference values are not here")
    cases = json.loads(GOLDEN.read_text())["overlong"]
    assert len(cases) >= 8
    for case in cases:
        assert overlong_penalty(case["length"]) == case["penalty"]


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (10, 0), (11, -0.1), (15, -0.5), (20, -1), (25, -1.5)])
def test_overlong_penalty_is_a_line_between_start_and_limit(length: int, penalty: float) -> None:
    assert overlong_penalty(length, start=10, limit=20) == pytest.approx(penalty, abs=1e-15)


@pytest.mark.parametrize(("start", "limit"), [(0, 10), (10, 10), (20, 10), (-1, 10)])
def test_overlong_penalty_refuses_an_empty_range(start: int, limit: int) -> None:
    with pytest.raises(ValueError, match="start"):
        overlong_penalty(5, start, limit)


def test_scores_are_verdicts_and_rewards_add_the_penalty() -> None:
    batch = groups()
    assert all(math.isnan(t.score) and math.isnan(t.reward) for t in flat(batch))
    score_groups(batch, name="strict_box", overlong_start=4, max_response_length=8)
    assert [t.score for t in flat(batch)] == [1.0, -1.0, -1.0]
    assert [t.reward for t in flat(batch)] == [1.0, -1.5, -2.0]
    assert flat(batch)[1].reward_parts == {"correctness": -1.0, "overlong": -0.5}


def test_without_shaping_the_reward_is_the_score() -> None:
    batch = groups()
    score_groups(batch, name="normalized_box")
    assert [t.score for t in flat(batch)] == [t.reward for t in flat(batch)] == [1.0, -1.0, 1.0]
    assert flat(batch)[0].reward_parts == {"correctness": 1.0}


def test_scoring_again_replaces_the_first_scores() -> None:
    batch = groups()
    score_groups(batch, name="strict_box", overlong_start=4, max_response_length=8)
    score_groups(batch, name="strict_box")
    assert [t.reward for t in flat(batch)] == [1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "boxed"}, "rewards.name=boxed"),
        ({"name": "custom"}, "rewards.name=custom names no function; set rewards.function"),
        ({"name": "strict_box", "overlong_start": 8, "max_response_length": 8}, "overlong_start=8"),
        ({"name": "strict_box", "overlong_start": 8}, "max_response_length=None"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_score(settings: dict, words: str) -> None:
    batch = groups()
    with pytest.raises(UserError, match=words):
        score_groups(batch, **settings)
    assert all(math.isnan(t.score) for t in flat(batch))


def test_a_response_without_a_closed_box_pays_the_format_penalty() -> None:
    batch = [Group(Prompt("a", (1, 2), "7"), [trajectory(text, 3) for text in (r"\boxed{7}", r"\boxed{8", "7")])]
    with Scorer("strict_box", format_penalty=0.25) as scorer:
        scorer.score(batch)
        assert scorer.counts == {"correct": 1, "wrong": 2, "unparsable": 0, "timeout": 0, "killed": 0, "crashed": 0}
    assert [t.reward_parts["format"] for t in flat(batch)] == [0.0, -0.25, -0.25]
    assert [t.score for t in flat(batch)] == [1.0, -1.0, -1.0]
    assert [t.reward for t in flat(batch)] == [1.0, -1.25, -1.25]


def test_parts_of_a_custom_function_shape_the_reward_and_not_the_score() -> None:
    batch = [Group(Prompt("a", (1, 2), "7"), [trajectory(text, 6) for text in ("parts", "7", "8", "raise")])]
    options = {"overlong_start": 4, "max_response_length": 8, "function": "tests.rewards.functions:obedient"}
    with Scorer("custom", **options) as scorer:
        scorer.score(batch)
        assert scorer.counts["correct"] == 2 and scorer.counts["wrong"] == 1 and scorer.counts["crashed"] == 1
    assert flat(batch)[0].reward_parts == {"correctness": 1.0, "brevity": -0.25, "language": 0.5, "overlong": -0.5}
    assert [t.score for t in flat(batch)] == [1.0, 1.0, -1.0, -1.0]
    assert [t.reward for t in flat(batch)] == [0.75, 0.5, -1.5, -1.5]
    named_alike = {**options, "function": "tests.rewards.functions:own_overlong"}
    with (
        Scorer("custom", **named_alike) as scorer,
        pytest.raises(UserError, match="a part 'overlong', which a penalty"),
    ):
        scorer.score(batch)


def test_training_accuracy_maps_scores_to_shares() -> None:
    assert [training_accuracy(score) for score in (-1.0, 0.0, 1.0)] == [0.0, 0.5, 1.0]
