"""Group advantages: the formulas, their special cases, and the held-out values."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlvr.advantages import AdvantageError, group_advantages

GOLDEN = Path(__file__).parents[2] / ".." / "shared" / "golden" / "losses.json"
quick = settings(max_examples=40, deadline=None)
groups = st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=1, max_size=5)


@pytest.mark.skipif(not GOLDEN.is_file(), reason=f"no reference values at {GOLDEN}")
def test_held_out_values():
    calls = {
        "grpo_eps_1e_6": {},
        "grpo_eps_1e_5": {"eps": 1e-5},
        "center": {"normalization": "center"},
        "perturbed": {"eps": 1e-5, "perturb_baseline": True},
    }
    for case in json.loads(GOLDEN.read_text())["advantages"]:
        rewards = torch.tensor(case["rewards"], dtype=torch.float64)
        for key, values in calls.items():
            got = group_advantages(rewards, len(rewards), **values)
            assert got.tolist() == pytest.approx(case[key], rel=1e-6, abs=1e-12)


@given(groups)
@quick
def test_by_definition(rewards):
    flat = torch.tensor(rewards, dtype=torch.float64).flatten()
    expected = []
    for group in rewards:
        scale = statistics.stdev(group) + 1e-6 if len(set(group)) > 1 else math.inf
        expected += [(r - statistics.fmean(group)) / scale for r in group]
    assert group_advantages(flat, 3).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(groups)
@quick
def test_groups_do_not_touch_each_other_and_sum_to_zero(rewards):
    flat = torch.tensor(rewards, dtype=torch.float64).flatten()
    together = group_advantages(flat, 3)
    alone = [group_advantages(part, 3) for part in flat.split(3)]
    assert torch.equal(together, torch.cat(alone))
    assert together.view(-1, 3).sum(1).abs().max() < 1e-6


@pytest.mark.parametrize("normalization", ["grpo", "center"])
@pytest.mark.parametrize("value", [0.1, -1.0, 1e8])
def test_equal_rewards_give_exactly_zero(normalization, value):
    rewards = torch.full((8,), value)
    for perturb in (False, True):
        got = group_advantages(rewards, 8, normalization=normalization, perturb_baseline=perturb)
        assert got.tolist() == [0.0] * 8


def test_perturbation_shifts_mixed_groups_alone():
    rewards = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    shift = group_advantages(rewards, 2, perturb_baseline=True) - group_advantages(rewards, 2)
    assert shift.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0], rel=1e-12)


def test_groups_of_different_size():
    """A reallocated budget: sizes 2 and 4."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    got = group_advantages(rewards, [2, 4])
    expected = torch.cat([group_advantages(rewards[:2], 2), group_advantages(rewards[2:], 4)])
    assert torch.equal(got, expected)


def test_dtypes():
    rewards = torch.tensor([1, -1, 1, 1])
    assert group_advantages(rewards, 4).dtype == torch.float32
    assert group_advantages(rewards.double(), 4).dtype == torch.float64
    assert group_advantages(rewards.bfloat16(), 4).dtype == torch.float32
    assert group_advantages(torch.zeros(0), 4).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "size", "values", "message"),
    [
        ([1.0, 0.0, 1.0], 2, {}, "group_size=2 does not divide 3 rewards"),
        ([1.0, 0.0], 0, {}, "group_size=0"),
        ([1.0, 0.0], 1, {}, "group_size=1 has no spread"),
        ([1.0, 0.0, 1.0], [2, 2], {}, "group sizes sum to 4 for 3 rewards"),
        ([1.0, 0.0], 2, {"normalization": "grop"}, "normalization='grop' is unknown"),
        ([1.0, 0.0], 2, {"eps": 0.0}, "eps=0.0 is refused"),
        ([1.0, 0.0, 1.0, math.nan], 2, {}, r"reward of response 3 \(group 1\) is nan"),
        ([[1.0, 0.0]], 2, {}, r"rewards have shape \(1, 2\)"),
    ],
)
def test_refusals(rewards, size, values, message):
    with pytest.raises(AdvantageError, match=message):
        group_advantages(torch.tensor(rewards), size, **values)


def test_groups_of_one_can_be_centered():
    assert group_advantages(torch.tensor([1.0, 3.0]), 1, normalization="center").tolist() == [0.0, 0.0]
