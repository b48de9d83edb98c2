"""Whole tensors out of a sharded model: every rank asks for the same names and every rank receives all shards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.nn import Parameter

from megatron_rlvr.actor import platform

# Linear layers and embeddings are split over the tensor group; norms and routers are replicated, and so are the biases
# of row-parallel layers, which are added to the reduced output.
_SPLIT = re.compile(r"(linear_qkv|linear_fc1|word_embeddings|output_layer)\.|(linear_proj|linear_fc2)\.weight")


@dataclass(frozen=True)
class _Shard:
    """One piece of a parameter and the lowest global rank that holds it."""

    owner: int
    shape: tuple[int, ...]


class ShardPlan:
    """Who holds which piece of which parameter, agreed once by all ranks.

    A tied output layer on the last pipeline stage is a copy of the embedding and is left out.
    """

    def __init__(self, parameters: dict[str, Parameter]) -> None:
        self._local = parameters
        mine = {
            (name, self.index(name)): tuple(p.shape)
            for name, p in parameters.items()
            if not (name == "output_layer.weight" and getattr(p, "shared_embedding", False))
        }
        everyone: list[dict] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        self._plan: dict[str, dict[int, _Shard]] = {}
        for rank, held in enumerate(everyone):
            for (name, index), shape in held.items():
                self._plan.setdefault(name, {}).setdefault(index, _Shard(rank, shape))
        self.names = sorted(self._plan, key=_model_order)

    @staticmethod
    def index(name: str) -> int:
        """Which piece of the tensor this rank holds; 0 for replicated ones (norms, routers)."""
        if not _SPLIT.search(name):
            return 0
        if ".experts." in name:
            return parallel_state.get_expert_tensor_parallel_rank()
        return parallel_state.get_tensor_model_parallel_rank()

    def gather(
        self, value: Callable[[Parameter], torch.Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """(name, shards in tensor-rank order) for every parameter of the model; a collective on all ranks.

        `value` picks what is gathered (weight, main_grad); one parameter is in flight at a time.
        """
        for name in self.names:
            shards = self._plan[name]
            yield name, [self._broadcast(name, shards[index], value, dtype) for index in sorted(shards)]

    def owned(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, this rank's piece) of every piece whose owner this rank is: over all ranks, each piece once."""
        for name in self.names:
            held = self._plan[name].get(self.index(name))
            if name in self._local and held is not None and held.owner == dist.get_rank():
                yield name, self._local[name].data

    def _broadcast(
        self, name: str, shard: _Shard, value: Callable[[Parameter], torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        if dist.get_rank() == shard.owner:
            tensor = value(self._local[name]).detach().to(dtype).contiguous()
        else:
            tensor = torch.empty(shard.shape, dtype=dtype, device=platform.device())
        if dist.get_world_size() > 1:
            dist.broadcast(tensor, src=shard.owner)
        return tensor


def _model_order(name: str) -> tuple:
    """Embedding, layers by number, experts by number, final norm, head."""
    stage = 0 if name.startswith("embedding") else 2 if not name.startswith("decoder.layers") else 1
    return stage, *(int(part) if part.isdigit() else part for part in name.split("."))
