"""The model as a Hugging Face directory, written by all ranks at once, whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from megatron_rlvr.hf import ExportPlan, PartWriter, WeightMap
from megatron_rlvr.hf.staging import check_target, staged_directory
from megatron_rlvr.types import Place, UserError

Result = TypeVar("Result")


class OwnedShards(Protocol):
    """What an export needs of the actor."""

    place: Place

    def owned_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def export_checkpoint(
    model: OwnedShards,
    weight_map: WeightMap,
    plan: ExportPlan,
    target: Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> int:
    """Write `target` from the shards of all ranks, each writing what it owns; a collective. Returns this rank's bytes.

    overwrite   replace an existing target; otherwise it is refused
    progress    told the bytes of every tensor that this rank wrote

    Raises UserError, on all ranks, for a target that cannot be written; nothing is left behind then.
    """
    with contextlib.ExitStack() as stack:
        partial = on_first_rank(lambda: _open(stack, plan, target, overwrite))
        written = together(lambda: _write(model, weight_map, plan, partial, progress), target)
        if sum(written) != plan.tensor_bytes:
            raise RuntimeError(f"the ranks wrote {sum(written)} bytes of tensors, not {plan.tensor_bytes}")
    dist.barrier()
    return written[dist.get_rank()]


def on_first_rank(action: Callable[[], Result]) -> Result:
    """What `action` returned on rank 0, on every rank; its UserError too. A collective."""
    outcome: list[tuple[Result | None, str | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            outcome = [(action(), None)]
        except UserError as error:
            outcome = [(None, str(error))]
    dist.broadcast_object_list(outcome)
    result, refusal = outcome[0]
    if refusal is not None:
        raise UserError(refusal)
    return result  # type: ignore[return-value]


def together(action: Callable[[], Result], target: Path) -> list[Result]:
    """What `action` returned on every rank, in rank order; a collective.

    Raises UserError on all ranks where it failed on one for want of room or of the directory.
    """
    outcome: tuple[Result | None, str | None] = (None, None)
    try:
        outcome = (action(), None)
    except UserError as error:
        outcome = (None, str(error))
    except OSError as error:
        outcome = (
            None,
            f"{target} cannot be written ({error.strerror or error}); make room or choose another directory.",
        )
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, outcome)
    for _, refusal in everyone:
        if refusal is not None:
            raise UserError(refusal)
    return [result for result, _ in everyone]


def _open(stack: contextlib.ExitStack, plan: ExportPlan, target: Path, overwrite: bool) -> Path:
    check_target(target, plan.skeleton.path, plan.tensor_bytes, overwrite)
    partial = stack.enter_context(staged_directory(target))
    try:
        plan.create(partial)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); make room or choose another.") from error
    return partial


def _write(
    model: OwnedShards,
    weight_map: WeightMap,
    plan: ExportPlan,
    partial: Path,
    progress: Callable[[int], object] | None,
) -> int:
    if not partial.is_dir():
        raise UserError(
            f"rank {dist.get_rank()} does not see {partial.parent}; write to a file system that all ranks share."
        )
    with PartWriter(plan, partial, tied=weight_map.spec.tie_word_embeddings) as writer:
        for name, tensor in model.owned_weights():
            for source, slices, values in weight_map.local_parts(name, tensor, model.place):
                count = writer.write(source, slices, values)
                if progress is not None:
                    progress(count)
    return writer.bytes_written
