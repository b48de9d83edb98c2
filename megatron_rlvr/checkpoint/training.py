"""Checkpoints of a run: written at the end of a rollout batch, whole or not at all; restored in any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rlvr.actor.actor import Actor
from megatron_rlvr.actor.sharded_tensors import BackgroundSave, save_pieces
from megatron_rlvr.actor.state import actor_state, load_actor_state, needed_keys
from megatron_rlvr.checkpoint.finding import LATEST, finished_checkpoints, step_directory
from megatron_rlvr.checkpoint.generators import load_generators, save_generators
from megatron_rlvr.checkpoint.manifest import TENSORS, read_manifest
from megatron_rlvr.checkpoint.model_weights import check_tensors, layout_of
from megatron_rlvr.checkpoint.writing import open_partial, publish, remove, sweep
from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.files import write_whole


@dataclass(frozen=True)
class _Unpublished:
    """A checkpoint whose tensors are still being written."""

    writing: BackgroundSave
    partial: Path
    step: int
    details: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. Its methods with side effects are collectives over all ranks."""

    def __init__(self, config: RunConfig, actor: Actor) -> None:
        self.config, self.actor = config, actor
        self.folder = RunFiles(config.run_dir).checkpoints
        self.last_step: int | None = None  # of the newest checkpoint that this run has written or gone on from
        self._unpublished: _Unpublished | None = None

    def due(self) -> bool:
        """True where the actor has passed a multiple of checkpoint.interval since the last checkpoint."""
        interval = self.config.checkpoint.interval
        return interval is not None and self.actor.version // interval > (self.last_step or 0) // interval

    def has_present(self) -> bool:
        """True where the newest checkpoint is of the actor's present version."""
        return self.last_step == self.actor.version

    def save(self, state: Mapping[str, Any], write_files: Callable[[Path], None]) -> Path:
        """Write a checkpoint of the actor, of `state` (JSON) and of what `write_files` puts into the directory.

        With checkpoint.asynchronous the tensors are written while training goes on, and the checkpoint gets its name
        in a later call of `settle`, or when the next one is written.
        """
        self.settle(wait=True)
        step = self.actor.version
        target = step_directory(self.folder, step)
        if dist.get_rank() == 0:
            sweep(self.folder)
        partial = open_partial(target)
        pieces, numbers = actor_state(self.actor)
        save_generators(partial)
        write_files(partial)
        details = {"config": self.config.model_dump(mode="json"), "actor": numbers, "run": dict(state)}
        self.last_step = step
        if self.config.checkpoint.asynchronous:
            writing = BackgroundSave(pieces, partial / TENSORS)
            self._unpublished = _Unpublished(writing, partial, step, details)
        else:
            save_pieces(pieces, partial / TENSORS)
            self._publish(partial, step, details)
        return target

    def settle(self, *, wait: bool) -> None:
        """Publish a checkpoint that was written in the background, where that is done; `wait` for it."""
        pending = self._unpublished
        if pending is not None and pending.writing.done(wait=wait):
            self._unpublished = None
            self._publish(pending.partial, pending.step, pending.details)

    def restore(self, directory: Path) -> dict[str, Any]:
        """Put the actor where `save` found it; returns `state`. `restore_generators` comes when all else is done.

        Raises UserError where the checkpoint lacks a tensor of this model.
        """
        manifest = read_manifest(directory)
        check_tensors(directory, manifest, needed_keys(self.actor))
        load_actor_state(self.actor, directory / TENSORS, manifest.details["actor"])
        self.last_step = manifest.step
        state: dict[str, Any] = manifest.details["run"]
        return state

    def restore_generators(self, directory: Path) -> None:
        """Put the random generators back, where the layout is the same; in another they stay as the seed made them."""
        if read_manifest(directory).layout == layout_of(self.config.actor):
            load_generators(directory)

    def _publish(self, partial: Path, step: int, details: dict[str, Any]) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            target = step_directory(self.folder, step)
            publish(partial, target, "training", step, layout_of(self.config.actor), details)
            write_whole(self.folder / LATEST, f"{target.name}\n".encode())
            for old in finished_checkpoints(self.folder)[self.config.checkpoint.keep :]:
                remove(old)
        dist.barrier()
