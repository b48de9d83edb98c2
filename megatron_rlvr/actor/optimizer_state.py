"""Adam's moments and master weights by model parameter, whatever shape the optimizer keeps them in.

Megatron's own sharded optimizer state follows its chain of optimizers (dense parameters, experts), which changes with
the layout: it cannot move between expert parallelism 1 and more. Here every state tensor is a piece of a whole tensor
named after its parameter, as in megatron-core's `fully_reshardable` format, so it moves wherever the weights move.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.nn import Parameter

from megatron_rlvr.actor.sharded_tensors import Piece, Slot, load_pieces, piece_of

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "fp32_param"


@dataclass(frozen=True)
class _Held:
    """What this rank's optimizer holds of one parameter.

    main    [stop - start] or the parameter's shape: what Adam steps, in float32; None where another rank holds it all
    start   first element of `main` in the flattened parameter
    group   the ranks that share the parameter's state out; None: it is whole here
    """

    adam: torch.optim.Optimizer
    main: torch.Tensor | None
    start: int = 0
    group: dist.ProcessGroup | None = None


class OptimizerState:
    """Reads and writes the state behind the parameters of `slots`."""

    def __init__(self, optimizer: MegatronOptimizer, slots: Sequence[Slot]) -> None:
        parts = [part for part in _chain(optimizer) if part.optimizer is not None]
        self._adams = [part.optimizer for part in parts]
        held = {id(parameter): each for part in parts for parameter, each in _held_by(part)}
        self._slots, self._held = slots, {slot.name: held[id(slot.parameter)] for slot in slots}
        for adam in self._adams:
            _fill_in(adam)

    def pieces(self) -> dict[str, Piece]:
        """Every state tensor as a piece to write; a collective over the ranks that share state."""
        pieces = {}
        for slot in self._slots:
            for name in _names(slot.parameter):
                prefix = _prefix(name)
                pieces[prefix + slot.name] = piece_of(slot, prefix, self._whole(slot, name))
        return pieces

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Read every state tensor, one kind at a time; a collective."""

        def make(slot: Slot) -> torch.Tensor:
            return torch.empty(slot.parameter.shape, dtype=torch.float32)

        for name in (*_MOMENTS, _MASTER):
            slots = [slot for slot in self._slots if name in _names(slot.parameter)]
            if slots:
                load_pieces(slots, directory, _prefix(name), make, functools.partial(self._put, name))

    @property
    def steps(self) -> int:
        """Steps that Adam has taken; the same for all parameters.

        Raises RuntimeError where it is not: such a state has no place in a checkpoint.
        """
        found = {int(step) for adam in self._adams for step in _steps(adam)}
        if len(found) > 1:
            raise RuntimeError(f"parameters have taken different numbers of optimizer steps: {sorted(found)}")
        return found.pop() if found else 0

    @steps.setter
    def steps(self, steps: int) -> None:
        for adam in self._adams:
            for group in adam.param_groups:
                if not isinstance(adam, torch.optim.Adam):
                    group["step"] = steps
                    continue
                for parameter in group["params"]:  # a tensor each: a shared one would count once per parameter
                    adam.state[parameter]["step"] = torch.tensor(float(steps))

    def _whole(self, slot: Slot, name: str) -> torch.Tensor:
        """The parameter's whole state tensor in host memory; without storage on ranks that do not write it."""
        held, shape = self._held[slot.name], slot.parameter.shape
        mine = _tensor(held, name)
        if held.group is None:
            assert mine is not None
            return mine.detach()
        flat = torch.zeros(math.prod(shape), dtype=torch.float32, device=slot.parameter.device)
        if mine is not None:
            flat[held.start : held.start + mine.numel()] = mine.view(-1)
        dist.all_reduce(flat.view(torch.int32), group=held.group)  # one rank's bits and zeros: a sum that changes none
        return flat.view(shape).cpu() if slot.written_here else torch.empty(shape, device="meta")

    def _put(self, name: str, slot: Slot, tensor: torch.Tensor) -> None:
        held = self._held[slot.name]
        mine = _tensor(held, name)
        if mine is not None:
            part = tensor.reshape(-1)[held.start : held.start + mine.numel()]
            mine.copy_(part.view(mine.shape))


def _names(parameter: Parameter) -> tuple[str, ...]:
    return _MOMENTS if parameter.dtype == torch.float32 else (*_MOMENTS, _MASTER)


def _prefix(name: str) -> str:
    """As megatron-core names optimizer state in a checkpoint."""
    return f"optimizer.state.{name}."


def _tensor(held: _Held, name: str) -> torch.Tensor | None:
    if held.main is None:
        return None
    state: dict[str, Any] = held.adam.state[held.main]
    return held.main.detach() if name == _MASTER else state[name]


def _chain(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _held_by(part: Any) -> Iterator[tuple[Parameter, _Held]]:
    """(model parameter, what is held of it) for one optimizer of the chain."""
    if isinstance(part, DistributedOptimizer):
        for buffer in part.buffers:
            for parameter in buffer.params:
                yield parameter, _shard(part, parameter)
        return
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            yield main, _Held(part.optimizer, main)
    for low, high in zip(
        getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", []), strict=True
    ):
        for parameter, main in zip(low, high, strict=True):
            yield parameter, _Held(part.optimizer, main)


def _shard(part: Any, parameter: Parameter) -> _Held:
    if parameter not in part.model_param_group_index_map:
        return _Held(part.optimizer, None, group=part.data_parallel_group)
    group, order = part.model_param_group_index_map[parameter]
    start = part._get_model_param_range_map(parameter)["param"].start
    return _Held(part.optimizer, part.optimizer.param_groups[group]["params"][order], start, part.data_parallel_group)


def _fill_in(adam: torch.optim.Optimizer) -> None:
    """The state that Adam makes at its first step, for parameters that have none yet."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            for name in _MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            if isinstance(adam, torch.optim.Adam) and "step" not in state:
                state["step"] = torch.tensor(0.0)


def _steps(adam: torch.optim.Optimizer) -> Iterator[float]:
    for group in adam.param_groups:
        if not isinstance(adam, torch.optim.Adam):
            yield group.get("step", 0)
            continue
        for parameter in group["params"]:
            yield float(adam.state[parameter]["step"])
