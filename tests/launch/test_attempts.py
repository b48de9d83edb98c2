"""The attempts of a run: what counts as progress, when it is given up, and what the next one starts from."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from launch.attempts import Attempt, History, begin, end, last_update, read_history, write_history
from launch.failure import write_error, write_exit
from launch.submission import JobRecord, SubmissionFiles
from megatron_rlvr.config.load import load_config, save_resolved
from megatron_rlvr.config.run_dir import RunFiles


def _crash(update: int | None, outcome: str = "crashed") -> Attempt:
    return Attempt("1", 0, time.time(), time.time(), outcome, update, 1, "boom")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("updates", "stalls"),
    [
        ([None], 1),
        ([None, None], 2),
        ([5, 5, 5], 3),
        ([5, 6, 7], 1),
        ([5, 4, 5], 3),  # it never got past update 5
        ([None, 3, 3], 2),
        ([7, 7, 8], 1),
    ],
)
def test_only_crashes_without_progress_count(updates: list[int | None], stalls: int) -> None:
    assert History(tuple(map(_crash, updates))).stalls() == stalls


def test_stops_and_lost_nodes_are_no_crashes() -> None:
    attempts = (_crash(5), _crash(5, "stopped"), _crash(None, "running"), _crash(5))
    assert History(attempts).stalls() == 2
    assert History((_crash(5, "stopped"),) * 9).stalls() == 0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A rendered run that has no checkpoint yet; its ranks are what the test says."""
    tree = {"name": "a run", "run_dir": str(tmp_path / "run"), "model": {"path": "model"}, "data": {"train": "data"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(tmp_path / "run.yaml")
    files = SubmissionFiles(config.run_dir)
    files.root.mkdir(parents=True)
    save_resolved(config, files.config)
    files.write_job(JobRecord("a_run", "train", str(files.script)))
    write_history(config.run_dir, History(max_crashes=2))
    return config.run_dir


def _attempt(run: Path, codes: list[int | None], step_code: int, *, update: int = 0, error: str = "") -> int:
    """One attempt in which rank i ended with codes[i], rank 0 first; None: it was ended from outside."""
    begun = begin(run, "7", 0)
    if begun:
        return begun
    logs = RunFiles(run).logs / "train"
    logs.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, update + 1)) + '{"ste')
    for rank, code in enumerate(codes):
        if error and code == 2:
            write_error(logs, rank, error, user_error=True)
        if code is not None:
            write_exit(logs, rank, code)
    return end(run, step_code)


def test_a_run_that_ends_well_is_finished_for_good(run: Path) -> None:
    assert _attempt(run, [0, 0], 0, update=3) == 0
    attempt = read_history(run).attempts[0]
    assert (attempt.outcome, attempt.update, attempt.code) == ("finished", 3, 0)
    assert _attempt(run, [0, 0], 0) == 3  # nothing to do
    assert last_update(run / "metrics.jsonl") == 3


def test_a_stopped_run_asks_to_be_started_again_as_often_as_it_likes(run: Path) -> None:
    assert [_attempt(run, [75, 75], 0, update=4) for _ in range(4)] == [75] * 4
    assert load_config(run / "config.yaml").checkpoint.resume == "never"  # for it has left no checkpoint


def test_the_first_failure_is_the_code_and_the_reason(run: Path) -> None:
    assert _attempt(run, [None, -9], 137, update=1) == 75
    attempt = read_history(run).attempts[0]
    assert attempt.code == 128 + 9 and "rank 1 failed first (signal SIGKILL)" in attempt.reason


def test_crashes_at_the_same_update_end_the_requeueing(run: Path) -> None:
    assert _attempt(run, [1, None], 1, update=4) == 75
    assert _attempt(run, [None, 5], 5, update=4) == 5
    history = read_history(run)
    assert history.gave_up is not None
    assert "it crashed 2 times without getting further, the last time after update 4" in history.gave_up
    assert begin(run, "8", 0) == 5  # the next job of a chain does not try again


def test_a_fault_of_the_user_s_is_not_tried_again(run: Path) -> None:
    assert _attempt(run, [2, 2], 2, error="data.train is empty; fill it") == 2
    assert read_history(run).gave_up == "train: data.train is empty; fill it"


def test_srun_that_fails_by_itself_counts_as_a_crash(run: Path) -> None:
    assert _attempt(run, [], 1) == 75
    assert "srun ended with code 1 before any rank failed" in read_history(run).attempts[0].reason


def test_what_left_no_checkpoint_is_reported_anew(run: Path) -> None:
    _attempt(run, [1, None], 1, update=4)
    RunFiles(run).wandb_id.write_text("abcd1234\n")
    begin(run, "7", 1)
    assert not RunFiles(run).metrics.exists()
    assert RunFiles(run).wandb_id.read_text() == "abcd1234\n"  # the same run to those who watch it
