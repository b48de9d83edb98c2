from __future__ import annotations

import numpy as np
import pytest

from megatron_rlvr.rollout import Completion, SamplingSettings, roll_out, to_trajectory
from megatron_rlvr.types import Prompt, UserError
from tests.rollout.models import EOS, oracle_logprobs


def decode(ids):
    return "".join(chr(ids_ + 60) for ids_ in ids if ids_ != EOS)


def test_groups_hold_what_was_read_and_what_was_sampled(engine, models):
    prompts = [Prompt("x", (5, 6, 7), "1"), Prompt("y", (8, 9, 10, 11, 12), "2")]
    groups = roll_out(engine, prompts, 3, SamplingSettings(25, seed=4), decode)
    assert [group.prompt for group in groups] == prompts
    assert all(len(group.trajectories) == 3 for group in groups)
    for group in groups:
        context = len(group.prompt.token_ids)
        for t in group.trajectories:
            assert t.token_ids.dtype == np.int32 and t.versions.dtype == np.int32
            assert t.action_mask.dtype == bool and t.behavior_logprobs.dtype == np.float32
            assert tuple(t.token_ids[:context]) == group.prompt.token_ids
            assert t.action_mask.tolist() == [False] * context + [True] * t.response_length
            assert t.num_tokens == context + t.response_length
            assert (t.behavior_logprobs[:context] == 0).all() and (t.versions[:context] == -1).all()
            assert (t.versions[context:] == engine.version).all()
            assert t.text == decode(t.token_ids[context:].tolist())
            (row,) = oracle_logprobs(models[0], [t.token_ids.tolist()])
            assert np.abs(row[context - 1 :] - t.behavior_logprobs[context:]).max() < 1e-5


def test_a_prefix_is_context_that_counts_against_the_limit_and_is_judged(engine, models):
    states = [Prompt("x", (5, 6, 7), "1"), Prompt("y", (8, 9), "2", prefix=(10, 11, 12, 13), replayed=True)]
    groups = roll_out(engine, states, 6, SamplingSettings(9, seed=4), decode)
    assert max(t.response_length for t in groups[0].trajectories) == 9
    for t in groups[1].trajectories:
        assert t.token_ids[:6].tolist() == [8, 9, 10, 11, 12, 13]
        assert t.action_mask.tolist() == [False] * 6 + [True] * t.response_length
        assert t.response_length == 5 or t.finish_reason == "stop"
        assert t.response_length <= 5
        assert t.text == decode(t.token_ids[2:].tolist())
        (row,) = oracle_logprobs(models[0], [t.token_ids.tolist()])
        assert np.abs(row[5:] - t.behavior_logprobs[6:]).max() < 1e-5


def test_a_prefix_that_fills_the_limit_is_refused(engine):
    with pytest.raises(UserError, match="leave room for at least one"):
        roll_out(engine, [Prompt("y", (8, 9), "2", prefix=(10, 11, 12))], 2, SamplingSettings(3), decode)


def test_context_is_the_problem_and_then_the_prefix():
    completion = Completion(
        np.array([3, EOS], np.int32), np.array([-1, -2], np.float32), np.array([4, 4], np.int32), "stop"
    )
    t = to_trajectory(Prompt("p", (7,), "1", prefix=(8, 9)), completion, decode)
    assert t.token_ids.tolist() == [7, 8, 9, 3, EOS]
    assert t.behavior_logprobs.tolist() == [0, 0, 0, -1, -2]
    assert t.versions.tolist() == [-1, -1, -1, 4, 4]
    assert t.text == decode([8, 9, 3]) and t.finish_reason == "stop"
