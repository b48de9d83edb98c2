"""The prompt cursor: whole epochs, exact resumption, refusal of another run's state."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlvr.data import PromptCursor
from megatron_rlvr.types import UserError

sizes = st.integers(1, 20)
takes = st.lists(st.integers(0, 30), max_size=8)


@settings(deadline=None)
@given(sizes, st.integers(0, 2**63), st.booleans(), takes)
def test_every_epoch_deals_every_prompt_once(num_prompts: int, seed: int, shuffle: bool, counts: list[int]) -> None:
    cursor = PromptCursor(num_prompts, seed, shuffle)
    batches = [cursor.take(count) for count in counts]
    assert [len(batch) for batch in batches] == counts
    dealt = [i for batch in batches for i in batch]
    for start in range(0, len(dealt) - num_prompts + 1, num_prompts):
        assert sorted(dealt[start : start + num_prompts]) == list(range(num_prompts))
    assert cursor.epoch == len(dealt) // num_prompts
    assert shuffle or dealt == [i % num_prompts for i in range(len(dealt))]


@settings(deadline=None)
@given(sizes, st.integers(0, 99), st.booleans(), takes, takes)
def test_a_resumed_cursor_goes_on_exactly(
    num_prompts: int, seed: int, shuffle: bool, before: list[int], after: list[int]
) -> None:
    cursor = PromptCursor(num_prompts, seed, shuffle)
    for count in before:
        cursor.take(count)
    resumed = PromptCursor(num_prompts, seed, shuffle)
    resumed.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert [resumed.take(count) for count in after] == [cursor.take(count) for count in after]
    assert resumed.state_dict() == cursor.state_dict()


@settings(deadline=None)
@given(sizes, takes)
def test_the_walk_does_not_depend_on_how_it_is_cut(num_prompts: int, counts: list[int]) -> None:
    cursor = PromptCursor(num_prompts, seed=3)
    assert [i for count in counts for i in cursor.take(count)] == PromptCursor(num_prompts, seed=3).take(sum(counts))


def test_orders_differ_between_epochs_and_seeds() -> None:
    first = PromptCursor(100, seed=0)
    orders = [first.take(100), first.take(100), PromptCursor(100, seed=1).take(100)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(order != sorted(order) for order in orders)


def test_the_order_is_the_recorded_one() -> None:
    assert PromptCursor(8, seed=0).take(16) == [0, 2, 1, 5, 4, 3, 6, 7, 5, 3, 7, 2, 4, 1, 0, 6]


@pytest.mark.parametrize(("field", "value"), [("num_prompts", 11), ("seed", 1), ("shuffle", False)])
def test_the_state_of_another_run_is_refused(field: str, value: int) -> None:
    options = {"num_prompts": 10, "seed": 0, "shuffle": True}
    state = PromptCursor(**options).state_dict()
    with pytest.raises(UserError, match=f"{field}={options[field]} but this run has {value}"):
        PromptCursor(**{**options, field: value}).load_state_dict(state)


def test_an_empty_prompt_set_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptCursor(0, seed=0)
