"""SIGUSR1: a checkpoint after the present rollout batch, then an exit code that says `start me again`."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

REQUEUE = os.EX_TEMPFAIL  # 75: not done, and starting again with checkpoint.resume=auto goes on


class StopRequest:
    """Whether this run was asked to stop; the signal may come at any time, to any rank or to several."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Take SIGUSR1 as a request from now on, one that arrived while it was blocked included."""
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        signal.signal(signal.SIGUSR1, self._ask)
        signal.siginterrupt(signal.SIGUSR1, False)  # system calls of other libraries go on
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])

    def agreed(self) -> bool:
        """True on all ranks once any of them was asked; a collective."""
        import torch
        import torch.distributed as dist

        from megatron_rlvr.actor import platform

        flag = torch.tensor(float(self.requested), device=platform.device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item() > 0)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
