"""The study of VSR on a hard task: what it runs, how it judges, and (nightly) what comes out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_rlvr.config.load import load_config
from tests.e2e.commands import REPOSITORY, run_python

sys.path.insert(0, str(REPOSITORY / "examples/vsr_hard"))

import study


def write_run(root: Path, name: str, seed: int, accuracy: list[float], tokens: list[float]) -> None:
    """metrics.jsonl as a run leaves it: held-out rows apart from the rows of updates."""
    directory = study.run_dir(root, name, seed)
    directory.mkdir(parents=True)
    rows = [{"step": i, "val-core/heldout/acc/mean@4": value} for i, value in enumerate(accuracy)]
    rows += [
        {"step": i + 1, "rollout/generated_tokens": value, "rollout/total_tokens": sum(tokens[: i + 1])}
        for i, value in enumerate(tokens)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def finished(tmp_path):
    for seed, shift in ((0, 0.0), (1, 0.02)):
        write_run(tmp_path, "grpo", seed, [0.04, 0.04 + shift, 0.07], [100, 100])
        write_run(tmp_path, "uniform", seed, [0.04, 0.16 - 8 * shift, 0.40], [75, 75])
        write_run(tmp_path, "vsr", seed, [0.04, 0.20 + shift, 0.48], [70, 90])
    return tmp_path


def test_the_report_gives_means_over_training_deviations_over_seeds_and_tokens(finished):
    text = study.report(finished, ["grpo", "uniform", "vsr"], [0, 1])
    lines = text.splitlines()
    # vsr: 0.72 / 3 = 0.240 and 0.74 / 3 = 0.2467; their sample deviation is 0.02 / 3 / sqrt(2) = 0.0047
    assert "| VSR | 2 | 0.243 +- 0.005 | 0.040 | 0.480 +- 0.000 | 80 |" in lines
    assert "| GRPO | 2 | 0.053 +- 0.005 | 0.040 | 0.070 +- 0.000 | 100 |" in lines
    assert (
        "VSR - GRPO: 0.190 +- 0.000 over training, ahead in 2 of 2 seeds, bars apart; tokens per update x 0.80." in text
    )
    assert (
        "expert prefixes: 0.070 +- 0.042 over training, ahead in 2 of 2 seeds, bars apart; tokens per update x 1.07"
        in text
    )
    assert (finished / "study.png").stat().st_size > 1000 and "study.png" in (finished / "study.md").read_text()


def test_a_curve_holds_the_tokens_sampled_up_to_each_evaluation(finished):
    curve = study.read_curve(study.run_dir(finished, "vsr", 1))
    assert curve == study.Curve((0, 1, 2), (0, 70, 160), (0.04, 0.22, 0.48), 80.0)


def test_bars_that_touch_are_not_apart():
    def curves(*means):
        return [study.Curve((0,), (0,), (mean,), 1.0) for mean in means]

    # 0.30 +- 0.0707 reaches down to 0.229
    assert study.separated(curves(0.25, 0.35), curves(0.22, 0.22))
    assert not study.separated(curves(0.25, 0.35), curves(0.23, 0.23))
    assert not study.separated(curves(0.25, 0.35), curves(0.20, 0.24))


def test_methods_differ_in_their_replay_alone():
    configs = {name: load_config(study.CONFIG, method.overrides) for name, method in study.METHODS.items()}
    assert {name: config.replay.ratio for name, config in configs.items() if config.replay.ratio == 0}.keys() == {
        "grpo", "adaptive",
    }  # fmt: skip
    assert configs["uniform"].replay.static and configs["uniform"].replay.sampling == "uniform"
    assert configs["vsr"].replay.sampling == "score" and not configs["vsr"].replay.static
    others = [config.model_dump(exclude={"replay": True, "rollout": {"allocation"}}) for config in configs.values()]
    assert all(other == others[0] for other in others)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_vsr_is_ahead_of_grpo_with_fewer_tokens(tmp_path):
    seeds = [0, 1, 2, 3]
    run_python(study.HERE / "study.py", "--dir", tmp_path, "--seeds", *map(str, seeds), timeout=3500)
    curves = {name: [study.read_curve(study.run_dir(tmp_path, name, s)) for s in seeds] for name in ("grpo", "vsr")}
    before = [curve.accuracy[0] for found in curves.values() for curve in found]
    assert 0.01 < sum(before) / len(before) < 0.06
    assert study.separated(curves["vsr"], curves["grpo"])
    tokens = {name: sum(curve.tokens for curve in found) for name, found in curves.items()}
    assert tokens["vsr"] < 0.85 * tokens["grpo"]
