"""Phase timers and the progress bar."""

from __future__ import annotations

import io
import sys
import time
from types import ModuleType

import pytest

from megatron_rlvr.observability.progress import Progress, summary
from megatron_rlvr.observability.timers import PhaseTimer


def test_a_phase_entered_twice_counts_both_times() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer("gen"):
            time.sleep(0.02)
    with timer("adv"):
        pass
    assert timer.seconds("gen") >= 0.04 and timer.seconds("never") == 0
    collected = timer.collect()
    assert list(collected) == ["timing_s/gen", "timing_s/adv"]
    assert 0.04 <= collected["timing_s/gen"] < 1 and collected["timing_s/adv"] < 0.02
    assert timer.collect() == {}


def test_a_phase_that_raises_is_still_timed() -> None:
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer("gen"):
        raise KeyError
    assert "timing_s/gen" in timer.collect()


def test_phases_are_named_ranges_where_nvtx_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Annotate:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            events.append(f"push {self.name}")

        def __exit__(self, *exception: object) -> None:
            events.append(f"pop {self.name}")

    module = ModuleType("nvtx")
    module.annotate = Annotate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvtx", module)
    with PhaseTimer()("refresh"):
        events.append("work")
    assert events == ["push refresh", "work", "pop refresh"]


def test_the_bar_shows_what_was_measured() -> None:
    metrics = {
        "critic/rewards/mean": -0.25,
        "response_length/mean": 21.0,
        "actor/entropy": None,
        "perf/throughput": 4321.0,
    }
    assert summary(metrics) == {"reward": "-0.250", "length": "21.0", "tokens/s": "4,321"}


def test_the_bar_keeps_the_held_out_accuracy() -> None:
    out = io.StringIO()
    progress = Progress(3, name="demo", file=out)
    progress.show(1, {"critic/rewards/mean": 0.5}, 0.75)
    progress.show(3, {"critic/rewards/mean": 0.625}, None)
    progress.close()
    last = out.getvalue().rstrip().rpartition("\r")[2]
    assert "demo: 100%" in last and "3/3" in last and "reward=0.625" in last and "held-out=0.750" in last
