"""Which evaluation is best, what a checkpoint keeps of them, and what is logged."""

from __future__ import annotations

import json
import math

import pytest

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.evaluation import HeldOutResult
from megatron_rlvr.held_out import Evaluations
from megatron_rlvr.observability.metrics import Schema
from megatron_rlvr.types import Prompt

SETS = {"dev": [Prompt("d", (1,), "1")], "test": [Prompt("t", (2,), "2")]}


def config(run_dir, **trainer):
    held_out = {"test": {"path": "t.jsonl", "role": "test", "samples": 8}}
    tree = {"run_dir": run_dir, "model": {"path": "m"}, "trainer": trainer}
    return RunConfig.model_validate({**tree, "data": {"validation": "dev.jsonl", "held_out": held_out}})


def results(dev, test, error=0.1):
    return {"dev": HeldOutResult(dev, error, 9, 4, 20.0), "test": HeldOutResult(test, math.nan, 1, 8, 30.0)}


@pytest.fixture
def evaluations(tmp_path, one_rank):
    return Evaluations(config(tmp_path), SETS, str)


def test_the_validation_set_decides_and_the_earlier_of_equals_stays(evaluations, tmp_path):
    kept = []
    for version, (dev, test) in enumerate([(0.25, 0.1), (0.5, 0.2), (0.375, 0.9), (0.5, 1.0)]):
        assert evaluations.due(version)
        evaluations.record(version, results(dev, test))
        assert not evaluations.due(version)
        kept.append(evaluations.best_version)
    assert kept == [0, 1, 1, 1]
    metrics = evaluations.metrics(results(0.5, 1.0))
    assert metrics["val-core/dev/acc/mean@4"] == 0.5 and metrics["val-core/test/acc/mean@8"] == 1.0
    assert (metrics["val-aux/dev/best"], metrics["val-aux/dev/best_step"]) == (0.5, 1)
    assert "val-aux/test/best" not in metrics and Schema().unknown(metrics) == []
    page = json.loads((tmp_path / "evaluations.json").read_text())
    assert (page["best_by"], page["roles"]) == ("dev", {"dev": "validation", "test": "test"})
    assert page["best"][0] == 1 and page["last"][0] == 3 and page["last"][1]["test"]["standard_error"] is None
    assert [sentence.partition(":")[0] for sentence in evaluations.sentences()] == ["dev", "test"]


def test_a_checkpoint_brings_best_and_last_back(evaluations, tmp_path):
    evaluations.record(3, results(0.5, 0.1))
    evaluations.record(4, results(0.25, 0.1))
    state = json.loads(json.dumps(evaluations.state_dict()))
    again = Evaluations(config(tmp_path), SETS, str)
    again.load_state_dict(state)
    assert not again.due(4) and again.due(5) and again.best_version == 3
    assert again.best[1]["dev"] == results(0.5, 0.1)["dev"] and math.isnan(again.last[1]["test"].standard_error)
    changed = Evaluations(config(tmp_path, best_by="new"), {"new": SETS["dev"]}, str)
    changed.load_state_dict(state)
    assert changed.due(4) and changed.best is None


def test_without_a_validation_set_nothing_is_best(tmp_path, one_rank):
    tree = config(tmp_path).model_dump()
    tree["data"]["validation"] = None
    evaluations = Evaluations(RunConfig.model_validate(tree), {"test": SETS["test"]}, str)
    evaluations.record(1, {"test": results(0, 0.5)["test"]})
    assert evaluations.best is None and list(evaluations.metrics({})) == []
    assert not Evaluations(RunConfig.model_validate(tree), {}, str).due(0)
