"""Run directories as groups of seeds: runs whose configs differ only in seed, name and place are one line of a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rlvr.config.load import read_tree
from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.observability.series import Row, read_metrics

_INCIDENTAL = ("name", "seed", "run_dir", "logging", "launch", "checkpoint", "profile")
# What people compare first; a label takes only as many keys as tell the groups apart.
_TELLING = ("loss.name", "trainer.rollout_reuse", "rollout.refresh_interval", "model.path")


@dataclass(frozen=True)
class LoggedRun:
    """One run directory. `batch`: updates that share a rollout batch (trainer.rollout_reuse)."""

    path: Path
    rows: Sequence[Row]
    config: Mapping[str, Any] | None

    @property
    def batch(self) -> int:
        return int((self.config or {}).get("trainer.rollout_reuse") or 1)

    @property
    def name(self) -> str:
        return self.path.absolute().name


@dataclass
class RunGroup:
    """Runs that differ in their seeds alone, under one label."""

    label: str
    runs: list[LoggedRun] = field(default_factory=list)


def read_run(path: Path) -> LoggedRun:
    """Metrics and config of a run directory. Raises UserError where it holds no readable metrics.jsonl."""
    config = RunFiles(path).config
    return LoggedRun(path, read_metrics(path), _flatten(read_tree(config)) if config.is_file() else None)


def group_runs(runs: Sequence[LoggedRun]) -> list[RunGroup]:
    """The runs by config, in the order of their first; a run without a config is a group of its own."""
    groups: dict[str, list[LoggedRun]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    labels = _labels([members[0] for members in groups.values()])
    return [RunGroup(label, members) for label, members in zip(labels, groups.values(), strict=True)]


def _identity(run: LoggedRun) -> str:
    if run.config is None:
        return str(run.path)
    return json.dumps(_essential(run.config), sort_keys=True)


def _essential(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key.partition(".")[0] not in _INCIDENTAL}


def _labels(runs: Sequence[LoggedRun]) -> list[str]:
    """What tells the groups apart: values of the fewest keys that do, else the folders' names, else their paths."""
    configs = [_essential(run.config) if run.config is not None else None for run in runs]
    if len(runs) > 1 and all(config is not None for config in configs):
        labels = _by_keys([config for config in configs if config is not None])
        if labels is not None:
            return labels
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _by_keys(configs: Sequence[Mapping[str, Any]]) -> list[str] | None:
    keys = sorted({key for config in configs for key in config}, key=lambda key: (_rank(key), key))
    differing = [key for key in keys if len({json.dumps(config.get(key)) for config in configs}) > 1]
    labels = ["" for _ in configs]
    for key in differing[:4]:
        more = [
            f"{label} {_value(key, config.get(key))}".strip() for label, config in zip(labels, configs, strict=True)
        ]
        if len(set(more)) > len(set(labels)):
            labels = more
        if len(set(labels)) == len(configs):
            return labels
    return None


def _rank(key: str) -> int:
    return _TELLING.index(key) if key in _TELLING else len(_TELLING)


def _value(key: str, value: Any) -> str:
    if key == "loss.name":
        return str(value)
    return f"{key.rpartition('.')[2]}={Path(value).name if isinstance(value, str) and '/' in value else value}"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
