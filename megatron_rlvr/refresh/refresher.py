"""Push the learner's weights into this rank's engine when they are due, and certify that all engines hold the same."""

from __future__ import annotations

import torch.distributed as dist

from megatron_rlvr.hf import WeightMap
from megatron_rlvr.ranges import phase_range
from megatron_rlvr.refresh.weights import ShardedModel, exported_weights
from megatron_rlvr.rollout.engine import Engine, RefreshError, RefreshReport


class Refresher:
    """Keeps the engine at most `interval` optimizer updates behind the learner.

    The engine itself certifies what arrives: every tensor of the checkpoint once, in its shape, finite; caches dropped;
    a newer version published once. The refresher adds that every rank's engine received the same bits.
    """

    def __init__(self, model: ShardedModel, engine: Engine, weight_map: WeightMap, interval: int) -> None:
        self.model, self.engine, self.weight_map, self.interval = model, engine, weight_map, interval

    @property
    def lag(self) -> int:
        """Optimizer updates that the engine is behind the learner."""
        return self.model.version - self.engine.version

    def push_if_due(self) -> dict[str, float]:
        """Metrics of the push, or {} when none was due."""
        return self.push() if self.lag >= self.interval else {}

    def push(self) -> dict[str, float]:
        """Stream all weights into the engine and publish the learner's version; a collective over all ranks.

        Raises RefreshError when a tensor is refused or the engines of two ranks received different bits.
        """
        with phase_range("refresh"):
            report = self.engine.update_weights(exported_weights(self.model, self.weight_map), self.model.version)
        _certify(report)
        return {
            "rollout/weight_version": float(report.version),
            "refresh/tensors": float(report.num_tensors),
            "refresh/bytes": float(report.num_bytes),
            "timing_s/refresh": report.seconds,
        }


def _certify(report: RefreshReport) -> None:
    """Raise RefreshError on the first rank whose certificate differs from rank 0's."""
    mine = (report.version, report.num_tensors, report.num_bytes, report.digest)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RefreshError(
                f"the engines of ranks 0 and {rank} received different weights (certificates {everyone[0]} and "
                f"{theirs}); restart the run from its last checkpoint."
            )
