"""The command line as a user types it, in a subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_python(*arguments: str | Path, check: bool = True, timeout: int = 1000) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` in the repository; fails the test with what was printed unless `check` is off."""
    environment = dict(os.environ, PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout, errors="replace"
    )
    assert not check or done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done


def read_metrics(run_dir: Path) -> list[dict]:
    """Rows of metrics.jsonl without wall times and rates, which differ from run to run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/", "rollout/throughput"))} for row in rows
    ]
