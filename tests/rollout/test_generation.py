from __future__ import annotations

import numpy as np

from megatron_rlvr.rollout import Completion, SamplingSettings, roll_out, to_trajectory
from megatron_rlvr.types import Prompt
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


def test_context_may_be_longer_than_the_prompt():
    completion = Completion(
        np.array([3, EOS], np.int32), np.array([-1, -2], np.float32), np.array([4, 4], np.int32), "stop"
    )
    t = to_trajectory([7, 8, 9], completion, decode)
    assert t.token_ids.tolist() == [7, 8, 9, 3, EOS]
    assert t.behavior_logprobs.tolist() == [0, 0, 0, -1, -2]
    assert t.versions.tolist() == [-1, -1, -1, 4, 4]
    assert t.text == "?" and t.finish_reason == "stop"
