"""Watch a submitted job: its states, what it prints, and its exit code at the end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from launch.attempts import read_history
from launch.submission import JobRecord, JobState, SubmissionFiles, job_states
from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.types import UserError

FORGOTTEN = 3  # looks in a row at which SLURM knows nothing of a job before it counts as gone


class Tail:
    """Shows what files gain; those in `from_start` from their beginning, others from now on."""

    def __init__(self, run_dir: Path) -> None:
        self._slurm, self._logs = SubmissionFiles(run_dir).root, RunFiles(run_dir).logs
        self._shown: dict[Path, int] = {path: path.stat().st_size for path in self._files()}

    def _files(self) -> list[Path]:
        return [*self._slurm.glob("job-*.out"), *self._logs.glob("*/rank0.log")]

    def show(self) -> None:
        """Print what is new; a file that was cut or made again is shown from its start."""
        for path in sorted(self._files()):
            size, shown = path.stat().st_size, self._shown.get(path, 0)
            if size < shown:
                shown = 0
            if size > shown:
                with open(path, "rb") as file:
                    file.seek(shown)
                    sys.stdout.write(file.read(size - shown).decode(errors="replace"))
                sys.stdout.flush()
                self._shown[path] = size


def _summary(states: list[JobState]) -> str:
    seen: dict[str, int] = {}
    for state in states:
        text = f"{state.state} ({state.reason})" if state.state == "PENDING" and state.reason != "None" else state.state
        seen[text] = seen.get(text, 0) + 1
    return ", ".join(text if count == 1 else f"{count} {text}" for text, count in seen.items())


def ended_code(states: list[JobState]) -> int:
    """The exit code of an ended job: of its first part or task that failed; 1 where SLURM ended it without one."""
    for state in states:
        if state.code != 0:
            return state.code
    return 0 if all(state.state == "COMPLETED" for state in states) else 1


def _forgotten_code(run_dir: Path) -> int:
    """Where SLURM no longer knows the job: what its last attempt left."""
    attempts = read_history(run_dir).attempts
    if not attempts or attempts[-1].code is None:
        raise UserError(f"SLURM no longer knows the job of {run_dir}, and it left no exit code; see {run_dir}/slurm")
    return attempts[-1].code


def _look(record: JobRecord) -> list[JobState]:
    return [state for job in record.ids for state in job_states(job)]


def follow(run_dir: Path, poll: float) -> int:
    """Show the job of `run_dir` until it has ended for good; its exit code.

    poll   seconds between looks
    A job that goes back into the queue is followed on. Raises UserError where nothing was submitted.
    """
    record = SubmissionFiles(run_dir).read_job()
    if not record.ids:
        raise UserError(f"{run_dir} holds a rendered job that was not submitted; add --submit")
    tail, before, unknown = Tail(run_dir), "", 0
    while True:
        states = _look(record)
        tail.show()
        summary = _summary(states)
        if states and summary != before:
            print(f"job {', '.join(record.ids)}: {summary}", flush=True)
            before = summary
        unknown = 0 if states else unknown + 1
        if unknown >= FORGOTTEN:
            return _forgotten_code(run_dir)
        if states and all(state.ended for state in states):
            tail.show()
            return ended_code(job_states(record.ids[-1]))  # of a chain, the others have handed on
        time.sleep(poll)
