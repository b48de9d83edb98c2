"""The actor's weights in and out, one tensor at a time, never on disk in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from megatron_rlvr.hf import HFCheckpoint, WeightMap
from megatron_rlvr.types import Place


class ShardedModel(Protocol):
    """What a weight transfer needs of the actor."""

    version: int

    def load(self, source: Callable[[str, Place], torch.Tensor]) -> None: ...

    def weights(self) -> Iterator[tuple[str, list[torch.Tensor]]]: ...


def load_weights(model: ShardedModel, checkpoint: HFCheckpoint, weight_map: WeightMap) -> None:
    """Fill this rank's shards from a Hugging Face checkpoint, reading the slices that its place needs.

    Raises UserError when the checkpoint lacks a tensor, has one too many, or one of another shape.
    """
    checkpoint.check_complete(weight_map.spec)
    model.load(lambda name, place: weight_map.local_tensor(name, checkpoint.read, place))


def exported_weights(model: ShardedModel, weight_map: WeightMap) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) of every weight, in model order; a collective that all ranks must exhaust."""
    for name, shards in model.weights():
        yield from weight_map.merge(name, shards)
