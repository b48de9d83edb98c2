"""The prefix buffer of VSR: where rollouts may start besides the prompts, and how likely each place is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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

    A trajectory is stored once, a prefix is a pair of trajectory and position: 8 bytes each (its cumulative weight),
    12 where positions are given, 20 with fractions. A draw walks a sum tree over trajectories, then bisects within
    one: O(log trajectories + log positions). Raises ValueError for settings outside their range.
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
        self._put(slot, trajectory, self._cumulative_weights(trajectory))
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
        points = self._random.uniform(2 * count)
        return [self._at(points[k], points[k + 1]) for k in range(0, 2 * count, 2)]

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

    def save(self, path: str | Path) -> None:
        """Write `state_dict()` to one safetensors file, which appears whole or not at all."""
        saved.write(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """`load_state_dict` from a file of `save`. Raises UserError naming a file that is missing or damaged."""
        saved.name_file(path, lambda: self.load_state_dict(saved.read(Path(path))))

    def _fill(self, trajectories: list[StoredTrajectory]) -> None:
        self._trajectories = trajectories
        self._slots = {trajectory.prompt_id: slot for slot, trajectory in enumerate(trajectories)}
        self._cumulative = [self._cumulative_weights(trajectory) for trajectory in trajectories]
        self._tree = SumTree([cumulative[-1] for cumulative in self._cumulative])
        self._size = sum(trajectory.num_prefixes for trajectory in trajectories)

    def _put(self, slot: int, trajectory: StoredTrajectory, cumulative: NDArray[np.float64]) -> None:
        """Fill a slot, or the first one after the last."""
        if slot == len(self._trajectories):
            self._trajectories.append(trajectory)
            self._cumulative.append(cumulative)
        self._trajectories[slot], self._cumulative[slot] = trajectory, cumulative
        self._slots[trajectory.prompt_id] = slot
        self._tree.set(slot, float(cumulative[-1]))

    def _remove(self, slot: int) -> None:
        """Empty a slot; the last trajectory moves into it, so that slots stay dense and their order says it all."""
        self._size -= self._trajectories[slot].num_prefixes
        del self._slots[self._trajectories[slot].prompt_id]
        trajectory, cumulative = self._trajectories.pop(), self._cumulative.pop()
        self._tree.set(len(self._trajectories), 0.0)
        if slot < len(self._trajectories):
            self._put(slot, trajectory, cumulative)

    def _cumulative_weights(self, trajectory: StoredTrajectory) -> NDArray[np.float64]:
        """[n] running sums of the weights, in order: `cumsum` adds one by one, so every machine gets the same bits."""
        indices = np.arange(trajectory.num_prefixes)
        if self._settings["sampling"] == "uniform":
            return (indices + 1).astype(np.float64)
        return np.cumsum(trajectory.scores_of(indices))

    def _at(self, first: float, second: float) -> Prefix:
        """The prefix that two points of [0, 1) choose: one for the trajectory, one for the place in it."""
        slot = self._tree.find(first * self._tree.total)
        cumulative = self._cumulative[slot]
        index = int(cumulative.searchsorted(second * cumulative[-1], side="right"))  # skips prefixes of weight 0
        return self._trajectories[slot].prefix(index)
