"""Everything that the learner needs to go on: weights, optimizer, learning-rate schedule, reference policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rlvr.actor.optimizer_state import OptimizerState
from megatron_rlvr.actor.reference import ReferencePolicy
from megatron_rlvr.actor.sharded_tensors import (
    Piece,
    Slot,
    load_model,
    load_pieces,
    model_pieces,
    parameter_slots,
    piece_of,
)

if TYPE_CHECKING:
    from megatron_rlvr.actor.actor import Actor

_REFERENCE = "reference."


def actor_state(actor: Actor) -> tuple[dict[str, Piece], dict[str, Any]]:
    """(tensors as pieces to write, plain JSON values); a collective."""
    slots = parameter_slots(actor.chunks)
    optimizer = OptimizerState(actor.optimizer, slots)
    numbers = {
        "version": actor.version,
        "scheduler_steps": actor.scheduler.num_steps,
        "optimizer_steps": optimizer.steps,
        "reference_version": actor.reference_version,
    }
    pieces = model_pieces(slots) | optimizer.pieces()
    return pieces | _reference_pieces(actor.reference, slots), numbers


def load_actor_state(actor: Actor, directory: Path, numbers: Mapping[str, Any]) -> None:
    """Put the actor where `actor_state` found it, in this run's layout and schedule; a collective."""
    slots = parameter_slots(actor.chunks)
    load_model(slots, directory)
    optimizer = OptimizerState(actor.optimizer, slots)
    optimizer.load(directory)
    optimizer.steps = numbers["optimizer_steps"]
    actor.scheduler.num_steps = 0
    actor.scheduler.step(numbers["scheduler_steps"])  # sets the learning rate of this run's schedule
    actor.version = numbers["version"]
    if numbers["reference_version"] >= 0:
        actor.refresh_reference()
        assert actor.reference is not None
        _load_reference(actor.reference, slots, directory, numbers["reference_version"])


def needed_keys(actor: Actor) -> list[str]:
    """Names of the tensors that this rank's weights are pieces of."""
    return [slot.piece.key for slot in parameter_slots(actor.chunks)]


def _reference_pieces(reference: ReferencePolicy | None, slots: Sequence[Slot]) -> dict[str, Piece]:
    if reference is None:
        return {}
    return {_REFERENCE + slot.name: piece_of(slot, _REFERENCE, reference.frozen(slot.parameter)) for slot in slots}


def _load_reference(reference: ReferencePolicy, slots: Sequence[Slot], directory: Path, version: int) -> None:
    load_pieces(
        slots,
        directory,
        _REFERENCE,
        make=lambda slot: reference.frozen(slot.parameter),
        take=lambda slot, tensor: reference.frozen(slot.parameter).copy_(tensor),
    )
    reference.version = version
