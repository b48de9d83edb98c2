"""Checkpoint directories without tensors, for tests of what reads manifests alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rlvr.checkpoint.finding import step_directory
from megatron_rlvr.checkpoint.manifest import (
    TENSORS,
    Manifest,
    StoredTensor,
    describe_files,
    package_versions,
    write_manifest,
)
from megatron_rlvr.config.tree import RunConfig


def run_config(run_dir: Path, **sections: Any) -> RunConfig:
    """A config that names files which need not exist."""
    base = {"run_dir": str(run_dir), "model": {"path": "/model"}, "data": {"train": "/train.jsonl"}}
    return RunConfig.model_validate({**base, **sections})


def make_checkpoint(folder: Path, step: int, config: RunConfig, kind: Any = "training") -> Path:
    path = step_directory(folder, step)
    (path / TENSORS).mkdir(parents=True)
    (path / TENSORS / "__0_0.distcp").write_bytes(b"weights" * step)
    manifest = Manifest(
        kind=kind,
        step=step,
        layout={"tensor_parallel": 2},
        versions=package_versions(),
        files=describe_files(path),
        tensors={"decoder.weight": StoredTensor((4, 8), "bfloat16", 64, 2)},
        details={"config": config.model_dump(mode="json"), "run": {"metrics_position": 0}},
    )
    write_manifest(path, manifest)
    return path
