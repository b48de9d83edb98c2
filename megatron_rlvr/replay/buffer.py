"""The prefix buffer of VSR: where rollouts may start besides the prompts, and how likely each place is."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_rlvr.replay import state as saved
from megatron_rlvr.replay.experts import ExpertTrajectory
from megatron_rlvr.replay.random_words import RandomWords
from megatron_rlvr.replay.statistics import buffer_statistics
from megatron_rlvr.replay.sum_tree import SumTree
from megatron_rlvr.replay.trajectory import Prefix, StoredTrajectory, integers


class PrefixBuffer:
    """Prefixes of the newest successful trajectory of each prompt, drawn in proportion to sigma-hat (VSR, Algorithm 1).

    window    updates that a trajectory stays: after `evict(step)` those of the `window` steps up to `step` are left;
              None: until a newer one of its prompt replaces it
    stride    keep the prefixes at positions 0, stride, 2 stride, ... below the response's length; position 0 is the
              bare prompt (s_0 of the paper), the whole response is no state to go on from
    sampling  "score": proportional to sigma-hat; "uniform": every prefix alike (ablation)
    static    expert trajectories alone are let in and nothing is ever evicted (ablation)
    seed      of the draws

    A trajectory is stored once, a prefix is a pair of trajectory and position and takes no memory of its own; where
    positions are given 4 bytes each, with fractions 12. A draw walks a sum tree over trajectories, then proposes
    prefixes of the one found until one is accepted with probability weight / largest weight: O(log trajectories) and
    at most 3 proposals on average, since sigma-hat is concave in the position (with given positions or fractions at
    most as many as there are). Raises ValueError for settings outside their range.
    """

    def __init__(
        self,
        window: int | None,
        stride: int = 1,
        sampling: Literal["score", "uniform"] = "score",
        static: bool = False,
        seed: int = 0,
    ) -> None:
        if (window is not None and window < 1) or stride < 1 or seed < 0 or sampling not in ("score", "uniform"):
            raise ValueError(
                "window must be None or 1 and more, stride 1 and more, seed 0 and more, sampling 'score' or 'uniform', "
                f"got window={window}, stride={stride}, seed={seed}, sampling={sampling!r}"
            )
        self._settings: dict[str, Any] = {
            "window": window, "stride": stride, "sampling": sampling, "static": static, "seed": seed
        }  # fmt: skip
        self._random = RandomWords(seed)
        self._fill([])

    def insert(
        self,
        prompt_id: str,
        token_ids: Sequence[int] | NDArray[np.integer],
        prompt_length: int,
        success_rate: float,
        step: int,
        reward: float = 1.0,
        positions: Sequence[int] | NDArray[np.integer] | None = None,
        states: Sequence[object] | None = None,
        *,
        fractions: Sequence[float] | NDArray[np.floating] | None = None,
        expert: bool = False,
    ) -> int:
        """Store a trajectory in place of any other of its prompt; the number of prefixes added.

        token_ids     [N] prompt and response, copied as int32; the response is |tau| = N - prompt_length tokens
        success_rate  p0: share of successes in the prompt's fresh group, in [0, 1]
        step          the update that made it; its age counts from here
        reward        R in [0, 1]: 1 for success. The paper inserts successes of fresh groups only: that is the caller's
        positions     the positions to keep instead of every `stride`-th, strictly increasing in [0, |tau|): an agent's
                      step boundaries
        states        one JSON value per position: what restores the environment there
        fractions     a of sigma-hat per position where it is not position / |tau|: an agent counts steps, i / |tau|
        expert        not the policy's own: a reset state for a cold start (p0 = 0 where nothing better is known)

        In a static buffer only experts enter, others return 0. Raises ValueError for values out of range, TypeError
        for a state that is no JSON value; the buffer is then as before.
        """
        if self._settings["static"] and not expert:
            return 0
        trajectory = StoredTrajectory(
            prompt_id=str(prompt_id),
            token_ids=integers("token_ids", token_ids),
            prompt_length=int(prompt_length),
            success_rate=float(success_rate),
            reward=float(reward),
            step=int(step),
            expert=bool(expert),
            stride=self._settings["stride"],
            positions=None if positions is None else integers("positions", positions),
            fractions=None if fractions is None else np.array(fractions, dtype=np.float64),
            states=None if states is None else tuple(json.dumps(state) for state in states),
        )
        slot = self._slots.get(trajectory.prompt_id, len(self._trajectories))
        if slot < len(self._trajectories):
            self._size -= self._trajectories[slot].num_prefixes
        self._put(slot, trajectory, *self._weigh(trajectory))
        self._size += trajectory.num_prefixes
        return trajectory.num_prefixes

    def seed(self, trajectories: Iterable[ExpertTrajectory], step: int = 0) -> int:
        """Insert experts' trajectories as of update `step`; the number of prefixes added."""
        return sum(
            self.insert(each.prompt_id, each.token_ids, each.prompt_length, each.success_rate, step, expert=True)
            for each in trajectories
        )

    def evict(self, step: int) -> int:
        """Drop trajectories older than the window at the end of update `step`; the number of prefixes dropped.

        One inserted at s stays while step - s < window: with window 5, after update 9 those of 5, 6, 7, 8 and 9.
        """
        window, before = self._settings["window"], self._size
        if window is None or self._settings["static"]:
            return 0
        for slot in range(len(self._trajectories) - 1, -1, -1):  # backwards: `_remove` moves the last one forward
            if step - self._trajectories[slot].step >= window:
                self._remove(slot)
        return before - self._size

    def draw(self, count: int) -> list[Prefix]:
        """`count` independent draws with replacement, in proportion to the weights; [] where all weights are 0.

        With sampling "score" a prefix of score 0 is never drawn: a buffer of settled outcomes alone gives [], and the
        caller takes fresh prompts. Raises ValueError for a negative count.
        """
        if count < 0:
            raise ValueError(f"count must be 0 or more, got {count}")
        if not self._tree.total > 0.0:
            return []
        total = self._tree.total
        return [self._draw_from(self._tree.find(point * total)) for point in self._random.uniform(count)]

    def __len__(self) -> int:
        """Prefixes in the buffer, those of weight 0 included."""
        return self._size

    @property
    def num_trajectories(self) -> int:
        return len(self._trajectories)

    def statistics(self, step: int) -> dict[str, float]:
        """What `replay/...` metrics say of the content at update `step` (see `buffer_statistics`)."""
        return buffer_statistics(self._trajectories, self._size, step)

    def state_dict(self) -> dict[str, Any]:
        """Content, settings and place in the random stream: numpy arrays under "arrays", JSON values beside them."""
        return {
            "settings": dict(self._settings),
            "random_words": self._random.taken,
            **saved.pack(self._trajectories),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, bit for bit, where `state` was taken; the buffer is replaced whole or not at all.

        Raises UserError where the state was taken under other settings or does not hold together.
        """
        saved.check_settings(state, self._settings)
        trajectories, taken = saved.unpack(state, self._settings["stride"])
        self._random = RandomWords(self._settings["seed"], taken)
        self._fill(trajectories)

    def restart_ages(self, step: int = 0) -> None:
        """Count every trajectory's age from update `step`, as if all had been inserted then.

        For a run that starts with the buffer of another one, whose step numbers mean nothing in it.
        """
        self._fill([replace(trajectory, step=step) for trajectory in self._trajectories])

    def save(self, path: str | Path) -> None:
        """Write `state_dict()` to one safetensors file, which appears whole or not at all."""
        saved.write(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """`load_state_dict` from a file of `save`. Raises UserError naming a file that is missing or damaged."""
        saved.name_file(path, lambda: self.load_state_dict(saved.read(Path(path))))

    def _fill(self, trajectories: list[StoredTrajectory]) -> None:
        self._trajectories: list[StoredTrajectory] = trajectories
        self._slots = {trajectory.prompt_id: slot for slot, trajectory in enumerate(trajectories)}
        weights = [self._weigh(trajectory) for trajectory in trajectories]
        self._tree = SumTree([total for total, _ in weights])
        self._largest = array("d", [largest for _, largest in weights])  # weight of a prefix, by slot
        self._size = sum(trajectory.num_prefixes for trajectory in trajectories)

    def _put(self, slot: int, trajectory: StoredTrajectory, total: float, largest: float) -> None:
        """Fill a slot, or the first one after the last, with a trajectory and what `_weigh` says of it."""
        if slot == len(self._trajectories):
            self._trajectories.append(trajectory)
            self._largest.append(largest)
        self._trajectories[slot], self._largest[slot] = trajectory, largest
        self._slots[trajectory.prompt_id] = slot
        self._tree.set(slot, total)

    def _remove(self, slot: int) -> None:
        """Empty a slot; the last trajectory moves into it, so that slots stay dense and their order says it all."""
        self._size -= self._trajectories[slot].num_prefixes
        del self._slots[self._trajectories[slot].prompt_id]
        trajectory, largest, last = self._trajectories.pop(), self._largest.pop(), len(self._trajectories)
        total = self._tree.weight(last)
        self._tree.set(last, 0.0)
        if slot < last:
            self._put(slot, trajectory, total, largest)

    def _weigh(self, trajectory: StoredTrajectory) -> tuple[float, float]:
        """The sum of the prefixes' weights and the largest one; `cumsum` adds one by one, alike on every machine."""
        if self._settings["sampling"] == "uniform":
            return float(trajectory.num_prefixes), 1.0
        scores = trajectory.scores_of(np.arange(trajectory.num_prefixes))
        return float(np.cumsum(scores)[-1]), float(scores.max())

    def _draw_from(self, slot: int) -> Prefix:
        """A prefix of one trajectory in proportion to its weight, by rejection."""
        trajectory, largest = self._trajectories[slot], self._largest[slot]
        uniform, size = self._settings["sampling"] == "uniform", trajectory.num_prefixes
        while True:
            place, chance = self._random.uniform(2)
            index = int(place * size)
            if uniform or chance * largest < trajectory.score_at(index):
                return trajectory.prefix(index)
