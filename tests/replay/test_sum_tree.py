"""The sum tree against running sums, and its equality with a fresh tree after any history."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from megatron_rlvr.replay.sum_tree import SumTree

WEIGHTS = st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 1e-12, 1e12, 7.0]), min_size=1, max_size=40)


@given(WEIGHTS, st.integers(0, 2**53 - 1))
def test_a_point_falls_on_the_item_that_running_sums_name(weights: list[float], numerator: int) -> None:
    integers = [round(weight * 10) for weight in weights if weight <= 7.0]  # sums without rounding
    tree = SumTree(integers)
    if not sum(integers):
        assert tree.total == 0.0
        return
    point = numerator / 2**53 * tree.total
    sums = list(accumulate(integers))
    assert tree.find(point) == next(k for k, end in enumerate(sums) if Fraction(point) < end)


@given(WEIGHTS, st.integers(0, 2**53 - 1))
def test_no_point_falls_on_weight_zero(weights: list[float], numerator: int) -> None:
    tree = SumTree(weights)
    if tree.total > 0.0:
        assert weights[tree.find(numerator / 2**53 * tree.total)] > 0.0


def test_a_difference_that_rounds_up_to_a_weight_stays_on_it() -> None:
    """The point is below the total, yet less the first weight it rounds (to even) to all of the third."""
    ulp = 2.0**-52
    tree = SumTree([1.5 * ulp, 0.0, 1.5, 0.0])
    point = 1.5 + ulp
    assert point < tree.total and point - 1.5 * ulp == 1.5
    assert tree.find(point) == 2


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0.0, 1e6)), max_size=60))
def test_sums_do_not_drift(changes: list[tuple[int, float]]) -> None:
    tree, weights = SumTree(), [0.0] * 41
    for item, weight in changes:
        tree.set(item, weight)
        weights[item] = weight
    fresh = SumTree(weights)
    assert tree.total == fresh.total
    for k in range(64):
        assert tree.find(k / 64 * tree.total) == fresh.find(k / 64 * fresh.total) or not tree.total
