"""The replay benchmark on a small buffer: its table, and that the buffer is the cheap one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "bench_replay.py"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_buffer_keeps_to_its_budget(tmp_path: Path) -> None:
    done = run("--prefixes", "2e5", "--length", "500", "--draws", "200", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == ["buffer", "choice", "sum tree"] and len(done.stdout.splitlines()) == 4
    assert {row["prefixes"] for row in rows.values()} == {rows["buffer"]["prefixes"]}
    buffer = rows["buffer"]
    assert 0.1 < buffer["bytes"] < 1.0 < 10.0 < rows["choice"]["bytes"] < rows["sum tree"]["bytes"]
    assert buffer["insert_us"] < 1.0 and buffer["insert_us"] < rows["sum tree"]["insert_us"]
    assert buffer["draw_1_us"] < rows["choice"]["draw_1_us"] / 5  # CPU times of one process: no clock of a busy machine


def test_sizes_below_one_are_refused() -> None:
    done = run("--stride", "0")
    assert done.returncode == 2 and "--stride" in done.stderr
