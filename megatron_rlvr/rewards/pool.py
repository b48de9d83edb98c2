"""Verification in processes that can be killed: no response, however hostile, holds up a run or takes its memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from megatron_rlvr.rewards.custom import MATH_VERIFY
from megatron_rlvr.rewards.guards import mismatch
from megatron_rlvr.rewards.server import ForkServer, Message, Worker
from megatron_rlvr.rewards.shortcut import shortcut
from megatron_rlvr.rewards.verdict import OUTCOMES, Outcome, Verdict, verdict
from megatron_rlvr.types import UserError

LARGEST_BATCH = 16  # pairs per message
LARGEST_MESSAGE = 1 << 20  # characters after which no further pair joins a message

Pair = tuple[str, str]
Item = tuple[int, Pair]


@dataclass
class _Queue:
    """The pairs that no worker holds, their verdicts so far, and how many a message takes."""

    pairs: Sequence[Pair]
    batch: int
    position: int = 0
    returned: deque[Item] = field(default_factory=deque)
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    def next(self) -> Item | None:
        if self.returned:
            return self.returned.popleft()
        if self.position == len(self.pairs):
            return None
        self.position += 1
        return self.position - 1, self.pairs[self.position - 1]


class VerifierPool:
    r"""Judges (response, answer) pairs in worker processes, with a deadline and a memory limit for each.

    workers    processes that judge at once; they start when first needed
    timeout    seconds of wall time for one pair; then its worker is killed (SIGKILL) and another forked
    memory_gb  GiB that a worker may map beyond what the fork server maps itself (RLIMIT_AS)
    guard      reject answers that math-verify accepts with another unit, base or kind of bracket (`guards.mismatch`)
    function   what judges: "math_verify", or the import path "package.module:function" of a reward function

    A call holds at most `workers` messages of 16 pairs outside its input, returns verdicts in the order of the pairs,
    and never raises for what a response does. Integers and fractions are compared here, without a worker, where
    math-verify's verdict is certain (`shortcut`). `counts` says how many verdicts of each outcome there have been.

    Uses no signal handlers, no alarms and no threads of its own; the trainer's process is never forked. Calls from
    several threads take turns. A pool belongs to the process that made it: in a forked child it raises RuntimeError.
    Raises UserError for a function that cannot be imported or returns no reward, and where workers do not start.
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        timeout: float = 30.0,
        memory_gb: float = 2.0,
        guard: bool = False,
        function: str = MATH_VERIFY,
    ) -> None:
        if workers < 1 or timeout <= 0 or memory_gb <= 0:
            raise ValueError(f"a pool needs workers, time and memory, got {workers}, {timeout} s, {memory_gb} GiB")
        self.workers, self.timeout, self.guard, self.function = workers, timeout, guard, function
        self.counts: Counter[Outcome] = Counter({outcome: 0 for outcome in OUTCOMES})
        self._server = ForkServer(function, int(memory_gb * 2**30))
        self._pool: list[Worker] = []
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._server, self._pool, self._owner)

    def verify(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """The verdict on each (response, answer), in order; within len(pairs) * timeout / workers, rounded up."""
        self._check_usable()
        with self._lock:
            queue = _Queue(pairs, batch=max(1, min(LARGEST_BATCH, len(pairs) // (2 * self.workers))))
            try:
                self._work_off(queue)
            except BaseException:
                self._discard([worker for worker in self._pool if worker.items])  # they hold pairs of this call
                raise
            verdicts = [queue.verdicts[index] for index in range(len(pairs))]
            self.counts.update(verdict.outcome for verdict in verdicts)
            return verdicts

    async def verify_async(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """`verify` without blocking the event loop."""
        return await asyncio.to_thread(self.verify, pairs)

    def start(self) -> None:
        """Start the server now instead of at the first pair. Raises UserError where it does not start."""
        self._check_usable()
        with self._lock:
            self._server.start()

    def close(self) -> None:
        """End all processes of the pool; a second call does nothing."""
        with self._lock:
            self._finalizer()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("a VerifierPool cannot be used in a forked child; make another one there")
        if not self._finalizer.alive:
            raise RuntimeError("this VerifierPool is closed")

    def _work_off(self, queue: _Queue) -> None:
        self._discard([worker for worker in self._pool if not worker.exchange()[1]])  # ended while idle
        while True:
            while (idle := self._idle()) is not None or len(self._pool) < self.workers:
                items = self._message(queue)
                if not items:
                    break
                self._hand_out(items, idle or self._fork())
            busy = [worker for worker in self._pool if worker.items]
            if not busy:
                return
            self._wait(busy)
            for worker in busy:
                self._collect(worker, queue)

    def _idle(self) -> Worker | None:
        return next((worker for worker in self._pool if not worker.items), None)

    def _message(self, queue: _Queue) -> list[Item]:
        """The next pairs that need a worker; on the way, verdicts on those that need none."""
        items: list[Item] = []
        size = 0
        while len(items) < queue.batch and size < LARGEST_MESSAGE and (item := queue.next()) is not None:
            index, (response, answer) = item
            known = shortcut(response, answer) if self.function == MATH_VERIFY else None
            if known is None:
                items.append(item)
                size += len(response) + len(answer)
            else:
                queue.verdicts[index] = verdict(known)
        return items

    def _fork(self) -> Worker:
        worker = self._server.fork()
        self._pool.append(worker)
        return worker

    def _hand_out(self, items: list[Item], worker: Worker) -> None:
        worker.items.extend(items)
        worker.deadline = time.monotonic() + self.timeout
        worker.put([pair for _, pair in items])

    def _wait(self, busy: Sequence[Worker]) -> None:
        """Sleep until a worker says something, can take more, is gone or late."""
        poll = select.poll()
        for worker in busy:
            poll.register(worker.connection, select.POLLIN | (select.POLLOUT if worker.outbox else 0))
        seconds = min(worker.deadline for worker in busy) - time.monotonic()
        poll.poll(max(0, int(seconds * 1000) + 1))

    def _collect(self, worker: Worker, queue: _Queue) -> None:
        """Take what a worker has said; where it is gone or late, its first pair is to blame and the rest goes back."""
        messages, alive = worker.exchange()
        for message in messages:
            self._note(worker, message, queue)
            if message.get("retire"):
                self._replace(worker, queue)
                return
        if not alive and not worker.items:
            self._discard([worker])
        elif not alive:
            outcome, detail = self._discard([worker])[0]
            if not worker.ready:
                raise UserError(f"a verifier process {detail} before its first answer; raise rewards.memory_gb.")
            index, _ = worker.items.popleft()
            queue.verdicts[index] = Verdict(outcome, -1.0, detail=detail)
            queue.returned.extendleft(reversed(worker.items))
        elif worker.items and time.monotonic() > worker.deadline:
            index, _ = worker.items.popleft()
            queue.verdicts[index] = Verdict("timeout", -1.0, detail=f"took more than {self.timeout:g} s")
            self._replace(worker, queue)

    def _note(self, worker: Worker, message: Message, queue: _Queue) -> None:
        worker.deadline = time.monotonic() + self.timeout  # the worker has moved on to the next pair
        if message.get("ready"):
            worker.ready = True
            return
        if "fault" in message:
            raise UserError(str(message["fault"]))
        index, (response, answer) = worker.items.popleft()
        found = Verdict(message["outcome"], message["score"], message["parts"], message["detail"])
        if self.guard and found.outcome == "correct" and (reason := mismatch(response, answer)):
            found = verdict(False, reason)
        queue.verdicts[index] = found

    def _replace(self, worker: Worker, queue: _Queue) -> None:
        """End a worker that is not to blame for the pairs that it still holds."""
        self._discard([worker])
        queue.returned.extendleft(reversed(worker.items))

    def _discard(self, workers: Sequence[Worker]) -> list[tuple[Outcome, str]]:
        """Kill and reap; how each ended, had it ended before."""
        ends = []
        for worker in workers:
            self._pool.remove(worker)
            ends.append(self._server.end(worker))
        return ends


def _close(server: ForkServer, workers: list[Worker], owner: int) -> None:
    if os.getpid() == owner:
        for worker in workers:
            worker.kill()
        server.close()
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.connection.close()
    workers.clear()
