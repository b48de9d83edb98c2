"""How many parameters a rank holds in any layout, from config.json alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import prod

from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.hf import WeightMap, pipeline_stages
from megatron_rlvr.hf.stages import Stage
from megatron_rlvr.types import ModelSpec, Place


@dataclass(frozen=True)
class Count:
    """Parameters, those of the routed experts apart: other ranks share their optimizer states."""

    dense: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: Count) -> Count:
        return Count(self.dense + other.dense, self.expert + other.expert)

    def __mul__(self, times: int) -> Count:
        return Count(self.dense * times, self.expert * times)


class Counts:
    """Parameters per rank of the model `spec`. Layers of one kind are counted once, and remembered per place."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._known: dict[tuple[Place, str], Count] = {}

    def stage(self, actor: ActorConfig, pipeline_rank: int) -> Count:
        """What each rank of this pipeline stage holds (all its model chunks, a tied head's copy included)."""
        place = _place(actor)
        chunks = pipeline_stages(self.spec.num_layers, actor.pipeline_parallel, actor.virtual_pipeline)[pipeline_rank]
        total = Count()
        for chunk in chunks:
            total += self._ends(place, chunk.first, chunk.last)
            routed = sum(self._routed(layer) for layer in chunk.layers)
            total += self._layer(place, True) * routed + self._layer(place, False) * (len(chunk.layers) - routed)
        return total

    def whole(self) -> Count:
        """The model on one rank; a tied head counts once."""
        return self.stage(ActorConfig(), 0)

    def active(self) -> int:
        """Parameters that one token is multiplied with in the layers: of the experts only those of its top k."""
        share = self.spec.num_experts_per_tok / self.spec.num_experts if self.spec.num_experts else 0
        return round(self.active_dense() + self.whole().expert * share)

    def active_dense(self) -> int:
        """Parameters of the layers outside the experts: every token is multiplied with them."""
        return self.whole().dense - self._ends(Place(), True, True).dense

    def _routed(self, layer: int) -> bool:
        return bool(self.spec.moe_layers) and self.spec.moe_layers[layer]

    def _layer(self, place: Place, routed: bool) -> Count:
        return self._counted(place, "routed" if routed else "plain")

    def _ends(self, place: Place, first: bool, last: bool) -> Count:
        return self._counted(place, f"ends {first:d}{last:d}")

    def _counted(self, place: Place, part: str) -> Count:
        if (place, part) not in self._known:
            self._known[place, part] = self._count(place, part)
        return self._known[place, part]

    def _count(self, place: Place, part: str) -> Count:
        if part.startswith("ends"):
            stage = Stage(range(0), part[-2] == "1", part[-1] == "1")
        else:
            stage = Stage(range(1), False, False)
        one_layer = dataclasses.replace(
            self.spec,
            num_layers=1,
            moe_layers=(part == "routed",) if self.spec.moe_layers else (),
        )
        weights = WeightMap(one_layer, vocab_multiple=place.tensor_size)
        dense = expert = 0
        for name in weights.stage_names(place, stage):
            size = prod(weights.shard_shape(name, place))
            dense, expert = (dense, expert + size) if weights.is_expert(name) else (dense + size, expert)
        return Count(dense, expert)


def largest_tensor(spec: ModelSpec) -> int:
    """Elements of the largest tensor that a refresh moves: the embedding, or the widest layer."""
    layers = {routed: layer for layer, routed in enumerate(spec.moe_layers)} or {False: 0}
    one_of_each = dataclasses.replace(
        spec,
        num_layers=len(layers),
        moe_layers=tuple(layers) if spec.moe_layers else (),
    )
    weights, place = WeightMap(one_of_each), Place()
    return max(prod(weights.shard_shape(name, place)) for name in weights.names())


def _place(actor: ActorConfig) -> Place:
    return Place(
        tensor_size=actor.tensor_parallel,
        expert_size=actor.expert_parallel,
        expert_tensor_size=actor.expert_tensor,
    )
