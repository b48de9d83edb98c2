"""Where the time of a run went: mean, median and longest seconds of every phase, its share, and the idle share.

    python tools/phase_table.py RUN_DIR          from metrics.jsonl: the phases of all updates
    python tools/phase_table.py TRACE.json[.gz]  from a chrome trace of torch.profiler: the ranges of its window

A phase that runs inside another counts in both. Idle in a run is the time of the updates outside all phases; in a trace
it is the time outside all ranges, and on a GPU the time in which it ran no kernel and no copy.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANGE = "user_annotation"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = "timing_s/step"


@dataclass(frozen=True)
class Table:
    """phases: name -> seconds of each time it ran; `total` seconds of wall time; idle: what -> share of them."""

    phases: dict[str, list[float]]
    total: float
    idle: dict[str, float]


def run_table(rows: Iterable[dict[str, Any]]) -> Table:
    """From the rows of metrics.jsonl. Raises ValueError where no row has a time.

    A row without a step, such as an evaluation's, belongs to the wall time of the next update; behind the last update
    it belongs to none and is left out.
    """
    phases: dict[str, list[float]] = {}
    waiting: list[tuple[str, float]] = []
    total = 0.0
    for row in rows:
        waiting += [(n.removeprefix("timing_s/"), s) for n, s in row.items() if _is_phase(n) and s is not None]
        if row.get(STEP):
            total += row[STEP]
            for name, seconds in waiting:
                phases.setdefault(name, []).append(seconds)
            waiting = []
    if not total:
        raise ValueError(f"no row has {STEP}")
    busy = sum(sum(seconds) for seconds in phases.values())
    return Table(phases, total, {"outside all phases": max(0.0, 1 - busy / total)})


def _is_phase(name: str) -> bool:
    return name.startswith("timing_s/") and name != STEP


def trace_table(events: Iterable[dict[str, Any]]) -> Table:
    """From the events of a chrome trace (microseconds). Raises ValueError where it has no ranges."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges = [event for event in complete if event.get("cat") == RANGE]
    if not ranges:
        raise ValueError("it has no named ranges")
    phases: dict[str, list[float]] = {}
    for event in ranges:
        phases.setdefault(event["name"], []).append(event["dur"] / 1e6)
    timed = [event for event in complete if event.get("cat") in (RANGE, "cpu_op", *DEVICE)]
    total = max(_end(event) for event in timed) - min(event["ts"] for event in timed)
    idle = {"outside all ranges": 1 - _covered(ranges) / total}
    device = [event for event in complete if event.get("cat") in DEVICE]
    if device:
        idle["GPU without a kernel or copy"] = 1 - _covered(device) / total
    return Table(phases, total / 1e6, idle)


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _covered(events: Iterable[dict[str, Any]]) -> float:
    """Microseconds in which at least one of the events runs."""
    covered, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e["ts"]):
        covered += max(0.0, _end(event) - max(event["ts"], reached))
        reached = max(reached, _end(event))
    return covered


def render(table: Table) -> str:
    """The table as text, longest phases first, without a final newline."""
    lines = [f"{'phase':<28}{'times':>6}{'mean s':>11}{'p50 s':>11}{'max s':>11}{'share':>8}"]
    for name, seconds in sorted(table.phases.items(), key=lambda item: -sum(item[1])):
        mean, middle, longest = statistics.fmean(seconds), statistics.median(seconds), max(seconds)
        share = sum(seconds) / table.total
        name = name if len(name) <= 27 else f"{name[:26]}…"
        lines.append(f"{name:<28}{len(seconds):>6}{mean:>11.4f}{middle:>11.4f}{longest:>11.4f}{share:>8.1%}")
    lines.append(f"wall time {table.total:.2f} s")
    lines += [f"idle ({what}): {share:.1%}" for what, share in table.idle.items()]
    return "\n".join(lines)


def read_table(path: Path) -> Table:
    """The table of a run directory, a metrics.jsonl or a chrome trace.

    Raises FileNotFoundError for a run without metrics, ValueError for a file that is none of these.
    """
    if path.is_dir():
        path = path / "metrics.jsonl"
    if path.suffix == ".jsonl":
        return run_table(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    raw = path.read_bytes()
    content = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    return trace_table(content["traceEvents"] if isinstance(content, dict) else content)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="RUN_OR_TRACE", type=Path)
    path = parser.parse_args(arguments).path
    try:
        print(render(read_table(path)))
    except (OSError, ValueError, KeyError) as error:
        print(f"{path} holds no times ({error}); give a run directory or a chrome trace.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
