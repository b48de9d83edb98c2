"""How a rank tells its launcher why it failed: one small JSON file, written whole, before its sockets close."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TAIL_LINES = 30


@dataclass(frozen=True)
class RankError:
    """Why a rank failed: `text` is a traceback, or the one sentence of a fault of the user's (`user_error`)."""

    time_ns: int
    user_error: bool
    text: str


def error_file(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank{rank}.error.json"


def log_file(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank{rank}.log"


def write_error(log_dir: Path, rank: int, text: str, *, user_error: bool) -> None:
    """Leave the error of this rank for the launcher, stamped with the time."""
    target = error_file(log_dir, rank)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(asdict(RankError(time.time_ns(), user_error, text))), encoding="utf-8")
    os.replace(partial, target)


def read_error(log_dir: Path, rank: int) -> RankError | None:
    """What `write_error` left, or None."""
    try:
        return RankError(**json.loads(error_file(log_dir, rank).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def exit_file(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank{rank}.exit.json"


def write_exit(log_dir: Path, rank: int, code: int) -> None:
    """Leave how a rank ended, by itself or by a signal that was not its launcher's."""
    target = exit_file(log_dir, rank)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps({"code": code, "time_ns": time.time_ns()}), encoding="utf-8")
    os.replace(partial, target)


def read_exit(path: Path) -> Failure | None:
    """What `write_exit` left in `path`, with the error of that rank."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rank = int(path.name.removeprefix("rank").partition(".")[0])
        return Failure(rank, int(content["code"]), int(content["time_ns"]), read_error(path.parent, rank))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


@dataclass(frozen=True)
class Failure:
    """A rank that ended with another exit code than 0 (negative: the signal that killed it), as the launcher saw it."""

    rank: int
    code: int
    seen_ns: int
    error: RankError | None

    @property
    def order(self) -> tuple[bool, int]:
        """Sorts by cause: a rank that loses a peer raises or aborts, so one that just vanishes was not the follower."""
        vanished = self.error is None and self.code != -signal.SIGABRT
        return not vanished, self.error.time_ns if self.error is not None else self.seen_ns

    @property
    def exit_code(self) -> int:
        """The code as a shell gives it: 128 + signal for a killed process."""
        return self.code if self.code >= 0 else 128 - self.code


def describe(failure: Failure, log_dir: Path) -> str:
    """What to show of the first failure: the one sentence of a user's fault, or a crash's traceback or last lines."""
    error = failure.error
    if error is not None and error.user_error:
        return error.text
    how = f"exit code {failure.code}" if failure.code >= 0 else f"signal {signal.Signals(-failure.code).name}"
    head = f"rank {failure.rank} failed first ({how})"
    if error is not None:
        return f"{head}:\n{error.text.rstrip()}"
    if failure.rank == 0:
        return f"{head}; what it printed is above"
    tail = _tail(log_file(log_dir, failure.rank))
    return f"{head}; the last lines that it printed:\n{tail}" if tail else f"{head} without a word"


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-TAIL_LINES:])
