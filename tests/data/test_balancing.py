"""The sharing out of sequences: limits, the fewest micro-batches, evenness over ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlvr.data import plan_micro_batches
from megatron_rlvr.data.balancing import Layout

few_lengths = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def fewest_bins(lengths: list[int], limit: int, layout: Layout) -> int:
    """The least number of bins, by trying every assignment (sequence i goes to an old bin or opens a new one)."""

    def fits(members: list[int]) -> bool:
        return (sum(members) if layout == "packed" else len(members) * max(members)) <= limit

    def search(i: int, bins: list[list[int]]) -> int:
        if i == len(lengths):
            return len(bins)
        options = [[*bins[:b], [*bins[b], lengths[i]], *bins[b + 1 :]] for b in range(len(bins))]
        options.append([*bins, [lengths[i]]])
        return min((search(i + 1, o) for o in options if all(map(fits, o))), default=len(lengths))

    return search(0, [])


def micro_batches_per_rank(lengths: list[int], limit: int, layout: Layout, ranks: int = 1, multiple: int = 1) -> int:
    """Their number in a plan that has been checked to be whole and the same for every rank."""
    plan = plan_micro_batches(
        lengths, data_parallel_size=ranks, micro_batch_tokens=limit, layout=layout, micro_batch_multiple=multiple
    )
    assert sorted(i for rank in plan for indices in rank for i in indices) == list(range(len(lengths)))
    assert len(plan) == ranks and {len(rank) for rank in plan} == {len(plan[0])}
    return len(plan[0])


@settings(deadline=None)
@given(few_lengths, st.integers(12, 24), st.integers(1, 3), st.integers(1, 2))
def test_padded_sequences_get_the_fewest_micro_batches(
    lengths: list[int], limit: int, ranks: int, multiple: int
) -> None:
    fewest = -(-fewest_bins(lengths, limit, "padded") // (ranks * multiple)) * multiple
    assert micro_batches_per_rank(lengths, limit, "padded", ranks, multiple) == fewest


def test_packed_sequences_get_the_fewest_micro_batches_nearly_always() -> None:
    rng = np.random.default_rng(0)
    cases = [(rng.integers(1, 13, rng.integers(1, 7)).tolist(), int(rng.integers(12, 25))) for _ in range(2000)]
    excess = [micro_batches_per_rank(*case, "packed") - fewest_bins(*case, "packed") for case in cases]
    assert set(excess) <= {0, 1} and sum(excess) <= 4


def test_first_fit_saves_a_micro_batch_where_an_even_spread_would_not_fit() -> None:
    lengths = [3, 3, 2, 2, 2]  # spread longest first over two bins: 3+2+2 and 3+2; first fit: 3+3 and 2+2+2
    (bins,) = plan_micro_batches(lengths, data_parallel_size=1, micro_batch_tokens=6, layout="packed")
    assert sorted(bins) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_ranks_carry_like_loads_at_every_micro_batch(layout: Layout) -> None:
    lengths = np.random.default_rng(0).lognormal(7, 0.6, 512).astype(int).clip(64, 8192).tolist()
    plan = plan_micro_batches(lengths, data_parallel_size=8, micro_batch_tokens=16384, layout=layout)
    tokens = np.array([[sum(lengths[i] for i in indices) for indices in rank] for rank in plan])
    cost = (
        tokens
        if layout == "packed"
        else np.array([[len(indices) * max(lengths[i] for i in indices) for indices in rank] for rank in plan])
    )
    assert cost.max() <= 16384
    slack = cost.max(axis=0).sum() / cost.mean(axis=0).sum()  # ranks wait for the largest of each micro-batch
    assert slack < (1.01 if layout == "packed" else 1.15)
    assert cost.sum(axis=1).max() / cost.sum(axis=1).mean() < (1.01 if layout == "packed" else 1.1)


def test_the_plan_is_the_same_every_time_and_splits_ties_by_index() -> None:
    options = {"data_parallel_size": 2, "micro_batch_tokens": 8, "layout": "packed"}
    assert plan_micro_batches([4] * 8, **options) == plan_micro_batches([4] * 8, **options)
    assert sorted(i for rank in plan_micro_batches([4] * 8, **options) for b in rank for i in b) == list(range(8))
