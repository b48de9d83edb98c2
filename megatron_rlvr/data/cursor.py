"""A resumable walk over a prompt set: every prompt once an epoch, in an order that seed and epoch decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_rlvr.types import UserError


class PromptCursor:
    """Deals out prompt indices; a batch may span the end of an epoch, and nothing is dropped there.

    The order is computed from raw Philox words, whose stream NumPy keeps fixed, so a checkpoint resumes the same walk
    under another NumPy. Raises ValueError where there are no prompts.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool = True) -> None:
        if num_prompts < 1:
            raise ValueError(f"a cursor needs at least one prompt, got {num_prompts}")
        self._num_prompts, self._seed, self._shuffle = num_prompts, seed, shuffle
        self._epoch = self._position = 0
        self._order = self._permutation(0)

    @property
    def epoch(self) -> int:
        """Whole passes over the prompt set that have been dealt out."""
        return self._epoch

    def take(self, count: int) -> list[int]:
        """The next `count` prompt indices, each in [0, num_prompts)."""
        taken: list[int] = []
        while len(taken) < count:
            part = self._order[self._position : self._position + count - len(taken)]
            taken += part.tolist()
            self._position += len(part)
            if self._position == self._num_prompts:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation(self._epoch)
        return taken

    def state_dict(self) -> dict[str, int | bool]:
        """What `load_state_dict` needs to go on from here, as plain JSON values."""
        return {**self._identity(), "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises UserError where it belongs to another prompt set, seed or order."""
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise UserError(
                    f"the checkpoint walked its prompts with {key}={state.get(key)} but this run has {here}; "
                    "resume with the data and seed of the checkpoint, or start a new run."
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation(self._epoch)

    def _identity(self) -> dict[str, int | bool]:
        return {"num_prompts": self._num_prompts, "seed": self._seed, "shuffle": self._shuffle}

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._num_prompts)
        words = np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64)).random_raw(self._num_prompts)
        return np.argsort(words, kind="stable")
