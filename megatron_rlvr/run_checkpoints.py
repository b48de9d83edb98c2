"""Where a run starts, and its checkpoints: the rooms' states taken and put back together."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rlvr.actor import parallel
from megatron_rlvr.actor.actor import Actor
from megatron_rlvr.checkpoint.continuing import cut_files, metrics_position
from megatron_rlvr.checkpoint.finding import continues_in_place, find_checkpoint
from megatron_rlvr.checkpoint.manifest import read_manifest
from megatron_rlvr.checkpoint.training import Checkpoints
from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.controller import Controller
from megatron_rlvr.refresh import Refresher


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run goes on from, and the updates it has done; None for both at the beginning."""

    checkpoint: Path | None = None
    step: int | None = None


def find_start(config: RunConfig) -> Start:
    """What `checkpoint.resume` says, the same on all ranks; in place, later rows of the run's files are cut off."""
    if config.checkpoint.resume == "never":
        return Start()
    parallel.join()
    found: list[Start] = [Start()]
    if dist.get_rank() == 0:
        path = find_checkpoint(config, tell=lambda sentence: print(sentence, file=sys.stderr))
        if path is not None:
            manifest = read_manifest(path)
            found = [Start(path, manifest.step)]
            if continues_in_place(config, path):
                cut_files(RunFiles(config.run_dir), manifest.step, manifest.details["run"]["metrics_position"])
            print(f"going on from {path} after update {manifest.step}", file=sys.stderr)
    dist.broadcast_object_list(found, src=0)
    return found[0]


class RunCheckpoints:
    """Checkpoints of learner, controller and reports. Every method is a collective over all ranks."""

    def __init__(self, config: RunConfig, actor: Actor, controller: Controller, refresher: Refresher) -> None:
        self.config, self.files = config, RunFiles(config.run_dir)
        self.controller, self.refresher = controller, refresher
        self._checkpoints = Checkpoints(config, actor)

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Go on from `checkpoint`: also the engine gets the learner's weights. Returns the `results` of `save`."""
        state = self._checkpoints.restore(checkpoint)
        self.controller.load_state_dict(state["controller"], checkpoint)
        if self.refresher.lag:
            self.refresher.push()
        self._checkpoints.restore_generators(checkpoint)  # last, for nothing may draw after that
        results: dict[str, Any] = state["results"]
        return results

    def save(self, results: Mapping[str, Any]) -> None:
        """A checkpoint between two rollout batches, unless the newest one is of this update already."""
        if self._checkpoints.has_present():
            return
        state = {
            "controller": self.controller.state_dict(),
            "metrics_position": metrics_position(self.files),
            "results": dict(results),
        }
        self._checkpoints.save(state, self.controller.save)

    def save_if_due(self, results: Mapping[str, Any]) -> None:
        """A checkpoint where checkpoint.interval asks for one.

        Where the engine is behind the learner it waits for the next batch that ends with a refresh, for the run could
        not go on with the engine's older weights: they are not in the checkpoint.
        """
        self._checkpoints.settle(wait=False)
        if self._checkpoints.due() and self.refresher.lag == 0:
            self.save(results)

    def settle(self) -> None:
        """Wait until every checkpoint has its name."""
        self._checkpoints.settle(wait=True)
