"""The proximal reference pi_k: a frozen copy of the learner in host memory, scored by swapping it in for one forward.

Proximal KL measures movement from it, decoupled GRPO clips around it. It costs no accelerator memory: two host copies
of this rank's shards, pinned where there is an accelerator, the reference and a place for the learner meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch.nn import Parameter

from megatron_rlvr.actor import platform


class ReferencePolicy:
    """A copy of `parameters` as they were at `version`; `version` is -1 before the first refresh."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters = list(parameters)
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._frozen = [_host_like(p) for p in self._parameters]
        self._learner = [_host_like(p) for p in self._parameters]
        self.version = -1

    @torch.no_grad()
    def refresh(self, version: int) -> None:
        """Freeze the learner's present weights as `version`."""
        for frozen, parameter in zip(self._frozen, self._parameters, strict=True):
            frozen.copy_(parameter.data)
        self.version = version

    def frozen(self, parameter: Parameter) -> torch.Tensor:
        """The frozen copy of one of the parameters, in host memory."""
        return self._frozen[self._places[id(parameter)]]

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model computes with the reference's weights; the learner's return afterwards, bit for bit."""
        self._exchange(self._learner, self._frozen)
        try:
            yield
        finally:
            self._exchange(None, self._learner)

    @torch.no_grad()
    def _exchange(self, keep: list[torch.Tensor] | None, load: list[torch.Tensor]) -> None:
        for index, parameter in enumerate(self._parameters):
            if keep is not None:
                keep[index].copy_(parameter.data)
            parameter.data.copy_(load[index])


def _host_like(parameter: Parameter) -> torch.Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu", pin_memory=not platform.on_cpu())
