"""Propose states, roll them out on all ranks' engines, reward, normalise, and cut into the learner's mini-batches.

Every rank runs the same controller on the same numbers: each samples its share of the prompts with its own engine, then
all ranks exchange the groups, so that each can cut its own micro-batches without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rlvr.advantages import RefillBudget, group_advantages
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.data import PromptCursor, build_mini_batch, split_mini_batches
from megatron_rlvr.rewards import score_groups
from megatron_rlvr.rollout.engine import Engine
from megatron_rlvr.rollout.factory import sampling_settings
from megatron_rlvr.rollout.generation import roll_out
from megatron_rlvr.types import Group, MiniBatch, Prompt

Timer = Callable[[str], AbstractContextManager]


class Controller:
    """Stages 1 to 5 of the loop for one rank.

    engine         this rank's own engine
    decode         token ids -> text, for the verifier
    batch_options  how `build_mini_batch` cuts a mini-batch for this rank
    timer          context manager that times a phase by name
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        engine: Engine,
        decode: Callable[[list[int]], str],
        batch_options: dict[str, Any],
        timer: Timer,
    ) -> None:
        self.config, self.prompts, self.engine = config, prompts, engine
        self.decode, self.batch_options, self.timer = decode, batch_options, timer
        self.cursor = PromptCursor(len(prompts), config.seed, config.data.shuffle)
        self.rounds = 0  # rollout rounds so far; each draws from a sampling seed of its own
        self.generated_tokens = 0  # over all ranks and rounds, groups that were dropped included

    def collect(self) -> list[Group]:
        """A full rollout batch: rollout_reuse * mini_batch_size groups with rewards and advantages, on every rank.

        Raises DynamicSamplingExhausted when dynamic sampling cannot fill the batch in its number of rounds.
        """
        wanted = self.config.trainer.rollout_reuse * self.config.trainer.mini_batch_size
        dynamic = self.config.advantages.dynamic_sampling
        groups: list[Group] = []
        budget = RefillBudget(wanted, dynamic.max_attempts)
        while len(groups) < wanted:
            candidates = self._reward(self._roll_out(self._propose(wanted - len(groups))))
            groups += self._informative(candidates, budget) if dynamic.enabled else candidates
        self._assign_advantages(groups)
        return groups

    def mini_batches(self, groups: list[Group]) -> Iterator[tuple[list[Group], MiniBatch]]:
        """The batch as rollout_reuse consecutive mini-batches: their groups, and this rank's packed share of each."""
        for part in split_mini_batches(groups, self.config.trainer.mini_batch_size):
            trajectories = [trajectory for group in part for trajectory in group.trajectories]
            yield part, build_mini_batch(trajectories, **self.batch_options)

    def _propose(self, count: int) -> list[Prompt]:
        return [self.prompts[index] for index in self.cursor.take(count)]

    def _roll_out(self, prompts: list[Prompt]) -> list[Group]:
        """Groups of this round in the order of the prompts; each rank samples every world-size-th prompt."""
        rank, world = dist.get_rank(), dist.get_world_size()
        with self.timer("gen"):
            mine = roll_out(
                self.engine,
                prompts[rank::world],
                self.config.rollout.group_size,
                sampling_settings(self.config, mix_seed(self.config.seed, self.rounds * world + rank)),
                self.decode,
            )
            self.rounds += 1
            groups = exchange(mine, len(prompts))
        self.generated_tokens += sum(t.response_length for group in groups for t in group.trajectories)
        return groups

    def _reward(self, groups: list[Group]) -> list[Group]:
        with self.timer("reward"):
            score_groups(
                groups,
                name=self.config.rewards.name,
                overlong_start=self.config.rewards.overlong_start,
                max_response_length=self.config.rollout.max_response_length,
            )
        return groups

    def _informative(self, groups: list[Group], budget: RefillBudget) -> list[Group]:
        scores = torch.tensor([t.score for group in groups for t in group.trajectories])
        keep = budget.admit(scores, self.config.rollout.group_size)
        return [group for group, kept in zip(groups, keep.tolist(), strict=True) if kept]

    def _assign_advantages(self, groups: list[Group]) -> None:
        config = self.config.advantages
        with self.timer("adv"):
            trajectories = [t for group in groups for t in group.trajectories]
            advantages = group_advantages(
                torch.tensor([t.reward for t in trajectories], dtype=torch.float64),
                self.config.rollout.group_size,
                normalization=config.normalization,
                eps=config.eps,
                perturb_baseline=config.perturb_baseline,
            )
            for trajectory, advantage in zip(trajectories, advantages.tolist(), strict=True):
                trajectory.advantage = advantage


def exchange(mine: list[Group], total: int) -> list[Group]:
    """All ranks' groups in the order of the prompts, given that rank r holds prompts r, r + world, ..."""
    world = dist.get_world_size()
    if world == 1:
        return mine
    everyone: list[list[Group]] = [[] for _ in range(world)]
    dist.all_gather_object(everyone, mine)
    return [everyone[index % world][index // world] for index in range(total)]


def mix_seed(seed: int, stream: int) -> int:
    """A 31-bit seed for stream number `stream` of a run: neighbouring runs and rounds share no stream."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0]) & 0x7FFFFFFF
