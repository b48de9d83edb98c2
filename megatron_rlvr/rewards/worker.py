"""The far side of `VerifierPool`: a fork server, and the workers that it forks.

The server imports the judge once, in a fresh interpreter with one thread, and forks a worker in a millisecond when the
pool asks. It never runs the trainer's main module, holds none of its memory and no GPU. Workers die with the server,
and the server with the pool's process, however that one ends.

Words on the control socket (one packet each): `fork` with a socket for the worker is answered by its pid; `reap PID` by
its wait status. A worker reads lines of JSON, [[response, answer], ...], and writes one line per pair.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

from megatron_rlvr.rewards.judges import Judge, load_judge
from megatron_rlvr.types import UserError

PR_SET_PDEATHSIG = 1
READY = {"ready": True}


def serve(control_fd: int, judge_path: str, memory_bytes: int, parent_pid: int) -> None:
    """Fork a worker for every `fork` until the pool's process is gone. Runs as the program of the server process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the pool's to handle
    control = socket.socket(fileno=control_fd)
    try:
        judge = load_judge(judge_path)
        libc = ctypes.CDLL(None)
    except BaseException as error:
        control.send(json.dumps({"error": _first_words(error), "user": isinstance(error, UserError)}).encode())
        return
    control.send(json.dumps(READY).encode())
    while os.getppid() == parent_pid:
        if select.select([control], [], [], 1.0)[0] and not _serve_one(control, judge, memory_bytes, libc):
            return


def _serve_one(control: socket.socket, judge: Judge, memory_bytes: int, libc: Any) -> bool:
    """Answer one word; False once nobody asks any more."""
    try:
        word, fds, _, _ = socket.recv_fds(control, 64, 1)
    except ConnectionError:
        return False
    if word == b"fork":
        pid = _fork(lambda: _work(socket.socket(fileno=fds[0]), judge, memory_bytes), control, libc)
        os.close(fds[0])
        control.send(str(pid).encode())
    elif word:
        _, status = os.waitpid(int(word.split()[1]), 0)  # killed or ending: the pool asks for no other
        control.send(str(status).encode())
    return bool(word)


def _fork(work: Callable[[], None], control: socket.socket, libc: Any) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == server:
            control.close()
            work()
            code = 0
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _work(connection: socket.socket, judge: Judge, memory_bytes: int) -> None:
    """Judge pair after pair until the pool hangs up."""
    mapped = _mapped_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.sendall(json.dumps(READY).encode() + b"\n")
    with connection.makefile("rb") as lines:
        for line in lines:
            for response, answer in json.loads(line):
                result = _judged(judge, response, answer)
                result["retire"] = _mapped_bytes() > mapped + memory_bytes // 2
                connection.sendall(json.dumps(result).encode() + b"\n")
                if result["retire"]:
                    return


def _judged(judge: Judge, response: str, answer: str) -> dict[str, Any]:
    try:
        found = judge(response, answer)
        return {"outcome": found.outcome, "score": found.score, "parts": dict(found.parts), "detail": found.detail}
    except MemoryError:
        return {"outcome": "killed", "score": -1.0, "parts": {}, "detail": "ran into its memory limit"}
    except UserError as error:
        return {"fault": str(error)}
    except BaseException as error:  # a function that exits in words, too
        return {"outcome": "crashed", "score": -1.0, "parts": {}, "detail": _first_words(error)}


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _first_words(error: BaseException) -> str:
    """What an error says in one line of at most 1,000 characters; some errors cannot even be written."""
    try:
        return f"{type(error).__name__}: {error}".splitlines()[0][:1000]
    except Exception:
        return type(error).__name__


def program(path: list[str]) -> str:
    """What the interpreter of a server is told to run, with its arguments after it: the pool's own import path."""
    return (
        f"import sys; sys.path[:] = {path!r}\n"
        "from megatron_rlvr.rewards.worker import serve\n"
        "serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))"
    )
