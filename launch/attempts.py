"""The attempts of a run on a cluster: `python -m launch.attempts begin RUN_DIR`, the ranks, `end RUN_DIR CODE`.

RUN_DIR/slurm/attempts.json tells what became of each. A run goes on from its newest checkpoint; one that crashes
`max_crashes` times without getting further is given up, with the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from launch.failure import Failure, describe, read_exit
from launch.ranks import REQUEUE
from launch.submission import SubmissionFiles
from megatron_rlvr.config.load import load_config, save_resolved
from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.files import write_whole
from megatron_rlvr.types import UserError

FINISHED = 3  # exit code of `begin` for a run with nothing left to do
USER_ERROR = 2

Outcome = Literal["running", "finished", "stopped", "crashed", "refused"]


@dataclass(frozen=True)
class Attempt:
    """One start of a run's ranks. `running` where nobody could say how it ended: its node died, or SLURM killed it.

    job       SLURM's job id, with _TASK for a task of an array
    restart   how often SLURM had put the job back into the queue
    update    the last update that was reported when it ended; None: none was
    code      exit code: 75 stopped at a checkpoint, else the code of the rank that failed first
    """

    job: str
    restart: int
    began: float
    ended: float | None = None
    outcome: Outcome = "running"
    update: int | None = None
    code: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class History:
    """The attempts since the run was submitted, oldest first, and why it was given up, if it was."""

    attempts: tuple[Attempt, ...] = ()
    max_crashes: int = 3
    gave_up: str | None = None

    def stalls(self) -> int:
        """Crashes in a row without a later update reached than the crashes before them."""
        count, furthest = 0, None
        for attempt in self.attempts:
            if attempt.outcome != "crashed":
                continue
            reached = -1 if attempt.update is None else attempt.update
            if furthest is None or reached > furthest:
                count, furthest = 0, reached
            count += 1
        return count

    def closed(self, attempt: Attempt) -> History:
        """With the last attempt replaced by how it ended, and given up where it crashed too often."""
        history = replace(self, attempts=(*self.attempts[:-1], attempt))
        if attempt.outcome == "refused":
            return replace(history, gave_up=attempt.reason)
        if attempt.outcome == "crashed" and (stalls := history.stalls()) >= self.max_crashes:
            where = "before its first update" if attempt.update is None else f"after update {attempt.update}"
            reason = f"it crashed {stalls} times without getting further, the last time {where}: {attempt.reason}"
            return replace(history, gave_up=reason)
        return history


def read_history(run_dir: Path) -> History:
    """The attempts of a run; none where it was never started on a cluster."""
    try:
        content = json.loads(SubmissionFiles(run_dir).attempts.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return History()
    attempts = tuple(Attempt(**attempt) for attempt in content.pop("attempts"))
    return History(attempts, **content)


def write_history(run_dir: Path, history: History) -> None:
    content = json.dumps(asdict(history), indent=1) + "\n"
    write_whole(SubmissionFiles(run_dir).attempts, content.encode())


def last_update(metrics: Path) -> int | None:
    """The last update that metrics.jsonl reports; a line torn by a kill is passed over."""
    try:
        lines = metrics.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


# Before the ranks


def starting_config(config: RunConfig, tell: bool = True) -> RunConfig:
    """The config with which the ranks go on from run_dir's newest checkpoint, or start over where there is none.

    Raises UserError where that checkpoint is of a run with other settings.
    """
    from megatron_rlvr.checkpoint.finding import find_checkpoint, newest_valid

    own = newest_valid(RunFiles(config.run_dir).checkpoints) is not None
    resume = "auto" if own else "never" if config.checkpoint.resume == "auto" else config.checkpoint.resume
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": resume})})
    found = find_checkpoint(config)
    if tell:
        print(f"starting from {found}" if found is not None else "starting from the beginning", flush=True)
    return config


def _clear(files: RunFiles) -> None:
    """Remove what an attempt reported that left no checkpoint: the same updates will be reported again."""
    for path in (files.metrics, files.rollouts, files.tensorboard):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def begin(run_dir: Path, job: str, restart: int) -> int:
    """Prepare one attempt; 0, or FINISHED, or the exit code of a run that was given up."""
    history = read_history(run_dir)
    if history.attempts and history.attempts[-1].outcome == "finished":
        print(f"{run_dir}: the run is finished; nothing to do", flush=True)
        return FINISHED
    if history.gave_up is not None:
        print(f"{run_dir}: the run was given up, for {history.gave_up}", flush=True)
        return history.attempts[-1].code or 1
    submitted = SubmissionFiles(run_dir)
    config, files = load_config(submitted.config), RunFiles(run_dir)
    if submitted.read_job().command == "train":
        config = starting_config(config)
        if config.checkpoint.resume != "auto":
            _clear(files)
    else:
        _clear(files)
    save_resolved(config, files.config)
    for path in (*files.logs.glob("*/rank*.exit.json"), *files.logs.glob("*/rank*.error.json")):
        path.unlink()
    attempt = Attempt(job, restart, time.time())
    write_history(run_dir, replace(history, attempts=(*history.attempts, attempt)))
    return 0


# After them


def _failures(logs: Path) -> list[tuple[Failure, Path]]:
    """Ranks of all roles that ended badly, the first failure first."""
    found = [(failure, path.parent) for path in logs.glob("*/rank*.exit.json") if (failure := read_exit(path))]
    return sorted((each for each in found if each[0].code not in (0, REQUEUE)), key=lambda each: each[0].order)


def _outcome(run_dir: Path, step_code: int) -> tuple[Outcome, int, str]:
    """How the ranks ended: outcome, exit code, reason in a few lines."""
    logs = RunFiles(run_dir).logs
    failures = _failures(logs)
    if failures:
        failure, log_dir = failures[0]
        refused = failure.error is not None and failure.error.user_error
        return "refused" if refused else "crashed", failure.exit_code, f"{log_dir.name}: {describe(failure, log_dir)}"
    if step_code != 0:
        reason = f"srun ended with code {step_code} before any rank failed; see {run_dir}/slurm/job-*.out"
        return "crashed", step_code, reason
    ends = [read_exit(path) for path in logs.glob("*/rank*.exit.json")]
    if any(end is not None and end.code == REQUEUE for end in ends):
        return "stopped", REQUEUE, "it stopped at a checkpoint as SIGUSR1 asked"
    return "finished", 0, ""


def end(run_dir: Path, step_code: int) -> int:
    """Note how an attempt ended: 0 finished, 75 to be started again, else the code of the rank that failed first."""
    history = read_history(run_dir)
    outcome, code, reason = _outcome(run_dir, step_code)
    attempt = replace(
        history.attempts[-1],
        ended=time.time(),
        outcome=outcome,
        update=last_update(RunFiles(run_dir).metrics),
        code=code,
        reason=reason,
    )
    history = history.closed(attempt)
    write_history(run_dir, history)
    print(f"{run_dir}: attempt {len(history.attempts)} {outcome}{f': {reason}' if reason else ''}", flush=True)
    if history.gave_up is not None:
        print(f"{run_dir}: not started again, for {history.gave_up}", flush=True)
        return code
    return code if outcome == "finished" else REQUEUE


def _job() -> str:
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID", "")


def main(arguments: Sequence[str]) -> int:
    """`begin RUN_DIR` or `end RUN_DIR CODE`, in a job script."""
    what, run_dir, *rest = arguments
    try:
        if what == "begin":
            return begin(Path(run_dir), _job(), int(os.environ.get("SLURM_RESTART_COUNT", "0")))
        return end(Path(run_dir), int(rest[0]))
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
