from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rlvr.advantages import AdvantageError, allocate_responses


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.integers(4, 32),
)
def test_the_budget_is_exact_within_the_bounds_and_harder_prompts_get_no_less(successes, group_size):
    total = len(successes) * group_size
    sizes = allocate_responses(successes, 4, total, low=4, high=32)
    assert sum(sizes) == total and min(sizes) >= 4 and max(sizes) <= 32
    for easy, hard in ((i, j) for i in range(len(sizes)) for j in range(len(sizes)) if successes[i] > successes[j]):
        assert sizes[hard] >= sizes[easy] - 1  # rounding


def test_unclipped_shares_are_proportional_to_the_inverse_success_rate():
    """p = 1/6, 2/6, 3/6: weights 6, 3, 2, so 66 responses go 36, 18, 12."""
    assert allocate_responses([0, 1, 2], 4, 66, low=1, high=60) == [36, 18, 12]


def test_what_a_clipped_prompt_leaves_goes_to_the_others():
    """Weights 6 and 3, 3, 3; the first stops at 10, the others share the rest."""
    assert allocate_responses([0, 1, 1, 1], 4, 28, low=4, high=10) == [10, 6, 6, 6]


def test_equal_prompts_share_equally():
    assert allocate_responses([2] * 5, 4, 40) == [8] * 5
    assert sorted(allocate_responses([2] * 5, 4, 42), reverse=True) == [9, 9, 8, 8, 8]


def test_a_total_that_the_bounds_cannot_reach_is_refused():
    for total in (4 * 3 - 1, 32 * 3 + 1):
        with pytest.raises(AdvantageError, match=f"{total} responses cannot be shared out over 3 prompts"):
            allocate_responses([0, 1, 2], 4, total)


def test_a_large_batch_is_exact():
    rng = np.random.default_rng(0)
    sizes = allocate_responses(rng.integers(0, 5, 4096).tolist(), 4, 4096 * 8)
    assert sum(sizes) == 4096 * 8
