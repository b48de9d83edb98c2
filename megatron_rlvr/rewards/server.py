"""The near side of the fork server: its process, and the workers as the pool sees them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rlvr.rewards.verdict import Outcome
from megatron_rlvr.rewards.worker import program
from megatron_rlvr.types import UserError

START_SECONDS = 300.0  # a cold disk can take a minute to give Python its modules
Message = dict[str, Any]


@dataclass
class Worker:
    """One worker: what it has to judge, the first being judged, and when that one's time is over (monotonic s)."""

    pid: int
    server_pid: int
    connection: socket.socket
    ready: bool = False
    deadline: float = 0.0
    items: deque[tuple[int, tuple[str, str]]] = field(default_factory=deque)
    outbox: bytes = b""
    inbox: bytes = b""

    def put(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Send pairs, as far as the worker takes them now; `exchange` sends the rest."""
        self.outbox += json.dumps(pairs).encode() + b"\n"
        self._send()

    def exchange(self) -> tuple[list[Message], bool]:
        """What the worker has said since the last time, and whether it is still there. Never waits."""
        self._send()
        chunks, alive = [self.inbox], True
        with contextlib.suppress(BlockingIOError):  # raised once there is nothing more to read for now
            while chunk := self._receive():
                chunks.append(chunk)
            alive = False
        *lines, self.inbox = b"".join(chunks).split(b"\n")
        return [json.loads(line) for line in lines], alive

    def kill(self) -> None:
        """SIGKILL. The pid stays this worker's until the server reaps it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _receive(self) -> bytes:
        try:
            return self.connection.recv(1 << 16)
        except ConnectionError:
            return b""

    def _send(self) -> None:
        try:
            while self.outbox:
                self.outbox = self.outbox[self.connection.send(self.outbox) :]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.outbox = b""


class ForkServer:
    """Starts when first asked for a worker, again when it has died.

    judge         what workers run: "math_verify" or an import path
    memory_bytes  what a worker may map beyond what the server has mapped
    """

    def __init__(self, judge: str, memory_bytes: int) -> None:
        self._judge, self._memory_bytes = judge, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> socket.socket:
        """The control socket of a running server. Raises UserError where none starts."""
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_SECONDS)
        arguments = [str(theirs.fileno()), self._judge, str(self._memory_bytes), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program([entry or os.getcwd() for entry in sys.path]), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        self._control = ours
        said = json.loads(self._answer() or b"{}")
        if not said.get("ready"):
            self.close()
            if said.get("user"):
                raise UserError(said["error"].removeprefix("UserError: "))
            raise UserError(
                f"the verifier process does not start ({said.get('error', 'it ended at once')}); "
                "see that math-verify is installed, or use rewards.name=normalized_box."
            )
        return ours

    def fork(self) -> Worker:
        """A new worker. Raises UserError where the server cannot make one."""
        for last in (False, True):  # a server that was killed is started once more
            control = self.start()
            ours, theirs = socket.socketpair()
            with theirs, contextlib.suppress(OSError):
                socket.send_fds(control, [b"fork"], [theirs.fileno()])
                pid = self._answer()
                if pid:
                    ours.setblocking(False)
                    return Worker(int(pid), self._pid(), ours)
            ours.close()
            self.close()
            if last:
                break
        raise UserError("the verifier's server process dies as it forks; see that this machine has memory left.")

    def end(self, worker: Worker) -> tuple[Outcome, str]:
        """Kill and reap; how the worker ended, had it ended before."""
        worker.kill()
        worker.connection.close()
        status = b""
        if self._control is not None and worker.server_pid == self._pid():
            with contextlib.suppress(OSError):
                self._control.send(f"reap {worker.pid}".encode())
                status = self._answer()
        if not status:
            return "killed", "ended with the verifier's server"
        code = os.waitstatus_to_exitcode(int(status))
        return ("killed", f"was ended by signal {-code}") if code < 0 else ("crashed", f"exited with code {code}")

    def close(self) -> None:
        """Hang up, which ends the server and with it the workers."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2)
            if self._process.returncode is None:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None

    def _pid(self) -> int:
        return -1 if self._process is None else self._process.pid

    def _answer(self) -> bytes:
        assert self._control is not None
        try:
            return self._control.recv(4096)
        except OSError:
            return b""
