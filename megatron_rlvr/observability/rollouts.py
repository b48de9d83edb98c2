"""Rollout batches as JSONL, one response a line, each file whole or absent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_rlvr.files import write_whole
from megatron_rlvr.observability.metrics import plain, plain_metrics
from megatron_rlvr.types import Group, Trajectory


def rollout_record(step: int, group: Group, trajectory: Trajectory) -> dict[str, Any]:
    """What a person wants to see of one response; lengths in tokens, versions of its sampled tokens."""
    sampled = trajectory.versions[trajectory.action_mask]
    return {
        "step": step,
        "prompt_id": group.prompt.id,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "response": trajectory.text,
        "replayed": group.prompt.replayed,
        "prefix_length": len(group.prompt.prefix),
        "score": plain(trajectory.score),
        "reward": plain(trajectory.reward),
        "advantage": plain(trajectory.advantage),
        "reward_parts": plain_metrics(trajectory.reward_parts),
        "response_length": trajectory.response_length,
        "version_min": int(sampled.min()) if len(sampled) else None,
        "version_max": int(sampled.max()) if len(sampled) else None,
        "finish_reason": trajectory.finish_reason,
    }


def write_rollouts(directory: Path, step: int, groups: Iterable[Group]) -> Path:
    """Write directory/step_<step>.jsonl and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"step_{step:06d}.jsonl"
    write_whole(target, "".join(_lines(step, groups)).encode())
    return target


def _lines(step: int, groups: Iterable[Group]) -> Iterator[str]:
    for group in groups:
        for trajectory in group.trajectories:
            yield json.dumps(rollout_record(step, group, trajectory), ensure_ascii=False, allow_nan=False) + "\n"
