"""The files of a run that goes on in place: what was written after its checkpoint is cut off."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.files import write_whole

_ROLLOUTS = re.compile(r"step_(\d+)\.jsonl")


def metrics_position(files: RunFiles) -> int:
    """Bytes of metrics.jsonl so far."""
    return files.metrics.stat().st_size if files.metrics.exists() else 0


def cut_files(files: RunFiles, step: int, position: int) -> None:
    """Leave the rows and rollout batches that were there when the checkpoint of update `step` was taken.

    position   bytes of metrics.jsonl at that time; where the file is shorter, or was replaced, rows go by their step
    """
    _cut_metrics(files.metrics, step, position)
    for path in files.rollouts.glob("step_*.jsonl"):
        match = _ROLLOUTS.fullmatch(path.name)
        if match and int(match.group(1)) > step:
            path.unlink()


def _cut_metrics(path: Path, step: int, position: int) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if position == 0 or content[position - 1 : position] == b"\n":
        os.truncate(path, position)
    else:
        write_whole(path, b"".join(_rows_up_to(content, step)))


def _rows_up_to(content: bytes, step: int) -> list[bytes]:
    rows = []
    for line in content.splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step and line.endswith(b"\n"):
                rows.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill
    return rows
