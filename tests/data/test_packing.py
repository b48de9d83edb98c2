"""Micro-batches of a mini-batch against a plain reading of the trajectories, over ranks and layouts."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlvr.data import build_mini_batch, split_mini_batches
from megatron_rlvr.data.balancing import Layout
from megatron_rlvr.types import Group, MiniBatch, PackedBatch, Prompt, Trajectory, UserError

LAYOUTS: list[Layout] = ["packed", "padded"]
MAX_TOKENS = 20
run_options = st.fixed_dictionaries(
    {
        "data_parallel_size": st.integers(1, 4),
        "micro_batch_tokens": st.integers(24, 60),
        "pad_to_multiple": st.sampled_from([1, 2, 3, 8]),
        "micro_batch_multiple": st.sampled_from([1, 2, 3]),
        "layout": st.sampled_from(LAYOUTS),
    }
)


def make_trajectory(action_mask: list[bool], seed: int = 0, advantage: float = 1.0) -> Trajectory:
    mask = np.array(action_mask)
    rng = np.random.default_rng(seed)
    return Trajectory(
        token_ids=rng.integers(1, 10_000, len(mask)).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -rng.random(len(mask)), 0).astype(np.float32),
        versions=np.where(mask, rng.integers(0, 9, len(mask)), -1).astype(np.int32),
        finish_reason="stop",
        advantage=advantage,
    )


@st.composite
def trajectory_lists(draw: st.DrawFn, max_tokens: int = 20) -> list[Trajectory]:
    """One to twelve trajectories, at least one of them with an action token, none with one at position 0."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=max_tokens - 1), max_size=11))
    masks.append([True, *draw(st.lists(st.booleans(), max_size=max_tokens - 2))])
    return [make_trajectory([False, *mask], seed, advantage=seed - 3.5) for seed, mask in enumerate(masks)]


def all_ranks(trajectories: list[Trajectory], options: dict) -> list[MiniBatch]:
    return [
        build_mini_batch(trajectories, data_parallel_rank=rank, **options)
        for rank in range(options["data_parallel_size"])
    ]


def actions_of_trajectories(trajectories: list[Trajectory]) -> Counter:
    """Each action token as (tokens before it, itself, log-prob, version, advantage, place in its response)."""
    found: Counter = Counter()
    for trajectory in trajectories:
        place = 0
        for t in range(trajectory.num_tokens):
            if trajectory.action_mask[t]:
                found[
                    tuple(trajectory.token_ids[:t].tolist()),
                    int(trajectory.token_ids[t]),
                    float(trajectory.behavior_logprobs[t]),
                    int(trajectory.versions[t]),
                    trajectory.advantage,
                    place,
                ] += 1
                place += 1
    return found


def context(batch: PackedBatch, index: int) -> tuple[int, ...]:
    """The tokens that the position `index` attends to, from the boundaries (packed) or the row (padded)."""
    row, column = divmod(index, batch.token_ids.shape[1])
    start = 0 if batch.cu_seqlens is None else max(b for b in batch.cu_seqlens.tolist() if b <= column)
    return tuple(batch.token_ids[row, start : column + 1].tolist())


def actions_of_micro_batches(batches: list[PackedBatch]) -> Counter:
    found: Counter = Counter()
    for batch in batches:
        bounds = batch.action_cu_seqlens.tolist()
        for sequence, (start, end) in enumerate(pairwise(bounds)):
            for a in range(start, end):
                found[
                    context(batch, int(batch.action_index[a])),
                    int(batch.labels[a]),
                    float(batch.behavior_logprobs[a]),
                    int(batch.versions[a]),
                    float(batch.advantages[sequence]),
                    a - start,
                ] += 1
    return found


@settings(deadline=None)
@given(trajectory_lists(MAX_TOKENS), run_options)
def test_every_action_token_is_trained_on_once_with_its_own_context_and_values(
    trajectories: list[Trajectory], options: dict
) -> None:
    batches = [batch for rank in all_ranks(trajectories, options) for batch in rank.micro_batches]
    assert actions_of_micro_batches(batches) == actions_of_trajectories(trajectories)


@settings(deadline=None)
@given(trajectory_lists(MAX_TOKENS), run_options)
def test_limits_counts_and_multiples_hold(trajectories: list[Trajectory], options: dict) -> None:
    ranks = all_ranks(trajectories, options)
    counts = {len(rank.micro_batches) for rank in ranks}
    assert len(counts) == 1 and counts.pop() % options["micro_batch_multiple"] == 0
    for batch in (batch for rank in ranks for batch in rank.micro_batches):
        assert batch.token_ids.numel() <= options["micro_batch_tokens"]
        assert batch.token_ids.shape[1] % options["pad_to_multiple"] == 0
        assert batch.token_ids.shape[0] == 1 or options["layout"] == "padded"


