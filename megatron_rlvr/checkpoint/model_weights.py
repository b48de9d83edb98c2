"""Model weights alone in megatron-core's distributed format: written in one layout, read in any other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rlvr.actor.sharded_tensors import load_model, model_pieces, parameter_slots, save_pieces
from megatron_rlvr.checkpoint.manifest import TENSORS, Manifest, check_files, read_manifest
from megatron_rlvr.checkpoint.writing import open_partial, publish
from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.files import locked
from megatron_rlvr.types import UserError

_NOT_WEIGHTS = ("optimizer.", "reference.")  # how the other tensors of a training checkpoint begin


def save_model_weights(
    target: Path,
    chunks: Sequence[Any],
    layout: ActorConfig,
    *,
    step: int = 0,
    details: Mapping[str, Any] | None = None,
    beside: Callable[[Path], object] | None = None,
    overwrite: bool = False,
) -> None:
    """Write the weights of this rank's model `chunks` (`Actor.chunks`, or what `build_chunks` makes); a collective.

    Whole or not at all: written beside `target`, synced and renamed.

    step       optimizer updates behind the weights
    details    JSON values that `load_model_weights` gives back, such as where the weights came from
    beside     writes files of its own into the directory before it gets its name; called on rank 0
    overwrite  replace an existing target; otherwise it is refused with a UserError
    """
    if target.exists() and not overwrite:
        raise UserError(f"{target} already exists; choose another directory or ask to overwrite it.")
    partial = open_partial(target)
    with locked(partial, target) if dist.get_rank() == 0 else contextlib.nullcontext():
        save_pieces(model_pieces(parameter_slots(chunks)), partial / TENSORS)
        dist.barrier()
        if dist.get_rank() == 0:
            if beside is not None:
                beside(partial)
            publish(partial, target, "model", step, layout_of(layout), details or {})
    dist.barrier()


def load_model_weights(directory: Path, chunks: Sequence[Any]) -> Manifest:
    """Fill this rank's model `chunks` from a checkpoint of weights or of a whole run; a collective.

    Call it before an optimizer is built on them (it copies). Returns the manifest.

    Raises UserError for a directory that is no finished checkpoint, a damaged file, or another model's tensors.
    """
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    slots = parameter_slots(chunks)
    keys = [slot.piece.key for slot in slots]
    check_tensors(directory, manifest, keys)
    _check_all_wanted(directory, manifest, keys)
    load_model(slots, directory / TENSORS)
    return manifest


def check_tensors(directory: Path, manifest: Manifest, keys: Sequence[str]) -> None:
    """Raise UserError naming the first tensor that the model needs and the checkpoint lacks."""
    missing = [key for key in keys if key not in manifest.tensors]
    if missing:
        raise UserError(
            f"checkpoint {directory} has no tensor {missing[0]} ({len(missing)} of {len(set(keys))} are missing); it "
            "belongs to another model"
        )


def _check_all_wanted(directory: Path, manifest: Manifest, keys: Sequence[str]) -> None:
    """Raise UserError naming the first weight that no rank's model has a place for; a collective."""
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, list(keys))
    weights = {name for name in manifest.tensors if not name.startswith(_NOT_WEIGHTS)}
    unwanted = sorted(weights.difference(*everyone))
    if unwanted:
        raise UserError(
            f"checkpoint {directory} has {unwanted[0]} ({len(unwanted)} such tensors), which the model lacks; it "
            "belongs to another model"
        )


def layout_of(config: ActorConfig) -> dict[str, Any]:
    """The fields of the actor section that decide who holds which piece."""
    names = (
        "tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "expert_parallel",
        "data_parallel", "distributed_optimizer", "dtype",
    )  # fmt: skip
    return {**{name: getattr(config, name) for name in names}, "expert_tensor_parallel": config.expert_tensor}
