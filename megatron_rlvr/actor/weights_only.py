"""A model without optimizer, gradients or schedule: weights in, weights out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatron_rlvr.actor import parallel
from megatron_rlvr.actor.loading import TensorSource, fill
from megatron_rlvr.actor.model import build_chunks
from megatron_rlvr.actor.naming import named_parameters
from megatron_rlvr.actor.shards import ShardPlan
from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.types import ModelSpec


class WeightsOnly:
    """This rank's model chunks in the layout of `config`; takes what it holds in memory and nothing more."""

    def __init__(self, spec: ModelSpec, config: ActorConfig) -> None:
        parallel.initialize(config, seed=0)
        self.version = 0
        _, self.chunks = build_chunks(spec, config)
        self.place = parallel.place()
        self._parameters = dict(named_parameters(self.chunks))
        self._plan = ShardPlan(self._parameters)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's parameters."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    def load(
        self, source: TensorSource, broadcast: bool = False, progress: Callable[[int], object] | None = None
    ) -> None:
        """Fill the parameters; see `loading.fill`."""
        fill(self._parameters, self.place, source, broadcast, progress)

    def owned_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(canonical name, this rank's slice) of the parameters that this rank writes for all."""
        return self._plan.owned()

    def close(self, keep_process_group: bool = False) -> None:
        """Leave the parallel groups, and the default group too unless another model is to be built in it."""
        parallel.shutdown(keep_process_group)
