"""The actor's weights in and out, one tensor at a time, never on disk in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from megatron_rlvr.hf import HFCheckpoint, WeightMap
from megatron_rlvr.types import Place


class LoadableModel(Protocol):
    """What loading needs of the actor."""

    def load(
        self,
        source: Callable[[str, Place], torch.Tensor],
        broadcast: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> None: ...


class ShardedModel(Protocol):
    """What a weight transfer needs of the actor."""

    version: int

    def weights(self) -> Iterator[tuple[str, list[torch.Tensor]]]: ...


def load_weights(
    model: LoadableModel,
    checkpoint: HFCheckpoint,
    weight_map: WeightMap,
    *,
    broadcast: bool = False,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Fill this rank's shards from a Hugging Face checkpoint, reading the slices that its place needs.

    broadcast   one data-parallel replica reads and sends to the others
    progress    told the bytes of every parameter that was filled

    Raises UserError when the checkpoint lacks a tensor, has one too many, or one of another shape.
    """
    checkpoint.check_complete(weight_map.spec)
    model.load(lambda name, place: weight_map.local_tensor(name, checkpoint.read, place), broadcast, progress)


def exported_weights(model: ShardedModel, weight_map: WeightMap) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) of every weight, in model order; a collective that all ranks must exhaust."""
    for name, shards in model.weights():
        yield from weight_map.merge(name, shards)
