from __future__ import annotations

import math
from functools import partial

import pytest

from megatron_rlvr.evaluation import evaluate_held_out
from megatron_rlvr.rewards import score_groups
from megatron_rlvr.rollout.engine import SamplingSettings
from megatron_rlvr.types import Prompt
from tests.controller.test_controller import ScriptedEngine, decode


def test_accuracy_is_the_mean_share_of_right_samples_with_its_error_over_problems(one_rank):
    shares = [0.0, 0.5, 1.0, 0.25]
    engine = ScriptedEngine([int(4 * share) for share in shares])
    prompts = [Prompt(str(p), (p, 9), "yes") for p in range(4)]
    score = partial(score_groups, name="strict_box")
    result = evaluate_held_out(engine, prompts, 4, SamplingSettings(8), decode, score)
    mean = sum(shares) / 4
    assert result.accuracy == pytest.approx(mean)
    deviation = math.sqrt(sum((share - mean) ** 2 for share in shares) / 3)
    assert result.standard_error == pytest.approx(deviation / 2)
    assert (result.problems, result.samples) == (4, 4)
    assert result.mean_length == pytest.approx((7 * 2 + 9 * 1) / 16)
    assert "43.8%" in str(result)