@settings(deadline=None)
@given(trajectory_lists(MAX_TOKENS), run_options)
def test_denominators_are_of_the_whole_mini_batch_on_every_rank(trajectories: list[Trajectory], options: dict) -> None:
    lengths = [int(t.action_mask.sum()) for t in trajectories]
    ranks = all_ranks(trajectories, options)
    for rank in ranks:
        assert rank.num_action_tokens == sum(lengths)
        assert rank.num_sequences == sum(length > 0 for length in lengths)
    assert sum(len(batch.labels) for rank in ranks for batch in rank.micro_batches) == sum(lengths)
    fed = sum(trajectory.num_tokens - 1 for trajectory in trajectories if trajectory.action_mask.any())
    assert sum(batch.num_tokens for rank in ranks for batch in rank.micro_batches) == fed


@settings(deadline=None)
@given(trajectory_lists(MAX_TOKENS), run_options)
def test_places_and_groups_lead_back_to_each_response(trajectories: list[Trajectory], options: dict) -> None:
    """An advantage names its trajectory here, and trajectory i is of group i // 3."""
    owners = [index // 3 for index in range(len(trajectories))]
    seen = []
    for rank in all_ranks(trajectories, {**options, "group_index": owners}):
        assert rank.group_index is not None and len(rank.group_index) == rank.num_sequences
        for batch in rank.micro_batches:
            assert batch.sequence_index is not None and len(batch.sequence_index) == batch.num_sequences
            for place, advantage in zip(batch.sequence_index.tolist(), batch.advantages.tolist(), strict=True):
                if place >= 0:
                    assert rank.group_index[place] == owners[int(advantage + 3.5)]
                    seen.append(place)
    assert sorted(seen) == list(range(sum(t.response_length > 0 for t in trajectories)))


@settings(deadline=None)
@given(trajectory_lists(MAX_TOKENS), run_options)
def test_shapes_and_dtypes_are_those_of_the_type(trajectories: list[Trajectory], options: dict) -> None:
    for batch in (batch for rank in all_ranks(trajectories, options) for batch in rank.micro_batches):
        actions, sequences = batch.num_action_tokens, batch.num_sequences
        assert batch.token_ids.shape == batch.position_ids.shape
        assert batch.action_index.shape == batch.labels.shape == batch.versions.shape == (actions,)
        assert batch.behavior_logprobs.shape == (actions,) and batch.advantages.shape == (sequences,)
        assert batch.action_cu_seqlens[0] == 0 and batch.action_cu_seqlens[-1] == actions
        for name in ("token_ids", "position_ids", "action_index", "labels", "action_cu_seqlens", "versions"):
            assert getattr(batch, name).dtype == torch.int64
        assert batch.behavior_logprobs.dtype == batch.advantages.dtype == torch.float32


@settings(deadline=None)
@given(trajectory_lists(MAX_TOKENS), run_options)
def test_packed_rows_are_segments_that_restart_at_zero(trajectories: list[Trajectory], options: dict) -> None:
    for batch in (b for r in all_ranks(trajectories, {**options, "layout": "packed"}) for b in r.micro_batches):
        assert batch.cu_seqlens is not None and batch.cu_seqlens.dtype == torch.int32
        bounds = batch.cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == batch.token_ids.shape[1] and bounds == sorted(set(bounds))
        lengths = [end - start for start, end in pairwise(bounds)]
        assert batch.position_ids[0].tolist() == [i for length in lengths for i in range(length)]
        assert batch.max_seqlen == max(lengths)
        has_padding = len(lengths) - batch.num_sequences
        assert has_padding in (0, 1) and (not has_padding or lengths[-1] < options["pad_to_multiple"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_written_out_by_hand(layout: Layout) -> None:
    two_spans = Trajectory(
        token_ids=np.array([11, 12, 13, 14, 15], np.int32),
        action_mask=np.array([False, True, False, False, True]),
        behavior_logprobs=np.array([0, -0.5, 0, 0, -0.25], np.float32),
        versions=np.array([-1, 3, -1, -1, 4], np.int32),
        finish_reason="stop",
        advantage=2.0,
    )
    short = Trajectory(
        token_ids=np.array([21, 22, 23], np.int32),
        action_mask=np.array([False, True, True]),
        behavior_logprobs=np.array([0, -1, -2], np.float32),
        versions=np.array([-1, 5, 5], np.int32),
        finish_reason="length",
        advantage=-1.0,
    )
    batch = build_mini_batch(
        [two_spans, short],
        data_parallel_size=1,
        data_parallel_rank=0,
        micro_batch_tokens=16,
        layout=layout,
        pad_to_multiple=8,
        pad_token_id=99,
    ).micro_batches[0]
    if layout == "packed":
        assert batch.token_ids.tolist() == [[11, 12, 13, 14, 21, 22, 99, 99]]
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
        assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 4, 6, 8]
        assert batch.action_index.tolist() == [0, 3, 4, 5]
    else:
        assert batch.token_ids.tolist() == [[11, 12, 13, 14, 99, 99, 99, 99], [21, 22, 99, 99, 99, 99, 99, 99]]
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]] * 2
        assert batch.cu_seqlens is None
        assert batch.action_index.tolist() == [0, 3, 8, 9]
    assert batch.max_seqlen == 4
    assert batch.labels.tolist() == [12, 15, 22, 23]
    assert batch.action_cu_seqlens.tolist() == [0, 2, 4]
    assert batch.behavior_logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0]
    assert batch.versions.tolist() == [3, 4, 5, 5]
    assert batch.advantages.tolist() == [2.0, -1.0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_without_sequences_get_dummies(layout: Layout) -> None:
    options = {"data_parallel_size": 2, "micro_batch_tokens": 16, "layout": layout, "pad_to_multiple": 4}
    full, empty = all_ranks([make_trajectory([False, True, True])], {**options, "pad_token_id": 7})
    (dummy,) = empty.micro_batches
    assert len(full.micro_batches) == 1 and full.micro_batches[0].num_action_tokens == 2
    assert empty.num_action_tokens == 2 and empty.num_sequences == 1
    assert dummy.token_ids.tolist() == [[7, 7, 7, 7]] and dummy.position_ids.tolist() == [[0, 1, 2, 3]]
    assert dummy.num_sequences == 1 and dummy.num_action_tokens == 0
    assert dummy.action_cu_seqlens.tolist() == [0, 0] and dummy.advantages.tolist() == [0.0]
    assert dummy.cu_seqlens is None or dummy.cu_seqlens.tolist() == [0, 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_longer_than_a_micro_batch_is_refused_with_the_number_to_set(layout: Layout) -> None:
    options = {"data_parallel_size": 1, "data_parallel_rank": 0, "layout": layout, "pad_to_multiple": 8}
    trajectories = [make_trajectory([False] + [True] * 17)]
    with pytest.raises(
        UserError, match=r"actor\.micro_batch_tokens=23; raise actor\.micro_batch_tokens to at least 24"
    ):
        build_mini_batch(trajectories, micro_batch_tokens=23, **options)
    assert len(build_mini_batch(trajectories, micro_batch_tokens=24, **options).micro_batches) == 1


def test_inconsistent_trajectories_are_refused() -> None:
    options = {"data_parallel_size": 1, "micro_batch_tokens": 16, "layout": "packed"}
    good = make_trajectory([False, True])
    short_versions = make_trajectory([False, True])
    short_versions.versions = short_versions.versions[:1]
    for trajectories, words in [
        ([good, make_trajectory([True, True])], "trajectory 1: token 0 is an action token"),
        ([make_trajectory([False, True], advantage=float("nan"))], "advantage is nan"),
        ([short_versions], "shapes"),
        ([make_trajectory([False, False])], "none of the 1 trajectories"),
    ]:
        with pytest.raises(ValueError, match=words):
            build_mini_batch(trajectories, data_parallel_rank=0, **options)
    with pytest.raises(ValueError, match="data_parallel_rank=1"):
        build_mini_batch([good], data_parallel_rank=1, **options)


def test_a_large_mini_batch_is_packed_in_well_under_a_tenth_of_a_second() -> None:
    trajectories = [make_trajectory([False] * 100 + [True] * (400 + 5 * i % 1000), i) for i in range(256)]

    def seconds() -> float:
        start = time.process_time()
        build_mini_batch(
            trajectories, data_parallel_size=1, data_parallel_rank=0, micro_batch_tokens=16384, layout="packed"
        )
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.1


def test_a_rollout_batch_splits_into_consecutive_mini_batches() -> None:
    groups = [Group(Prompt(str(i), (1,), "1"), []) for i in range(6)]
    assert [[g.prompt.id for g in part] for part in split_mini_batches(groups, 2)] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
    ]
    with pytest.raises(ValueError, match="6 groups do not split into mini-batches of 4"):
        split_mini_batches(groups, 4)
    with pytest.raises(ValueError, match="0 groups"):
        split_mini_batches([], 4)
