"""One task of a SLURM step: `python -m launch.slurm_task LOG_DIR PID_FILE|- [--nsys=RANKS] PYTHON_ARGUMENTS...`.

srun starts it. It tells the rank its place by the variables that torch.distributed reads, starts it as `python
PYTHON_ARGUMENTS` and waits. How the rank ended stays in LOG_DIR with the time, also where it was killed, so that the
first failure is known afterwards. A rank that stopped at a checkpoint (75) ends its task with 0: to SLURM it is no
failure that ends the rest.

The process itself loads nothing heavy: it outlives a rank that ran out of memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from launch.failure import error_file, exit_file, write_error, write_exit
from launch.ranks import REQUEUE, TERM_SECONDS
from megatron_rlvr.types import UserError


def rank_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed reads with init_method env://, from what srun tells a task.

    variables   of the task: SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NUM_TASKS; the script has set MASTER_ADDR and _PORT
    """
    world_size = variables["SLURM_STEP_NUM_TASKS"]
    local = variables.get("SLURM_STEP_TASKS_PER_NODE", world_size).partition("(")[0].partition(",")[0]
    return {
        "RANK": variables["SLURM_PROCID"],
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local,
    }


def _descendant(pid: int, command: Sequence[str]) -> int | None:
    """The process that runs exactly `command`, below `pid`."""
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, entry.read_text().split()):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[:-1]
            if words == [word.encode() for word in command]:
                return child
            if (found := _descendant(child, command)) is not None:
                return found
    return None


class Task:
    """One rank's process. SIGUSR1 is passed on to the rank alone; SIGTERM ends it with all that it started.

    rank      the command that runs the rank
    profiler  what stands before it, if anything
    """

    def __init__(self, rank: Sequence[str], environment: Mapping[str, str], profiler: Sequence[str] = ()) -> None:
        self._rank, self._profiled = list(rank), bool(profiler)
        self.ended = False  # from outside, so that its exit code says nothing
        self._asked = False
        self._deadline: float | None = None
        # the rank inherits the blocked signal and takes it once it listens: none is lost, none kills it before
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        self._process = subprocess.Popen([*profiler, *rank], env=dict(environment), start_new_session=True)
        signal.signal(signal.SIGUSR1, self._ask)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _pass_on(self) -> None:
        """SIGUSR1 to the rank; later, where a profiler has not started it yet."""
        with contextlib.suppress(OSError):
            target = _descendant(self._process.pid, self._rank) if self._profiled else self._process.pid
            if target is not None:
                self._asked = False
                os.kill(target, signal.SIGUSR1)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.ended = True
        self._deadline = time.monotonic() + TERM_SECONDS
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def wait(self) -> int:
        """The rank's exit code (negative: the signal that killed it); the children that it left are killed."""
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._signal(signal.SIGKILL)
            if self._asked:
                self._pass_on()
            time.sleep(0.1)
        self._signal(signal.SIGKILL)  # before it is reaped, so that the group's id is still its own
        return self._process.wait()


def _profiler(ranks: str, rank: int, log_dir: Path) -> list[str]:
    """What stands before the command of a rank that Nsight Systems records; nothing for the others.

    Raises UserError where nsys is not on the node.
    """
    if str(rank) not in ranks.split(","):
        return []
    from launch.nsys import nsys_command
    from megatron_rlvr.config.run_dir import RunFiles

    if shutil.which("nsys") is None:
        raise UserError(f"profile.tool is nsys, which is not on PATH on {socket.gethostname()}; load it in the setup")
    directory = RunFiles(log_dir.parents[1]).profile
    directory.mkdir(parents=True, exist_ok=True)
    return nsys_command([], directory, rank, job=os.environ["SLURM_JOB_ID"], node=socket.gethostname())


def main(arguments: Sequence[str]) -> int:
    """Run one rank; its exit code as a shell gives it, 0 where it wants to be started again."""
    log_dir, pid_file, *command = arguments
    profiled = command.pop(0).partition("=")[2] if command[0].startswith("--nsys=") else ""
    directory = Path(log_dir)
    place = rank_environment(os.environ)
    rank = int(place["RANK"])
    directory.mkdir(parents=True, exist_ok=True)
    for old in (error_file(directory, rank), exit_file(directory, rank)):
        old.unlink(missing_ok=True)
    try:
        profiler = _profiler(profiled, rank, directory) if profiled else []
    except UserError as error:
        write_error(directory, rank, str(error), user_error=True)
        write_exit(directory, rank, 2)
        return 2
    task = Task([sys.executable, *command], {**os.environ, **place}, profiler)
    if rank == 0 and pid_file != "-":
        partial = Path(f"{pid_file}.{os.getpid()}")
        partial.write_text(f"{os.getpid()}\n")
        os.replace(partial, pid_file)
    code = task.wait()
    if code == -signal.SIGTERM and not task.ended:
        time.sleep(0.5)  # SLURM signals all processes of a step: this one's turn may come a moment later
    if not task.ended:
        write_exit(directory, rank, code)
    if code == REQUEUE:
        return 0
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
