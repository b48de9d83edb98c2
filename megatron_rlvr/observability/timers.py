"""Wall time of the phases of a step, each a named range for profilers too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from megatron_rlvr.ranges import phase_range


class PhaseTimer:
    """`with timer("update_actor"): ...` adds to timing_s/update_actor; a phase entered twice counts both times."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with phase_range(phase):
                yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def seconds(self, phase: str) -> float:
        """Seconds so far; 0 for a phase that was not entered."""
        return self._seconds.get(phase, 0.0)

    def collect(self) -> dict[str, float]:
        """{"timing_s/<phase>": seconds} since the last call, and start again from nothing."""
        seconds, self._seconds = self._seconds, {}
        return {f"timing_s/{phase}": value for phase, value in seconds.items()}
