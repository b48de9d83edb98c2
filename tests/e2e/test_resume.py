"""A run that was killed, went on from a checkpoint and was stopped by SIGUSR1 has the bits of the undisturbed one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatron_rlvr.checkpoint.manifest import read_manifest
from tests.e2e.commands import REPOSITORY, read_metrics, run_python

sys.path[:0] = [str(REPOSITORY / "tools"), str(REPOSITORY / "examples")]

import arithmetic  # noqa: E402
import make_tiny_model  # noqa: E402

UPDATES = 6


def write_config(root: Path) -> Path:
    """Two updates a rollout batch; replay from experts' prefixes and a reference policy that is refreshed every 3."""
    config = {
        "name": "resume",
        "seed": 5,
        "run_dir": str(root / "whole"),
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "problems.jsonl"), "max_prompt_length": 24},
        "rollout": {"engine": "transformers", "precision": "float32", "group_size": 4, "max_response_length": 24},
        "loss": {"name": "proximal_kl"},
        "reference": {"refresh_interval": 3},
        "rewards": {"overlong_start": 4},  # an untrained model is right by chance alone, but some answers are shorter
        "replay": {"ratio": 0.5, "experts": str(root / "experts.jsonl"), "recency_window": 3},
        "actor": {"dtype": "float32", "micro_batch_tokens": 2048},
        "optimizer": {"lr": 3e-3, "warmup_fraction": 0.0},
        "trainer": {"updates": UPDATES, "mini_batch_size": 4, "rollout_reuse": 2},
        "checkpoint": {"interval": 2, "keep": 9},
        "logging": {"progress": False},
    }
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("resume")
    make_tiny_model.make_tiny_model(make_tiny_model.parser().parse_args([str(root / "model")]))
    problems = arithmetic.make_problems(64, 0)
    for name, rows in (("problems", problems), ("experts", arithmetic.make_experts(problems[:9]))):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_config(root)


@pytest.fixture(scope="module")
def whole(config):
    run_python("-m", "megatron_rlvr", "train", config)
    return config.parent / "whole"


@pytest.fixture(scope="module")
def stopped(config, whole):
    """The run as it was after update 2 and a bit, going on until SIGUSR1, saving in the background: its directory,
    exit code and what it said."""
    run_dir = config.parent / "stopped"
    shutil.copytree(whole, run_dir, ignore=shutil.ignore_patterns("step_000004", "step_000006", "model"))
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "torn')
    changes = [f"run_dir={run_dir}", "trainer.updates=500", "checkpoint.asynchronous=true"]
    command = [sys.executable, "-m", "megatron_rlvr", "train", str(config), *changes]
    environment = dict(os.environ, PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    process = subprocess.Popen(
        [*command, "--resume"], cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True
    )
    size = (run_dir / "metrics.jsonl").stat().st_size
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        rows = (run_dir / "metrics.jsonl").read_text().splitlines()
        if (run_dir / "metrics.jsonl").stat().st_size != size and json.loads(rows[-1])["step"] == 3:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=240)
    return run_dir, process.returncode, errors


def test_sigusr1_stops_at_the_next_boundary_with_a_checkpoint_and_code_75(stopped):
    run_dir, code, errors = stopped
    assert code == 75, errors
    assert "going on from" in errors and "after update 2" in errors
    assert "start it again with --resume" in errors and "Traceback" not in errors
    step = read_manifest(run_dir / "checkpoints" / (run_dir / "checkpoints/latest").read_text().strip()).step
    assert 4 <= step <= UPDATES and step % 2 == 0


def test_every_row_and_every_bit_is_the_undisturbed_runs(whole, stopped):
    run_dir, *_ = stopped
    rows, expected = read_metrics(run_dir), read_metrics(whole)
    assert len(rows) >= 4 and [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows == expected[: len(rows)]
    assert expected[3]["replay/drawn"] > 0 and expected[3]["reference/version"] == 3
    name = f"step_{len(rows):06d}"
    mine, theirs = (read_manifest(each / "checkpoints" / name) for each in (run_dir, whole))
    assert mine.details["actor"] == theirs.details["actor"]
    assert mine.details["run"]["controller"] == theirs.details["run"]["controller"]
    written = [file for file in theirs.files if not file.endswith(".metadata")]  # torch's index holds random ids
    assert {"replay.safetensors", "generators.safetensors"} < set(written) and len(written) > 4
    assert {file: mine.files[file] for file in written} == {file: theirs.files[file] for file in written}


def test_another_seed_is_refused_and_the_run_left_alone(config, stopped):
    run_dir, *_ = stopped
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    done = run_python("-m", "megatron_rlvr", "train", config, f"run_dir={run_dir}", "--resume", "seed=6", check=False)
    assert done.returncode == 2 and "seed was 5 in the checkpoint and is now 6" in done.stderr
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
