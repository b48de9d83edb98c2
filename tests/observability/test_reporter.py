"""What a run leaves on the disk: JSONL, TensorBoard, wandb offline, rollouts, report; and nothing on other ranks."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.observability.report import plot
from megatron_rlvr.observability.reporter import Reporter
from megatron_rlvr.observability.series import held_out, moving_average, phase_seconds, points, read_metrics
from megatron_rlvr.types import Group, Prompt, Trajectory, UserError

PNG = b"\x89PNG\r\n\x1a\n"


def _config(run_dir: Path, **logging: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "test",
            "run_dir": run_dir,
            "model": {"path": "m"},
            "data": {"train": "t"},
            "optimizer": {"lr": 2e-3},
            "logging": {"progress": False, **logging},
        }
    )


def _update(step: int) -> dict[str, float]:
    return {
        "critic/rewards/mean": -1 + 0.1 * step,
        "response_length/mean": 20.0 + step,
        "actor/entropy": 1 / step,
        "actor/grad_norm": 2.0**-step,
        "actor/pg_loss": 0.25,
        "timing_s/gen": 3.0,
        "timing_s/update_actor": 1.0,
        "timing_s/step": 4.5,
    }


def _run(run_dir: Path, updates: int = 4, **logging: Any) -> None:
    with Reporter(run_dir, _config(run_dir, **logging), True, strict=True) as reporter:
        reporter.log(0, {"val-core/heldout/acc/mean@4": 0.125})
        for step in range(1, updates + 1):
            reporter.log(step, _update(step))
        reporter.log(updates + 1, {**_update(updates + 1), "val-core/heldout/acc/mean@4": 0.5})


def test_one_line_per_update_with_finite_numbers_or_null(tmp_path: Path) -> None:
    with Reporter(tmp_path, _config(tmp_path), True, strict=True) as reporter:
        reporter.log(1, {"actor/grad_norm": np.float32(0.5), "actor/entropy": float("nan"), "training/global_step": 1})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # on the disk before the run ends
        assert [json.loads(line) for line in lines] == [
            {"step": 1, "actor/grad_norm": 0.5, "actor/entropy": None, "training/global_step": 1}
        ]
        with pytest.raises(ValueError, match="actor/grad_nrm"):
            reporter.log(2, {"actor/grad_nrm": 0.5})
        reporter.log(2, {"actor/lr": float("inf")})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_name_outside_the_schema_is_warned_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path, _config(tmp_path), True) as reporter:
        reporter.log(1, {"my/own": 1.0})
        reporter.log(2, {"my/own": 2.0})
    assert capsys.readouterr().err.count("metric my/own is not in the schema") == 1
    assert [row["my/own"] for row in read_metrics(tmp_path)] == [1.0, 2.0]


def test_phases_timed_since_the_last_step_are_added(tmp_path: Path) -> None:
    with Reporter(tmp_path, _config(tmp_path), True, strict=True) as reporter:
        with reporter.timer("gen"):
            pass
        reporter.log(1, {})
        reporter.log(2, {"actor/lr": 1.0})
    first, second = read_metrics(tmp_path)
    assert 0 <= first["timing_s/gen"] < 1 and "timing_s/gen" not in second


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Reporter(run_dir, _config(run_dir), False) as reporter:
        reporter.log(1, _update(1))
        reporter.rollouts(1, [])
    assert not run_dir.exists()


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _run(tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    read = [(event.step, round(event.value, 6)) for event in events.Scalars("critic/rewards/mean")]
    assert read == [(1, -0.9), (2, -0.8), (3, -0.7), (4, -0.6), (5, -0.5)]


def _wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: a LevelDB log of 32 KiB blocks, read with wandb's protobuf definitions alone."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, pending = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        if kind == 0:
            return
        chunk = data[position + 7 : position + 7 + size]
        position += 7 + size
        pending = chunk if kind in (1, 2) else pending + chunk
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pending)
            yield record


def test_an_offline_wandb_run_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    _run(tmp_path, wandb=True)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history, config, identity = [], {}, ""
    for record in _wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            history.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
        if kind == "run":
            identity = record.run.run_id
            config.update({item.key: json.loads(item.value_json) for item in record.run.config.update})
    assert [row["_step"] for row in history] == [0, 1, 2, 3, 4, 5]
    assert history[0]["val-core/heldout/acc/mean@4"] == 0.125
    assert [row["actor/grad_norm"] for row in history[1:]] == [0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert config["optimizer"]["lr"] == 2e-3
    assert identity == (tmp_path / "wandb_id.txt").read_text().strip()


def _trajectory(text: str, reward: float, versions: list[int]) -> Trajectory:
    length = len(versions)
    return Trajectory(
        token_ids=np.arange(3 + length, dtype=np.int32),
        action_mask=np.array([False] * 3 + [True] * length),
        behavior_logprobs=np.zeros(3 + length, dtype=np.float32),
        versions=np.array([-1] * 3 + versions, dtype=np.int32),
        finish_reason="stop",
        text=text,
        score=1.0,
        reward=reward,
        reward_parts={"overlong": reward - 1.0},
    )


def test_rollouts_are_one_line_per_response(tmp_path: Path) -> None:
    prompt = Prompt("p7", (1, 2, 3), "2", "1+1=")
    group = Group(prompt, [_trajectory("\\boxed{2} é", 0.5, [4, 4, 5, 5]), _trajectory("", float("nan"), [])])
    with Reporter(tmp_path, _config(tmp_path), True) as reporter:
        reporter.rollouts(12, [group])
        reporter.close(report=False)
    (path,) = (tmp_path / "rollouts").iterdir()
    assert path.name == "step_000012.jsonl"
    first, second = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert first == {
        "step": 12,
        "prompt_id": "p7",
        "prompt": "1+1=",
        "answer": "2",
        "response": "\\boxed{2} é",
        "replayed": False,
        "prefix_length": 0,
        "score": 1.0,
        "reward": 0.5,
        "advantage": None,
        "reward_parts": {"overlong": -0.5},
        "response_length": 4,
        "version_min": 4,
        "version_max": 5,
        "finish_reason": "stop",
    }
    assert (second["reward"], second["response_length"], second["version_min"]) == (None, 0, None)


def test_rollouts_can_be_switched_off(tmp_path: Path) -> None:
    with Reporter(tmp_path, _config(tmp_path, rollouts=False), True) as reporter:
        reporter.rollouts(1, [])
        reporter.log(1, {})
    assert not (tmp_path / "rollouts").exists()


def test_the_report_has_curves_and_figures(tmp_path: Path) -> None:
    _run(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| held-out accuracy | 0.125 | 0.5 | 0.5 | 0.5 |" in text
    assert "| reward | -0.9 | -0.5 | -0.5 | -0.5 |" in text
    assert "| gen | 15.0 | 75.0% |" in text and "| update_actor | 5.0 | 25.0% |" in text
    for name in ("reward", "response_length", "entropy", "grad_norm", "phases"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes()[:8] == PNG
        assert f"(plots/{name}.png)" in text


def test_a_failed_run_writes_no_report(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Reporter(tmp_path, _config(tmp_path), True) as reporter:
        reporter.log(1, _update(1))
        raise RuntimeError
    assert read_metrics(tmp_path)[0]["step"] == 1 and not (tmp_path / "report.md").exists()


def test_reading_back_a_run_that_was_killed_and_resumed(tmp_path: Path) -> None:
    lines = ['{"step": 1, "actor/lr": 1.0}', '{"step": 2, "actor/lr": 2.0}', '{"step": 2, "actor/lr": 3.0}', '{"step":']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [row["actor/lr"] for row in read_metrics(tmp_path)] == [1.0, 3.0]
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.write(lines[0] + '\n{"step": 1, "val-core/x/acc/mean@2": 0.5}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "actor/lr": 1.0, "val-core/x/acc/mean@2": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[3], *lines[:3]]))
    with pytest.raises(UserError, match="line 1"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        plot([tmp_path / "nowhere"])


def test_series_of_the_report() -> None:
    rows = [
        {"step": 0, "val-core/x/acc/mean@2": 0.25, "timing_s/testing": 1.5},
        {"step": 3, "critic/score/mean": None},
        {"step": 4, "critic/score/mean": 0.5, "timing_s/gen": 2.0, "timing_s/step": 9.0},
    ]
    assert points(rows, ["critic/rewards/mean", "critic/score/mean"]) == ([4], [0.5])
    assert held_out(rows) == {"x": ([0], [0.25])}
    assert phase_seconds(rows) == {"testing": 1.5, "gen": 2.0}
    assert moving_average([1, 2, 3, 6], 2) == [1.0, 1.5, 2.5, 4.5]


def test_a_bare_machine_still_gets_metrics_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    missing = ("tensorboard", "matplotlib")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
    with Reporter(tmp_path, _config(tmp_path), True) as reporter:
        reporter.log(1, {"actor/loss": 0.25})
    assert [row["actor/loss"] for row in read_metrics(tmp_path)] == [0.25]
    assert "0.25" in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "tensorboard").exists() and not (tmp_path / "plots").exists()
    printed = capsys.readouterr().err
    assert "tensorboard is not installed" in printed and "matplotlib is not installed" in printed
