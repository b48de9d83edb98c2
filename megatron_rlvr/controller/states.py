"""Stage 1 of the loop: which states a rollout batch starts from, fresh prompts and replayed prefixes (VSR, Alg. 1).

Every rank keeps the same buffer and draws from it with the same generator, so all ranks propose the same states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.data import PromptCursor
from megatron_rlvr.replay import Prefix, PrefixBuffer
from megatron_rlvr.types import Group, Prompt, Trajectory, UserError


class StateSource:
    """Deals out the states of rollout rounds, and learns from what they led to.

    prompts    the training problems
    experts    right responses by others to some of them, whose prefixes the buffer starts with

    A step of the buffer's clock is one rollout batch.
    """

    def __init__(self, config: RunConfig, prompts: Sequence[Prompt], experts: Sequence[Trajectory] = ()) -> None:
        self.config, self.prompts = config, prompts
        self.cursor = PromptCursor(len(prompts), config.seed, config.data.shuffle)
        self.buffer = make_buffer(config) if config.replay.ratio > 0 else None
        self.batches = 0
        self.metrics: dict[str, float] = {}  # the buffer and what the last batch got out of it; empty without replay
        self._wanted = self._drawn = 0  # of the batch that is being collected
        self._by_id = {prompt.id: prompt for prompt in prompts}
        if self.buffer is not None and config.replay.buffer is not None:
            self.buffer.load(config.replay.buffer)
            self.buffer.restart_ages()  # another run's batches say nothing of an age in this one
        elif self.buffer is not None:
            self._seed(self.buffer, experts)

    def propose(self, count: int) -> list[Prompt]:
        """`count` states: round-half-up(ratio * count) prefixes, spread evenly among fresh prompts.

        Prefixes that the buffer cannot give (it is empty, or none of them has a positive score) are replaced by fresh
        prompts and counted as the batch's shortfall.
        """
        if self.buffer is None:
            return self._fresh(count)
        wanted = int(self.config.replay.ratio * count + 0.5)
        replayed = [self._replayed(prefix) for prefix in self.buffer.draw(wanted)]
        self._wanted, self._drawn = self._wanted + wanted, self._drawn + len(replayed)
        return spread(self._fresh(count - len(replayed)), replayed)

    def learn(self, groups: Sequence[Group]) -> None:
        """End a batch: insert the prefixes of every fresh group's newest right response, drop those past the window.

        `groups` are all groups that the batch sampled, those that dynamic sampling dropped included. A replayed group
        inserts nothing.
        """
        self.batches += 1
        if self.buffer is None:
            return
        for group in groups:
            if not group.prompt.replayed:
                self._insert(self.buffer, group)
        self.buffer.evict(self.batches)
        taken = {"replay/drawn": float(self._drawn), "replay/shortfall": float(self._wanted - self._drawn)}
        self.metrics = self.buffer.statistics(self.batches) | taken
        self._wanted = self._drawn = 0

    def state_dict(self) -> dict[str, Any]:
        """Place in the prompts and batches done, as JSON values; the buffer saves itself."""
        return {"cursor": self.cursor.state_dict(), "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called. Raises UserError where it walked other prompts."""
        self.cursor.load_state_dict(state["cursor"])
        self.batches = state["batches"]

    def _insert(self, buffer: PrefixBuffer, group: Group) -> None:
        right = [t for t in group.trajectories if t.score > 0]
        if right:
            buffer.insert(
                group.prompt.id,
                right[-1].token_ids,
                prompt_length=len(group.prompt.token_ids),
                success_rate=len(right) / len(group.trajectories),
                step=self.batches,
            )

    def _fresh(self, count: int) -> list[Prompt]:
        return [self.prompts[index] for index in self.cursor.take(count)]

    def _replayed(self, prefix: Prefix) -> Prompt:
        tokens = tuple(prefix.token_ids[prefix.prompt_length :].tolist())
        prompt = self._by_id[prefix.prompt_id]
        return dataclasses.replace(prompt, prefix=tokens, replayed=True, restore=prefix.state)

    def _seed(self, buffer: PrefixBuffer, experts: Sequence[Trajectory]) -> None:
        """Insert the experts' prefixes that leave room for a continuation, as of step 0.

        Their prompts' success rate is not known yet and taken as 0, which it nearly is where experts are needed.
        """
        by_tokens = {prompt.token_ids: prompt.id for prompt in self.prompts}
        for index, expert in enumerate(experts):
            before = int(np.argmax(expert.action_mask))
            prompt_id = by_tokens.get(tuple(expert.token_ids[:before].tolist()))
            if prompt_id is None:
                raise UserError(
                    f"replay.experts has a response (number {index + 1}) to a problem that is not in data.train; "
                    "remove it, or add the problem"
                )
            length, room = len(expert.token_ids) - before, self.config.rollout.max_response_length
            buffer.insert(
                prompt_id,
                expert.token_ids,
                prompt_length=before,
                success_rate=0.0,
                step=0,
                positions=range(0, room, self.config.replay.stride) if length > room else None,
                expert=True,
            )


def make_buffer(config: RunConfig) -> PrefixBuffer:
    replay = config.replay
    return PrefixBuffer(
        window=replay.recency_window,
        stride=replay.stride,
        sampling=replay.sampling,
        static=replay.static,
        seed=config.seed,
    )


def spread(fresh: Sequence[Prompt], replayed: Sequence[Prompt]) -> list[Prompt]:
    """One list with the replayed states at even distances, so that consecutive mini-batches get equal shares."""
    count = len(fresh) + len(replayed)
    places = {(2 * i + 1) * count // (2 * len(replayed)) for i in range(len(replayed))}
    of_kind = {True: iter(replayed), False: iter(fresh)}
    return [next(of_kind[index in places]) for index in range(count)]
