"""The processes of a local run: started, watched, and ended with everything that they started."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from launch.failure import Failure, log_file, read_error
from megatron_rlvr.checkpoint.stop import REQUEUE

SETTLE_SECONDS = 0.3  # after the first failure: time for a more telling one to be seen
TERM_SECONDS = 2.0  # between SIGTERM and SIGKILL
POLL_SECONDS = 0.05


class Ranks:
    """World-size processes, each the leader of its own session. A context: leaving it ends all of them."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.failures: list[Failure] = []
        self.requeued = False  # a rank stopped as it was asked to, and the run wants to be started again
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._running: set[int] = set()
        self.stopped: signal.Signals | None = None
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("reaper.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        self._tell_reaper("done")
        self._reaper.wait()
        self._selector.close()
        os.close(self._wake)

    def start(self, rank: int, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start one rank; what ranks other than 0 print goes to their log file."""
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None
            if rank != 0:
                output = stack.enter_context(open(log_file(self.log_dir, rank), "wb"))
            process = subprocess.Popen(
                list(command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes[rank] = process
        self._running.add(rank)
        self._tell_reaper(str(process.pid))
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)

    def _tell_reaper(self, line: str) -> None:
        assert self._reaper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._reaper.stdin.write(f"{line}\n".encode())
            self._reaper.stdin.flush()

    def ask(self) -> None:
        """Pass SIGUSR1 on to the ranks, not to what they started; may be called from a signal handler."""
        for rank in tuple(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)

    def stop(self, number: int) -> None:
        """Make `wait` return because of a signal; may be called from a signal handler."""
        self.stopped = signal.Signals(number)
        os.eventfd_write(self._wake, 1)

    def wait(self) -> None:
        """Return when all ranks have ended well, soon after the first failure, or at once after `stop`."""
        while self._running and not self.failures and self.stopped is None:
            self._collect(None)
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._running and self.failures and self.stopped is None and time.monotonic() < deadline:
            self._collect(POLL_SECONDS)

    def _collect(self, timeout: float | None) -> None:
        """Take in the ranks that ended; the children that a rank leaves behind are killed with it."""
        for key, _ in self._selector.select(timeout):
            rank = key.data
            if rank is None:  # woken by `stop`
                os.eventfd_read(self._wake)
                continue
            self._selector.unregister(key.fileobj)
            os.close(int(key.fd))
            process = self._processes[rank]
            self._signal(rank, signal.SIGKILL)  # before the leader is reaped, so that its group id is still its own
            code = process.wait()
            self._running.discard(rank)
            if code == REQUEUE:
                self.requeued = True
            elif code != 0:
                self.failures.append(Failure(rank, code, time.time_ns(), read_error(self.log_dir, rank)))

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[rank].pid, number)

    def end(self) -> None:
        """SIGTERM to every rank's process group, then SIGKILL; returns when all ranks are gone."""
        seen = len(self.failures)
        for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, None)):
            for rank in self._running:
                self._signal(rank, number)
            deadline = time.monotonic() + seconds if seconds is not None else None
            while self._running and (deadline is None or time.monotonic() < deadline):
                self._collect(POLL_SECONDS)
        del self.failures[seen:]  # these did not fail: they were ended
