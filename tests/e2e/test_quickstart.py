"""`make quickstart` without the environment: it learns, by a margin, and leaves everything that it promises."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.e2e.commands import REPOSITORY, run_python

WINDOW = 10


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    root = tmp_path_factory.mktemp("quickstart") / "quickstart"
    done = run_python(REPOSITORY / "examples/quickstart.py", "--dir", root, timeout=900)
    rows = [json.loads(line) for line in (root / "run/metrics.jsonl").read_text().splitlines()]
    return root, done.stdout, rows


@pytest.mark.timeout(1000)
def test_held_out_accuracy_rises_by_thirty_points(quickstart):
    _, printed, rows = quickstart
    accuracies = [value for row in rows for name, value in row.items() if name.startswith("val-core/")]
    assert 0.2 < accuracies[0] < 0.45
    assert accuracies[-1] - accuracies[0] > 0.30
    assert f"{accuracies[0]:.1%} before, {accuracies[-1]:.1%} after" in printed


def test_training_reward_rises_on_a_moving_average(quickstart):
    rewards = [row["critic/rewards/mean"] for row in quickstart[2] if "critic/rewards/mean" in row]
    average = np.convolve(rewards, np.ones(WINDOW) / WINDOW, mode="valid")
    assert average[-1] - average[0] > 0.4  # of the 2 between all wrong (-1) and all right (+1)
    third = len(average) // 3
    assert average[:third].mean() < average[third : 2 * third].mean() < average[2 * third :].mean()


def test_engine_and_learner_agree_after_every_refresh(quickstart):
    fresh = [row for row in quickstart[2] if row.get("staleness/max") == 0]
    assert len(fresh) == 100
    assert max(row["actor/log_ratio_abs/mean"] for row in fresh) < 1e-4


def test_run_directory_holds_what_a_run_promises(quickstart):
    run = quickstart[0] / "run"
    assert {"config.yaml", "metrics.jsonl", "model", "rollouts", "tensorboard", "report.md", "plots"} <= {
        path.name for path in run.iterdir()
    }
    assert list((run / "plots").glob("*.png")) and list((run / "tensorboard").rglob("events*"))
    report = (run / "report.md").read_text()
    assert "plots/" in report
    first = json.loads(sorted((run / "rollouts").iterdir())[0].read_text().splitlines()[0])
    assert "\\boxed" in json.dumps(first)


def test_trained_model_answers_in_transformers(quickstart):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = quickstart[0] / "run/model"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
    )
    ids = tokenizer("2+3+1=", return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert "\\boxed{6}" in tokenizer.decode(answer[0])


def test_training_and_held_out_problems_are_disjoint(quickstart):
    data = quickstart[0] / "data"
    read = {}
    for name in ("train", "heldout", "demonstrations"):
        lines = (data / f"{name}.jsonl").read_text().splitlines()
        read[name] = {json.loads(line)["problem"] for line in lines}
    assert not read["heldout"] & (read["train"] | read["demonstrations"])
