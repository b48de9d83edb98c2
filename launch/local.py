"""All ranks of a run on this machine, from one command.

One process per rank, each in its own session. A rank that fails ends the others within seconds, its error is shown
first, and its exit code is the launcher's. No process outlives the launcher, however the launcher ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from launch.failure import describe, error_file
from launch.nsys import Wrap
from launch.ranks import Ranks
from megatron_rlvr.checkpoint.stop import REQUEUE


@contextlib.contextmanager
def _signals_stop(ranks: Ranks) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the ranks; a signal that is ignored already (nohup) stays ignored.

    SIGUSR1 is passed on: ranks that know it stop at their next checkpoint. It waits while ranks are being started, and
    they inherit that, so that none dies of it before it listens.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        ranks.stop(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {n: signal.signal(n, stop) for n in wanted if signal.getsignal(n) is not signal.SIG_IGN}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda number, frame: ranks.ask())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rank_environment(rank: int, world_size: int, port: int, *, threads: int, cpu: bool) -> dict[str, str]:
    """What torch.distributed reads with init_method env://, for a store that the launcher itself serves on `port`.

    Serving the store here, on a port that the kernel chose and that stays bound, leaves no moment at which two jobs
    on one machine could pick the same port; the TORCHELASTIC variables are how torch is told not to serve another.
    """
    environment = dict(os.environ)
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        OMP_NUM_THREADS=str(threads),
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
    )
    if cpu:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def run_local(command: Sequence[str], world_size: int, *, threads: int, log_dir: Path, wrap: Wrap | None = None) -> int:
    """Run `command` once per rank and wait; return 0, or the exit code of the rank that failed first.

    command   program and arguments; a rank knows itself by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    threads   OpenMP threads of each rank
    wrap      changes the command of a rank, to put a profiler around it
    log_dir   rank0 prints to this terminal, the others to log_dir/rank<i>.log
    Returns 128 + n when signal n killed the rank, or ended the launcher; 75 when the ranks stopped at a checkpoint as
    SIGUSR1 asked.
    """
    import torch
    from torch.distributed import TCPStore

    log_dir.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size):
        error_file(log_dir, rank).unlink(missing_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cpu = not torch.cuda.is_available()
    ranks = Ranks(log_dir)
    with _signals_stop(ranks), ranks:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        for rank in range(world_size):
            own = command if wrap is None else wrap(rank, command)
            ranks.start(rank, own, rank_environment(rank, world_size, store.port, threads=threads, cpu=cpu))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        ranks.wait()
        first = min(ranks.failures, key=lambda failure: failure.order, default=None)
        if first is not None:  # shown before the others are ended, who may have something to say about that
            print(describe(first, log_dir), file=sys.stderr, flush=True)
    if first is not None:
        return first.exit_code
    if ranks.stopped is None:
        return REQUEUE if ranks.requeued else 0
    print(f"ended by {ranks.stopped.name}", file=sys.stderr, flush=True)
    return 128 + ranks.stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m launch.local RUN.yaml [section.key=value ...]`: the same as `python -m megatron_rlvr train`."""
    from megatron_rlvr.cli import main as cli

    return cli(["train", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
