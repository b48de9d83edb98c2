"""What `launch.slurm` leaves in a run directory for its jobs, and what SLURM says of them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rlvr.files import write_whole
from megatron_rlvr.types import UserError

ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)


@dataclass(frozen=True)
class JobRecord:
    """What was submitted.

    command   what the ranks do: train, sft, eval, or convert
    ids       SLURM's job ids, several for a chain; none before it is submitted
    """

    name: str
    command: str
    script: str
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class SubmissionFiles:
    """The names inside RUN_DIR/slurm."""

    run_dir: Path

    @property
    def root(self) -> Path:
        return self.run_dir / "slurm"

    @property
    def config(self) -> Path:
        """The resolved config as it was submitted; the ranks read RUN_DIR/config.yaml, which each attempt writes."""
        return self.root / "config.yaml"

    @property
    def script(self) -> Path:
        return self.root / "job.sbatch"

    @property
    def profile(self) -> Path:
        return self.root / "cluster.yaml"

    @property
    def git(self) -> Path:
        return self.root / "git.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.txt"

    @property
    def sweep(self) -> Path:
        return self.root / "sweep.txt"

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts.json"

    def read_job(self) -> JobRecord:
        """Raises UserError where nothing was rendered."""
        try:
            content = json.loads(self.job.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{self.run_dir} holds no rendered job; run python -m launch.slurm first") from None
        return JobRecord(**{**content, "ids": tuple(content["ids"])})

    def write_job(self, record: JobRecord) -> None:
        write_whole(self.job, (json.dumps(asdict(record), indent=1) + "\n").encode())


@dataclass(frozen=True)
class JobState:
    """One job, array task or part of a heterogeneous job, as SLURM sees it now."""

    job: str
    state: str
    code: int
    restarts: int
    reason: str

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(list(command), capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not on this machine; run this on a login node of the cluster") from None


def _field(record: str, name: str) -> str:
    match = re.search(rf"(?:^|\s){name}=(\S*)", record)
    return match.group(1) if match else ""


def _exit_code(record: str) -> int:
    """SLURM writes CODE:SIGNAL; as a shell gives it."""
    code, _, number = _field(record, "ExitCode").partition(":")
    return int(code or 0) or (128 + int(number) if number not in ("", "0") else 0)


def job_states(job: str) -> list[JobState]:
    """Every part of a job; empty once SLURM has forgotten it."""
    done = _run(["scontrol", "show", "job", "-o", job])
    records = [line for line in done.stdout.splitlines() if line.startswith("JobId=")]
    return [
        JobState(
            job=_field(record, "JobId"),
            state=_field(record, "JobState"),
            code=_exit_code(record),
            restarts=int(_field(record, "Restarts") or 0),
            reason=_field(record, "Reason"),
        )
        for record in records
    ]


def active(record: JobRecord) -> str | None:
    """`JOB, which is STATE` of a job that still waits or runs, or None."""
    for job in record.ids:
        for state in job_states(job):
            if not state.ended:
                return f"job {job}, which is {state.state}"
    return None


def submit(script: Path, *options: str) -> str:
    """Submit a script; the job's id. Raises UserError with what sbatch says where it refuses."""
    done = _run(["sbatch", "--parsable", *options, str(script)])
    if done.returncode != 0:
        raise UserError(f"sbatch refused {script}: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]
