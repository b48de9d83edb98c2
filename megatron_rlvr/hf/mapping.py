"""The weight map of one model: canonical Megatron tensors <-> Hugging Face tensors, sliced for any place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch

from megatron_rlvr.hf.families import Rule, family_rules
from megatron_rlvr.hf.layouts import Shape, Slices, Vocabulary
from megatron_rlvr.hf.stages import Stage
from megatron_rlvr.types import ModelSpec, Place, UserError

ReadSlices = Callable[[str, Slices], torch.Tensor]


class WeightMap:
    """Names, shapes, slicing and merging of every tensor of `spec`.

    vocab_multiple   embedding and output rows are padded with zeros to this multiple (Megatron needs one that the
                     tensor parallel size divides)
    """

    def __init__(self, spec: ModelSpec, *, vocab_multiple: int = 1) -> None:
        self.spec = spec
        self.vocab_multiple = vocab_multiple
        self._rules = {rule.name: rule for rule in family_rules(spec, vocab_multiple)}
        self._layers: dict[int | None, list[Rule]] = {}
        for rule in self._rules.values():
            self._layers.setdefault(rule.layer, []).append(rule)

    def names(self) -> list[str]:
        """Every canonical name, in model order; a tied output layer is not among them."""
        return list(self._rules)

    def local_names(self, place: Place) -> list[str]:
        """The names without the experts of other expert-parallel ranks; pipeline stages are left to the caller."""
        experts = self._local_experts(place)
        return [name for name, rule in self._rules.items() if rule.expert is None or rule.expert in experts]

    def stage_names(self, place: Place, stage: Stage) -> list[str]:
        """The names of the parameters that the rank at `place` has in the model chunk `stage`, in model order.

        Where embedding and head are tied, a last stage that is not the first holds a copy of the embedding under the
        head's name.
        """
        return [rule.name for rule in self._stage_rules(self._local_experts(place), stage)]

    def hf_names(self, name: str) -> tuple[str, ...]:
        """The Hugging Face tensors that make the canonical tensor `name`, in joining order."""
        return tuple(source.name for source in self._rule(name).sources)

    def hf_shapes(self) -> dict[str, Shape]:
        """Name and shape of every Hugging Face tensor of the model, in model order."""
        return {source.name: source.shape for rule in self._rules.values() for source in rule.sources}

    def num_parameters(self) -> int:
        """Weights and biases of the whole model; a tied head counts once, vocabulary padding not at all."""
        return sum(prod(source.shape) for rule in self._rules.values() for source in rule.sources)

    def shard_shape(self, name: str, place: Place) -> Shape:
        """Shape of this rank's slice of `name`. Raises UserError where the place does not divide it."""
        rule = self._rule(name)
        _, size = _split(rule, place)
        _require_divisible(rule, size)
        return rule.layout.local_shape(_shapes(rule), size)

    def is_expert(self, name: str) -> bool:
        """True where `name` is split over the expert-tensor group and lives on one expert-parallel rank."""
        return self._rule(name).expert is not None

    def local_tensor(self, name: str, read: ReadSlices, place: Place) -> torch.Tensor:
        """This rank's slice of `name`, in the dtype that `read` gives.

        read   read(hf_name, slices) -> that part of the tensor; asked only for what this place needs

        Raises UserError where the place does not divide the tensor, ValueError where the expert lives elsewhere.
        """
        rule = self._rule(name)
        parts = [read(source, part) for source, part in self.local_slices(name, place)]
        return rule.layout.join(parts, _shapes(rule), _split(rule, place)[1])

    def local_slices(self, name: str, place: Place) -> list[tuple[str, Slices]]:
        """(Hugging Face tensor, the part of it that this place needs) for each tensor that makes `name`.

        Raises as `local_tensor`.
        """
        rule = self._rule(name)
        if rule.expert is not None and rule.expert not in self._local_experts(place):
            raise ValueError(f"{name} does not live on expert-parallel rank {place.expert_rank} of {place.expert_size}")
        rank, size = _split(rule, place)
        _require_divisible(rule, size)
        slices = rule.layout.local_slices(_shapes(rule), rank, size)
        return [(source.name, part) for source, part in zip(rule.sources, slices, strict=True)]

    def local_parts(self, name: str, local: torch.Tensor, place: Place) -> list[tuple[str, Slices, torch.Tensor]]:
        """(Hugging Face tensor, slices of it, their values) for each tensor that this rank's slice `local` is made of.

        The inverse of `local_tensor`: same bits, rows of vocabulary padding left out. May share memory with `local`.
        Raises as `local_tensor`.
        """
        rule = self._rule(name)
        places = self.local_slices(name, place)
        parts = rule.layout.separate(local, _shapes(rule), _split(rule, place)[1])
        return [
            (source, slices, part[: slices[0].stop - slices[0].start])
            for (source, slices), part in zip(places, parts, strict=True)
        ]

    def merge(self, name: str, shards: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """The Hugging Face tensors of `name` from the shards of all (expert-)tensor-parallel ranks, in rank order.

        The inverse of `local_tensor`: same bits, vocabulary padding removed. Of a replicated tensor the first shard is
        taken, so one is enough. The results may share memory with each other and with the shards.
        """
        rule = self._rule(name)
        _require_divisible(rule, len(shards))
        expected = rule.layout.local_shape(_shapes(rule), len(shards))
        for rank, shard in enumerate(shards):
            if tuple(shard.shape) != expected:
                raise ValueError(f"shard {rank} of {name} has shape {list(shard.shape)}, expected {list(expected)}")
        merged = rule.layout.merge(_shapes(rule), shards)
        return [(source.name, tensor) for source, tensor in zip(rule.sources, merged, strict=True)]

    def _rule(self, name: str) -> Rule:
        if name in self._rules:
            return self._rules[name]
        if name == "output_layer.weight" and self.spec.tie_word_embeddings:
            # The last pipeline stage holds a copy of a tied embedding under this name.
            embedding = self._rules["embedding.word_embeddings.weight"]
            return Rule(name, embedding.sources, Vocabulary(multiple=self.vocab_multiple))
        raise ValueError(f"{name!r} is not a tensor of this {self.spec.family} model")

    def _stage_rules(self, experts: range, stage: Stage) -> Iterator[Rule]:
        ends = self._layers[None]
        yield from (rule for rule in ends if stage.first and rule.name.startswith("embedding."))
        for layer in stage.layers:
            yield from (rule for rule in self._layers[layer] if rule.expert is None or rule.expert in experts)
        yield from (rule for rule in ends if stage.last and not rule.name.startswith("embedding."))
        if stage.last and not stage.first and self.spec.tie_word_embeddings:
            yield self._rule("output_layer.weight")

    def _local_experts(self, place: Place) -> range:
        """Global numbers of the experts on this place's expert-parallel rank."""
        total = self.spec.num_experts
        if total % place.expert_size:
            raise UserError(
                f"actor.expert_parallel {place.expert_size} does not divide the model's "
                f"{total} experts; use a divisor of them."
            )
        each = total // place.expert_size
        return range(place.expert_rank * each, (place.expert_rank + 1) * each)


def _shapes(rule: Rule) -> list[Shape]:
    return [source.shape for source in rule.sources]


def _require_divisible(rule: Rule, size: int) -> None:
    if not rule.layout.divides(_shapes(rule), size):
        field = "tensor_parallel" if rule.expert is None else "expert_tensor_parallel"
        shapes = ", ".join(f"{source.name} {list(source.shape)}" for source in rule.sources)
        raise UserError(f"actor.{field} {size} cannot split {rule.name} evenly ({shapes}); use a smaller divisor.")


def _split(rule: Rule, place: Place) -> tuple[int, int]:
    """(rank, size) of the group over which the tensor is cut."""
    if rule.expert is None:
        return place.tensor_rank, place.tensor_size
    return place.expert_tensor_rank, place.expert_tensor_size
