"""The controller on an engine whose answers are known: what is dispatched, kept, rewarded and cut."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from megatron_rlvr.advantages import DynamicSamplingExhausted
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.controller import Controller
from megatron_rlvr.controller.controller import mix_seed
from megatron_rlvr.controller.statistics import batch_metrics
from megatron_rlvr.observability.metrics import Schema
from megatron_rlvr.rollout.engine import Completion
from megatron_rlvr.types import Prompt

GROUP = 4


class ScriptedEngine:
    """Answers token 1 (right) or 0 (wrong): prompt p is right in its first `right[p]` samples."""

    version = 3

    def __init__(self, right):
        self.right, self.calls = right, []

    def cache_usage(self):
        return 0, 0

    def generate(self, contexts, n, sampling):
        self.calls.append(([ids[0] for ids in contexts], sampling.seed))
        return [[self._answer(sample < self.right[ids[0]]) for sample in range(n)] for ids in contexts]

    def _answer(self, right):
        tokens = np.array([int(right), 7] if right else [0], np.int32)
        return Completion(tokens, np.full(len(tokens), -0.5, np.float32), np.full(len(tokens), 3, np.int32), "stop")


def decode(token_ids):
    return "\\boxed{yes}" if token_ids[0] == 1 else "\\boxed{no}"


def make_controller(right, **changes):
    config = RunConfig.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": "unused"},
            "data": {"train": "unused", "shuffle": False},
            "rollout": {"group_size": GROUP, "max_response_length": 8},
            "trainer": {"mini_batch_size": 2, "rollout_reuse": 2},
            **changes,
        }
    )
    prompts = [Prompt(str(p), (p, 9), "yes") for p in range(len(right))]
    options = {"data_parallel_size": 1, "data_parallel_rank": 0, "micro_batch_tokens": 64, "layout": "packed"}
    engine = ScriptedEngine(right)
    return engine, Controller(config, prompts, engine, decode, options, lambda phase: contextlib.nullcontext())


def asked(engine):
    return [call[0] for call in engine.calls]


def test_a_batch_is_the_next_prompts_rewarded_and_normalised_in_their_groups(one_rank):
    engine, controller = make_controller([1, 2, 0, 4, 1, 1, 1, 1])
    groups = controller.collect()
    assert asked(engine) == [[0, 1, 2, 3]]
    assert [[t.score for t in g.trajectories] for g in groups[:2]] == [[1, -1, -1, -1], [1, 1, -1, -1]]
    first = np.array([1.0, -1, -1, -1])
    expected = (first - first.mean()) / (first.std(ddof=1) + 1e-6)
    assert [t.advantage for t in groups[0].trajectories] == pytest.approx(expected)
    assert all(t.advantage == 0 for g in groups[2:] for t in g.trajectories)
    assert controller.generated_tokens == 2 * 7 + 1 * 9
    controller.collect()
    assert asked(engine)[1] == [4, 5, 6, 7]


def test_dynamic_sampling_replaces_groups_of_one_verdict_until_the_batch_is_full(one_rank):
    right = [0, 2, 4, 1, 0, 3, 2, 1]
    dynamic = {"advantages": {"dynamic_sampling": {"enabled": True, "max_attempts": 4}}}
    engine, controller = make_controller(right, **dynamic)
    groups = controller.collect()
    assert asked(engine) == [[0, 1, 2, 3], [4, 5], [6]]
    assert [g.prompt.id for g in groups] == ["1", "3", "5", "6"]
    found = controller.metrics()
    assert (found["rollout/attempts"], found["rollout/dropped_groups"], found["training/epoch"]) == (3, 3, 0)


def test_dynamic_sampling_gives_up_with_the_statistics(one_rank):
    dynamic = {"advantages": {"dynamic_sampling": {"enabled": True, "max_attempts": 2}}}
    _, controller = make_controller([0] * 8, **dynamic)
    with pytest.raises(DynamicSamplingExhausted, match=r"found 0 of 4 informative groups in 2 rounds .* 8 all wrong"):
        controller.collect()


def test_mini_batches_are_consecutive_and_share_one_denominator(one_rank):
    _, controller = make_controller([1, 2, 0, 4])
    groups = controller.collect()
    (first, one), (second, two) = controller.mini_batches(groups)
    assert first == groups[:2] and second == groups[2:]
    assert one.num_action_tokens == sum(t.response_length for g in first for t in g.trajectories)
    assert one.num_sequences == two.num_sequences == 2 * GROUP


def test_every_round_draws_from_its_own_stream(one_rank):
    engine, controller = make_controller([1, 1, 1, 1])
    for _ in range(3):
        controller.collect()
    assert len({seed for _, seed in engine.calls}) == 3
    streams = {mix_seed(seed, stream) for seed in range(20) for stream in range(50)}
    assert len(streams) == 1000 and all(0 <= seed < 2**31 for seed in streams)


def test_statistics_count_staleness_in_updates(one_rank):
    _, controller = make_controller([1, 2, 0, 4])
    metrics = batch_metrics(controller.collect(), learner_version=5)
    assert metrics["staleness/mean"] == metrics["staleness/max"] == 2
    assert metrics["training/accuracy"] == pytest.approx(7 / 16)
    assert metrics["rollout/informative_groups"] == 0.5
    assert metrics["response_length/mean"] == pytest.approx((2 * 7 + 9) / 16)
    assert metrics["prompt_length/mean"] == metrics["prompt_length/max"] == 2
    assert (metrics["rollout/groups"], metrics["rollout/mixed_versions"], metrics["rollout/entropy"]) == (4, 0, 0.5)
    Schema().check(metrics)


def test_any_verifier_scores_in_the_loop_and_its_outcomes_are_counted(one_rank):
    """Shaping changes rewards, not scores; dynamic sampling goes by scores."""
    changes = {
        "rewards": {"name": "custom", "function": "tests.rewards.functions:shaped_yes", "format_penalty": 0.5},
        "advantages": {"dynamic_sampling": {"enabled": True}},
    }
    _, controller = make_controller([1, 4, 2, 0, 3, 2, 1, 1], **changes)
    groups = controller.collect()
    assert [g.prompt.id for g in groups] == ["0", "2", "4", "5"]
    assert [t.score for t in groups[0].trajectories] == [1.0, -1.0, -1.0, -1.0]
    assert [t.reward for t in groups[0].trajectories] == [1.25, -0.75, -0.75, -0.75]
    assert groups[0].trajectories[0].reward_parts == {"correctness": 1.0, "style": 0.25, "format": 0.0}
    counted = {name: count for name, count in controller.metrics().items() if name.startswith("verifier/")}
    assert (counted["verifier/correct"], counted["verifier/wrong"], counted["verifier/killed"]) == (12, 12, 0)
    controller.scorer.close()
