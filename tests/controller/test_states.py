"""Where batches start from with a replay buffer: shares, order, what is inserted, what a shortage does."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.controller.states import StateSource, spread
from megatron_rlvr.data.demonstrations import demonstration
from megatron_rlvr.types import Group, Prompt, UserError

PROMPTS = [Prompt(str(p), (p, 9), "yes") for p in range(8)]


def make_source(experts=(), prompts=PROMPTS, **replay):
    config = RunConfig.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": "unused"},
            "data": {"train": "unused", "shuffle": False},
            "rollout": {"group_size": 4, "max_response_length": 8},
            "replay": replay,
        }
    )
    return StateSource(config, prompts, experts)


def group(prompt, scores, response=(5, 6, 7, 2)):
    trajectories = []
    for index, score in enumerate(scores):
        t = demonstration(prompt.token_ids, [*response[:-1], 10 + index])
        t.score = score
        trajectories.append(t)
    return Group(prompt, trajectories)


def tokens(prompt):
    return [*prompt.token_ids, *prompt.prefix]


def test_without_replay_states_are_the_next_prompts():
    source = make_source(ratio=0.0)
    assert source.propose(5) == PROMPTS[:5] and source.propose(3) == PROMPTS[5:]
    source.learn([group(PROMPTS[0], [1, -1, -1, -1])])
    assert source.buffer is None and source.metrics == {}


def test_an_empty_buffer_gives_fresh_prompts_and_counts_them():
    source = make_source(ratio=0.5)
    assert source.propose(4) == PROMPTS[:4]
    source.learn([])
    assert source.metrics["replay/shortfall"] == 2 and source.metrics["replay/drawn"] == 0


@pytest.mark.parametrize(
    ("ratio", "count", "replayed"), [(0.5, 4, 2), (0.5, 5, 3), (0.3, 8, 2), (0.3, 5, 2), (1.0, 3, 3)]
)
def test_the_share_of_prefixes_is_rounded_half_up(ratio, count, replayed):
    source = make_source(ratio=ratio)
    source.learn([group(PROMPTS[3], [1, -1, -1, -1])])
    states = source.propose(count)
    assert sum(s.replayed for s in states) == replayed and len(states) == count
    assert [s for s in states if not s.replayed] == PROMPTS[: count - replayed]


def test_prefixes_are_those_of_the_newest_right_response_and_carry_their_prompt():
    source = make_source(ratio=1.0)
    source.learn([group(PROMPTS[3], [1, -1, 1, -1]), group(PROMPTS[4], [-1] * 4)])
    states = source.propose(200)
    response = (5, 6, 7, 12)  # of the third sample, the last right one
    assert {s.prefix for s in states} == {response[:i] for i in range(4)}
    assert all(s.id == "3" and s.answer == "yes" and s.token_ids == (3, 9) and s.replayed for s in states)
    p = 0.5 + 0.5 * np.arange(4) / 4
    shares = np.bincount([len(s.prefix) for s in states], minlength=4) / 200
    assert shares == pytest.approx(np.sqrt(p * (1 - p)) / np.sqrt(p * (1 - p)).sum(), abs=0.12)


def test_a_replayed_group_inserts_nothing_and_a_prompt_keeps_its_newest_trajectory():
    source = make_source(ratio=1.0)
    source.learn([group(PROMPTS[3], [1, -1, -1, -1])])
    (state,) = source.propose(1)
    source.learn([group(state, [1, 1, -1, -1])])
    assert source.buffer.num_trajectories == 1 and len(source.buffer) == 4
    assert {s.prefix[3:] for s in source.propose(50)} == {()}
    source.learn([group(PROMPTS[3], [-1, 1, -1, -1], response=(7, 7, 7, 7, 7, 2))])
    assert source.buffer.num_trajectories == 1 and len(source.buffer) == 6
    assert {s.prefix[:1] for s in source.propose(50)} <= {(), (7,)}


def test_prefixes_leave_after_the_window():
    source = make_source(ratio=1.0, recency_window=2)
    source.learn([group(PROMPTS[0], [1, -1, -1, -1])])
    for _ in range(2):  # the two batches after the one that it was sampled in
        assert len(source.buffer) == 4
        source.learn([])
    assert len(source.buffer) == 0 and not any(s.replayed for s in source.propose(4))


def test_experts_seed_the_buffer_and_their_prefixes_leave_room_for_a_token():
    long = list(range(5, 17))
    source = make_source([demonstration((2, 9), long)], ratio=1.0, stride=3)
    states = source.propose(100)
    assert {s.prefix for s in states} == {tuple(long[:i]) for i in (3, 6)}  # p0 = 0: position 0 scores 0; 9 > cap
    assert all(s.id == "2" for s in states)


def test_a_static_uniform_buffer_keeps_the_experts_alone():
    source = make_source(
        [demonstration((2, 9), [5, 6, 7, 8])], ratio=0.5, static=True, sampling="uniform", recency_window=1
    )
    for _ in range(5):
        source.learn([group(PROMPTS[3], [1, -1, -1, -1])])
    replayed = [s for s in source.propose(400) if s.replayed]
    assert {s.id for s in replayed} == {"2"}
    shares = np.bincount([len(s.prefix) for s in replayed], minlength=4) / len(replayed)
    assert shares == pytest.approx([0.25] * 4, abs=0.09)


def test_the_window_of_a_new_run_counts_a_loaded_buffer_from_its_start(tmp_path):
    old = make_source(ratio=1.0, recency_window=2)
    for _ in range(9):
        old.learn([group(PROMPTS[0], [1, -1, -1, -1])])
    old.buffer.save(tmp_path / "replay.safetensors")
    source = make_source(ratio=1.0, recency_window=2, buffer=tmp_path / "replay.safetensors")
    source.learn([])
    assert source.metrics["replay/size"] == 4 and source.metrics["replay/age/max"] == 1
    source.learn([])
    assert source.metrics["replay/size"] == 0


def test_an_expert_for_an_unknown_problem_is_refused():
    with pytest.raises(UserError, match=r"number 2\) to a problem that is not in data.train"):
        make_source([demonstration((2, 9), [5]), demonstration((2, 8), [5])], ratio=0.5)


def test_equal_sources_propose_equal_states():
    one, two = (make_source(ratio=0.5) for _ in range(2))
    for source in (one, two):
        source.learn([group(p, [1, -1, -1, -1]) for p in PROMPTS[:3]])
    assert [tokens(s) for s in one.propose(40)] == [tokens(s) for s in two.propose(40)]


@pytest.mark.parametrize(("fresh", "replayed"), [(4, 4), (5, 3), (1, 6), (6, 1), (0, 3), (3, 0)])
def test_every_run_of_consecutive_states_has_its_share(fresh, replayed):
    states = spread(PROMPTS[:fresh], [Prompt("r", (1,), "", replayed=True)] * replayed)
    count = fresh + replayed
    assert [s for s in states if not s.replayed] == PROMPTS[:fresh] and len(states) == count
    for start in range(count):
        for stop in range(start + 1, count + 1):
            found = sum(s.replayed for s in states[start:stop])
            assert abs(found - replayed * (stop - start) / count) < 1
