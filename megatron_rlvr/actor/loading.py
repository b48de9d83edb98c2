"""Parameters filled one at a time, by every rank for itself or by one replica for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.nn import Parameter

from megatron_rlvr.types import Place

# canonical name, this rank's place -> this rank's slice of the tensor
TensorSource = Callable[[str, Place], torch.Tensor]


@torch.no_grad()
def fill(
    parameters: Mapping[str, Parameter],
    place: Place,
    source: TensorSource,
    broadcast: bool = False,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Copy this rank's slice of every parameter from `source`; one tensor is in flight at a time.

    broadcast   ask `source` only on the first of the ranks that hold the same slice, which sends it to the others
    progress    told the bytes of every parameter that was filled
    """
    for name, parameter in parameters.items():
        replicas = _replicas(name)
        reads = not broadcast or dist.get_rank(replicas) == 0
        if reads:
            tensor = source(name, place)
            if tensor.shape != parameter.shape:
                raise RuntimeError(f"{name}: the source gave {list(tensor.shape)}, not {list(parameter.shape)}")
            parameter.copy_(tensor)
            del tensor
        if broadcast and dist.get_world_size(replicas) > 1:
            dist.broadcast(parameter.data, src=dist.get_global_rank(replicas, 0), group=replicas)
        if progress is not None:
            progress(parameter.nbytes)


def _replicas(name: str) -> dist.ProcessGroup:
    """The ranks that hold the same slice of a parameter."""
    if ".experts." in name:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
