"""Which groups teach nothing, and when to stop looking for others."""

import math

import pytest
import torch

from megatron_rlvr.advantages import AdvantageError, DynamicSamplingExhausted, RefillBudget, informative_groups


def test_the_verdicts_decide_and_not_the_shaped_rewards():
    scores = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0])
    shaped = scores - torch.tensor([0.0, 0.3, 0.0, 0.9, 0.0, 0.0])
    assert informative_groups(scores, 2).tolist() == [False, False, True]
    assert informative_groups(shaped, 2).tolist() == [True, True, True]  # what filtering on rewards would have kept


def test_booleans_and_counts_are_scores_too():
    assert informative_groups(torch.tensor([True, False, True, True]), 2).tolist() == [True, False]
    assert informative_groups(torch.zeros(0), 2).tolist() == []


def test_a_batch_fills_over_rounds_and_takes_no_more_than_it_needs():
    budget = RefillBudget(wanted=2, max_attempts=3)
    assert budget.admit(torch.tensor([1.0, 1.0, 1.0, -1.0]), 2).tolist() == [False, True]
    assert budget.missing == 1
    assert budget.admit(torch.tensor([1.0, -1.0, -1.0, 1.0]), 2).tolist() == [True, False]
    assert budget.missing == 0 and budget.history == [1, 2]


def test_running_out_of_attempts_shows_the_statistics():
    budget = RefillBudget(wanted=2, max_attempts=2)
    budget.admit(torch.tensor([1.0, 1.0, -1.0, -1.0]), 2)
    with pytest.raises(DynamicSamplingExhausted) as caught:
        budget.admit(torch.tensor([-1.0, -1.0, -1.0, 1.0]), 2)
    text = str(caught.value)
    assert "1 of 2 informative groups in 2 rounds ([0, 1] per round; 1 groups all correct, 2 all wrong)" in text
    assert "max_attempts" in text


def test_refusals():
    with pytest.raises(AdvantageError, match="group_size=2 does not divide"):
        informative_groups(torch.zeros(3), 2)
    with pytest.raises(AdvantageError, match="hold NaN"):
        informative_groups(torch.tensor([1.0, math.nan]), 2)
