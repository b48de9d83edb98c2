"""One stored trajectory with all its prefixes, and a prefix as the loop sees it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_rlvr.replay.scores import check_unit_interval, success_at

MAX_TOKEN = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Prefix:
    """A state to start rollouts from: the prompt and the first tokens of a successful response.

    prompt_id      the prompt whose answer judges prefix + continuation
    token_ids      [prompt_length + position] int32, read-only: the prompt and y_<position
    prompt_length  tokens of the prompt
    position       tokens of the response that the prefix holds, in [0, length)
    length         |tau|: tokens of the whole response
    score          sigma-hat, in [0, 0.5]
    step           the update at which the trajectory was inserted
    state          what restores an environment at this position (JSON values), None without environment
    expert         the trajectory is an expert's, not the policy's
    """

    prompt_id: str
    token_ids: NDArray[np.int32]
    prompt_length: int
    position: int
    length: int
    score: float
    step: int
    state: object | None = None
    expert: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class StoredTrajectory:
    """A trajectory and its n prefixes, which exist as an index in [0, n) only.

    token_ids     [prompt_length + length] int32
    positions     [n] int32, strictly increasing in [0, length); None: every `stride`-th position from 0
    fractions     [n] float64 in [0, 1], the a of sigma-hat; None: position / length
    states        n JSON texts; None without environment

    Raises ValueError naming what does not fit.
    """

    prompt_id: str
    token_ids: NDArray[np.int32]
    prompt_length: int
    success_rate: float
    reward: float
    step: int
    expert: bool
    stride: int
    positions: NDArray[np.int32] | None = None
    fractions: NDArray[np.float64] | None = None
    states: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_unit_interval("success_rate", self.success_rate)
        check_unit_interval("reward", self.reward)
        if self.prompt_length < 0 or self.length < 1:
            raise ValueError(
                f"a trajectory of {len(self.token_ids)} tokens with prompt_length {self.prompt_length} has no response"
            )
        if any(each is not None for each in (self.positions, self.fractions, self.states)):
            self._check_positions()

    def _check_positions(self) -> None:
        places, given = self.positions, {"fractions": self.fractions, "states": self.states}
        if places is not None and (len(places) == 0 or places[-1] >= self.length or np.any(np.diff(places) <= 0)):
            raise ValueError(f"positions must be one or more, strictly increasing in [0, {self.length}), got {places}")
        for name, values in given.items():
            if values is not None and (places is None or len(values) != len(places)):
                raise ValueError(f"{name} must be one per given position, got {len(values)} for positions {places}")
        if self.fractions is not None:
            check_unit_interval("fractions", self.fractions)

    @property
    def length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def num_prefixes(self) -> int:
        return -(-self.length // self.stride) if self.positions is None else len(self.positions)

    def positions_of(self, indices: NDArray[np.intp]) -> NDArray[np.integer]:
        """[k] -> [k]: tokens of the response in each prefix."""
        return indices * self.stride if self.positions is None else self.positions[indices]

    def fractions_of(self, indices: NDArray[np.intp]) -> NDArray[np.float64]:
        """[k] -> [k]: a, how far along the trajectory each prefix is."""
        return self.positions_of(indices) / self.length if self.fractions is None else self.fractions[indices]

    def scores_of(self, indices: NDArray[np.intp]) -> NDArray[np.float64]:
        """[k] -> [k]: sigma-hat of each prefix."""
        probability = success_at(self.fractions_of(indices), self.success_rate, self.reward)
        return np.sqrt(probability * (1.0 - probability))

    def score_at(self, index: int) -> float:
        """sigma-hat of prefix number `index`, the same bits as `scores_of` gives."""
        fraction = self._position_at(index) / self.length if self.fractions is None else float(self.fractions[index])
        probability = success_at(fraction, self.success_rate, self.reward)
        return math.sqrt(probability * (1.0 - probability))

    def _position_at(self, index: int) -> int:
        return index * self.stride if self.positions is None else int(self.positions[index])

    def prefix(self, index: int) -> Prefix:
        """Prefix number `index`; its token ids are a view, nothing is copied."""
        position = self._position_at(index)
        return Prefix(
            prompt_id=self.prompt_id,
            token_ids=self.token_ids[: self.prompt_length + position],
            prompt_length=self.prompt_length,
            position=position,
            length=self.length,
            score=self.score_at(index),
            step=self.step,
            state=None if self.states is None else json.loads(self.states[index]),
            expert=self.expert,
        )


def integers(name: str, values: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    """A read-only int32 copy of one row of non-negative integers."""
    given = np.asarray(values)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise ValueError(f"{name} must be one row of integers, got shape {given.shape} of {given.dtype}")
    if given.size and (given.min() < 0 or given.max() > MAX_TOKEN):
        raise ValueError(f"{name} must lie in [0, {MAX_TOKEN}], got {given.min()} to {given.max()}")
    copied = given.astype(np.int32)
    copied.setflags(write=False)
    return copied
