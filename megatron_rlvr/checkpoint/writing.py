"""A directory that all ranks write together and that appears whole or not at all."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rlvr.checkpoint.manifest import (
    TENSORS,
    Kind,
    Manifest,
    StoredTensor,
    describe_files,
    package_versions,
    write_manifest,
)
from megatron_rlvr.files import locked


def open_partial(target: Path) -> Path:
    """An empty directory beside `target` on all ranks, with a folder for tensors; a collective.

    Raises UserError, on rank 0, where another process is writing `target`.
    """
    partial = target.parent / f".{target.name}.partial"
    if dist.get_rank() == 0:
        if partial.exists():
            with locked(partial, target):
                remove(partial)
        (partial / TENSORS).mkdir(parents=True)
    dist.barrier()
    return partial


def publish(
    partial: Path, target: Path, kind: Kind, step: int, layout: Mapping[str, Any], details: Mapping[str, Any]
) -> None:
    """Describe what all ranks wrote into `partial`, sync it and give it its name; on rank 0, after a barrier.

    What `target` held before is replaced.
    """
    manifest = Manifest(
        kind=kind,
        step=step,
        layout=dict(layout),
        versions=package_versions(),
        files=describe_files(partial),
        tensors=stored_tensors(partial / TENSORS),
        details=dict(details),
    )
    write_manifest(partial, manifest)
    for path in (*partial.rglob("*"), partial):
        _sync(path)
    if target.exists():
        remove(target)
    partial.rename(target)
    _sync(target.parent)


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """What torch's index of a directory that this process has just written says of each tensor."""
    index = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {
        name: StoredTensor(
            shape=tuple(entry.size),
            dtype=str(entry.properties.dtype).removeprefix("torch."),
            bytes=math.prod(entry.size) * entry.properties.dtype.itemsize,
            pieces=len(entry.chunks),
        )
        for name, entry in sorted(index.items())
        if isinstance(entry, TensorStorageMetadata)
    }


def remove(path: Path) -> None:
    """Remove a directory; a kill on the way leaves none that looks finished."""
    if path.exists():
        doomed = path.with_name(f".{path.name.strip('.')}.removed-{os.getpid()}")
        path.rename(doomed)
        shutil.rmtree(doomed)


def sweep(folder: Path) -> None:
    """Remove what kills have left in a folder of checkpoints: halves that were never published, or never removed."""
    for pattern in (".step_*.partial", ".step_*.removed-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
