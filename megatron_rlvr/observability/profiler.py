"""The window of updates that a profiler sees, on the ranks that it sees, and snapshots of GPU memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_rlvr.config.tree import ProfileConfig


class Profiler:
    """Opens and closes what `profile` asks for on this rank; does nothing where it asks for nothing.

    The window of steps [a, b] opens when update a - 1 has been reported and closes when update b has: the rollout batch
    that update a starts with is in it. Call `advance` at the beginning and after every update.

    nsys    the launcher put Nsight Systems around this rank; the window is what cudaProfilerApi bounds
    torch   torch.profiler, exported as a chrome trace `rank<r>_steps<a>-<b>.json` in `directory`
    memory  allocations are recorded from now on; the snapshot of the window's end is `rank<r>_memory.pickle`

    Where CUDA memory runs out there is a snapshot in any case, `rank<r>_out_of_memory.pickle`.

    Raises RuntimeError from torch where CUDA refuses to profile.
    """

    def __init__(self, config: ProfileConfig, directory: Path, rank: int) -> None:
        self._config, self._directory, self._rank = config, directory, rank
        self._first, self._last = config.steps
        chosen = rank in config.ranks
        self._tool = config.tool if chosen else "none"
        self._memory = config.memory and chosen
        self._trace: torch.profiler.profile | None = None
        self._open = False
        if self._memory:
            self._record_memory()

    def advance(self, done: int) -> None:
        """`done` updates have been reported."""
        if not self._open and self._first - 1 <= done < self._last:
            self._start()
        elif self._open and done >= self._last:
            self._stop()

    def close(self, error: BaseException | None = None) -> None:
        """Keep what an open window has seen so far; of a run that failed, only the memory where that ran out."""
        if isinstance(error, torch.OutOfMemoryError):
            self._write_snapshot(f"rank{self._rank}_out_of_memory.pickle")
        elif self._open and error is None:
            self._stop()
        elif self._trace is not None:
            self._trace.stop()

    def _start(self) -> None:
        self._open = True
        if self._tool == "torch":
            self._trace = torch.profiler.profile()  # the CPU, and CUDA where there is one
            self._trace.start()
        elif self._tool == "nsys" and torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.profiler.start()

    def _stop(self) -> None:
        self._open = False
        if self._trace is not None:
            self._trace.stop()
            name = f"rank{self._rank}_steps{self._first}-{self._last}.json"
            self._write(name, self._trace.export_chrome_trace)
            self._trace = None
        elif self._tool == "nsys" and torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        if self._memory:
            self._write_snapshot(f"rank{self._rank}_memory.pickle")

    def _record_memory(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history()
        else:
            print("profile.memory does nothing here: a CPU has no CUDA memory to take snapshots of", file=sys.stderr)

    def _write_snapshot(self, name: str) -> None:
        if torch.cuda.is_available():
            self._write(name, torch.cuda.memory._dump_snapshot)
            print(f"rank {self._rank}: wrote {self._directory / name}", file=sys.stderr)

    def _write(self, name: str, write: Callable[[str], object]) -> None:
        """The file appears whole or not at all."""
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = self._directory / f"partial_{name}"
        write(str(partial))
        os.replace(partial, self._directory / name)
