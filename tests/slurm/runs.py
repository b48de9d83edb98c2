"""A tiny model, problems, and cluster profiles for jobs in tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from launch.cluster import ClusterProfile, load_profile
from tests.e2e.commands import REPOSITORY, run_python

UPDATES = 6
NODES = 5
LOST, PREEMPTED = "node4", "node5"  # of the runs that lose a node and that are preempted, and of no others


def make_inputs(root: Path) -> None:
    """A model of two layers and a few sums in `root`."""
    run_python(REPOSITORY / "tools/make_tiny_model.py", root / "model", "--layers", "2", "--hidden", "32")
    problems = [{"problem": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (root / "data.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))


def write_run(root: Path, name: str, **sections: dict[str, Any]) -> Path:
    """The YAML of a run on two ranks, tensor parallel: its weights are on both nodes."""
    config: dict[str, Any] = {
        "name": name,
        "run_dir": str(root / name),
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "data.jsonl"), "max_prompt_length": 24},
        "rollout": {"engine": "transformers", "precision": "float32", "group_size": 4, "max_response_length": 16},
        "rewards": {"overlong_start": 4},  # an untrained model is never right, but some of its answers are short
        "actor": {"dtype": "float32", "micro_batch_tokens": 1024, "tensor_parallel": 2},
        "optimizer": {"lr": 3e-3, "warmup_fraction": 0.0},
        "trainer": {"updates": UPDATES, "mini_batch_size": 4},
        "checkpoint": {"interval": 2, "keep": 9},
        "logging": {"progress": False},
    }
    for section, values in sections.items():
        config[section] = config[section] | values if section in config else values
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def write_profile(root: Path, **values: Any) -> Path:
    """A profile of the mini cluster, with this Python."""
    profile: dict[str, Any] = {
        "name": "mini",
        "partition": "train",
        "exclusive": False,
        "time": "00:10:00",
        "signal_seconds": 60,
        "runtime": {"kind": "venv", "path": str(Path(sys.executable).parents[1])},
        "network_interface": "eth0",
        "sbatch": [f"--exclude={LOST},{PREEMPTED}"],
    }
    path = root / f"profile{len(list(root.glob('profile*.yaml')))}.yaml"
    path.write_text(yaml.safe_dump(profile | values))
    return path


def make_profile(root: Path, **values: Any) -> ClusterProfile:
    return load_profile(write_profile(root, **values))
