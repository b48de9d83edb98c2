"""Named ranges for profilers: the one place from which Nsight Systems (NVTX) and torch.profiler learn of a phase.

Outside a profiler a range costs a few microseconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager


@contextlib.contextmanager
def phase_range(name: str) -> Iterator[None]:
    """Inside, what runs belongs to `name` in both profilers."""
    from torch.profiler import record_function

    with nvtx_range(name), record_function(name):
        yield


def nvtx_range(name: str) -> AbstractContextManager[object]:
    """A range for Nsight Systems: the nvtx package's, else torch's, or nothing (torch's raises without CUDA)."""
    try:
        import nvtx
    except ImportError:
        import torch

        return torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()
    return nvtx.annotate(name)


class MegatronRanges:
    """What megatron-core takes for its `timers`: each of its timers is a range of that name.

    Its schedules start and stop `forward-compute` and `backward-compute` around every micro-batch, its optimizer
    `optimizer-inner-step` and others.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, _StartStop] = {}

    def __call__(self, name: str, log_level: int = 0) -> _StartStop:
        return self._ranges.setdefault(name, _StartStop(name))


class _StartStop:
    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[AbstractContextManager[None]] = []

    def start(self, barrier: bool = False) -> None:
        """Open the range. No barrier whatever is asked: it would make what is measured."""
        opened = phase_range(self._name)
        opened.__enter__()
        self._open.append(opened)

    def stop(self, barrier: bool = False) -> None:
        """Close the range that was opened last."""
        self._open.pop().__exit__(None, None, None)
