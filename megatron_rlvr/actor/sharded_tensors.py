"""Parameters as pieces of whole tensors, in megatron-core's torch_dist format: written by one layout, read by any.

Only tensors are written, no pickled objects: what else a checkpoint needs is JSON beside them.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.models.gpt import GPTModel
from torch.nn import Parameter

from megatron_rlvr.actor.naming import named_parameters

Piece = Any  # ShardedTensor, or the factory of the gate and up halves of a gated linear layer


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter of this rank: `name` is its canonical name, `piece` its place in the whole tensor."""

    name: str
    parameter: Parameter
    piece: Piece

    @property
    def written_here(self) -> bool:
        """True on the one rank that writes this piece; its replicas write nothing."""
        return bool(is_main_replica(self.piece.replica_id))


def parameter_slots(chunks: Sequence[GPTModel]) -> list[Slot]:
    """Every parameter of `chunks` with its place.

    Raises RuntimeError for a parameter that megatron-core's sharded_state_dict leaves out.
    """
    pieces: dict[int, Piece] = {}
    for chunk in chunks:
        described = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        pieces |= {id(p.data): p for p in described.values() if isinstance(p, ShardedTensor | ShardedTensorFactory)}
    named = dict(named_parameters(list(chunks)))
    slots = []
    for name, parameter in named.items():
        if id(parameter) not in pieces:
            raise RuntimeError(f"megatron-core does not say where {name} belongs in a checkpoint")
        piece = pieces[id(parameter)]
        layer = name.removesuffix("pre_mlp_layernorm.weight")
        if layer != name and f"{layer}mlp.router.weight" in named:
            # Transformer Engine's spec keeps the norm before experts apart; the local one calls it part of linear_fc1.
            piece = dataclasses.replace(piece, key=name)
        slots.append(Slot(name, parameter, piece))
    return slots


def piece_of(slot: Slot, prefix: str, data: torch.Tensor) -> Piece:
    """`data`, shaped like the slot's parameter, as a piece of the tensor prefix + (the parameter's key)."""
    key = prefix + slot.piece.key
    if isinstance(slot.piece, ShardedTensorFactory):
        return dataclasses.replace(slot.piece, key=key, data=data)
    return dataclasses.replace(slot.piece, key=key, data=data, dtype=data.dtype)


def model_pieces(slots: Sequence[Slot]) -> dict[str, Piece]:
    """The weights under megatron-core's own keys."""
    return {slot.name: piece_of(slot, "", slot.parameter.detach()) for slot in slots}


def save_pieces(pieces: Mapping[str, Any], directory: Path) -> None:
    """Write all ranks' pieces into the empty `directory`; a collective."""
    dist_checkpointing.save(dict(pieces), str(directory))


class BackgroundSave:
    """Pieces being written by a process beside each rank, from a snapshot taken when this is made; a collective."""

    def __init__(self, pieces: Mapping[str, Any], directory: Path) -> None:
        options: dict[str, Any] = {"async_sharded_save": True}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:  # 0.19 has two
            options["async_strategy"] = "mcore"
        self._queue = AsyncCallsQueue()
        self._queue.schedule_async_request(dist_checkpointing.save(dict(pieces), str(directory), **options))

    def done(self, *, wait: bool) -> bool:
        """True once all ranks have written everything; a collective, also without `wait`."""
        self._queue.maybe_finalize_async_calls(blocking=wait)
        return bool(self._queue.get_num_unfinalized_calls() == 0)


def load_pieces(
    slots: Sequence[Slot],
    directory: Path,
    prefix: str,
    make: Callable[[Slot], torch.Tensor],
    take: Callable[[Slot, torch.Tensor], object],
) -> None:
    """Read the tensor prefix + (key) of every slot; a collective.

    make   an empty tensor of the slot's shape and of the stored dtype
    take   receives what was read; rows that pad the vocabulary and that the writing layout lacked are zero
    """
    wanted = {slot.name: piece_of(slot, prefix, make(slot)) for slot in slots}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # megatron-core calls what torch is about to replace
        found = dist_checkpointing.load(dict(wanted), str(directory))
    for slot in slots:
        take(slot, found[slot.name])


def load_model(slots: Sequence[Slot], directory: Path, prefix: str = "") -> None:
    """Fill the parameters from the weights in `directory`; a collective."""
    load_pieces(
        slots,
        directory,
        prefix,
        make=lambda slot: torch.empty_like(slot.parameter, device="cpu"),
        take=lambda slot, tensor: _fill(slot.parameter, tensor),
    )


@torch.no_grad()
def _fill(parameter: Parameter, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor)
