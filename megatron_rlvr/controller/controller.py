"""Propose states, roll them out on all ranks' engines, reward, normalise, and cut into the learner's mini-batches.

Every rank runs the same controller on the same numbers: each samples its share of the prompts with its own engine, then
all ranks exchange the groups, so that each can cut its own micro-batches without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rlvr.advantages import RefillBudget, allocate_responses, group_advantages
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.controller.states import StateSource
from megatron_rlvr.data import build_mini_batch, split_mini_batches
from megatron_rlvr.rewards import Scorer
from megatron_rlvr.rollout.engine import Engine
from megatron_rlvr.rollout.factory import sampling_settings
from megatron_rlvr.rollout.generation import roll_out
from megatron_rlvr.types import Group, MiniBatch, Prompt, Trajectory

Timer = Callable[[str], AbstractContextManager]


class Controller:
    """Stages 1 to 5 of the loop for one rank.

    engine         this rank's own engine
    decode         token ids -> text, for the verifier
    batch_options  how `build_mini_batch` cuts a mini-batch for this rank
    timer          context manager that times a phase by name
    experts        right responses whose prefixes the replay buffer starts with
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        engine: Engine,
        decode: Callable[[list[int]], str],
        batch_options: dict[str, Any],
        timer: Timer,
        experts: Sequence[Trajectory] = (),
    ) -> None:
        self.config, self.engine = config, engine
        self.decode, self.batch_options, self.timer = decode, batch_options, timer
        self.states = StateSource(config, prompts, experts)
        cap = config.rollout.max_response_length
        options = config.rewards.verifier_options | config.rewards.shaping
        self.scorer = Scorer(config.rewards.name, **options, max_response_length=cap)
        self.rounds = 0  # rollout rounds so far; each draws from a sampling seed of its own
        self.generated_tokens = 0  # over all ranks and rounds, groups that were dropped included
        self._batch_tokens = 0  # the same of the last batch
        self._attempts, self._dropped = 0, 0  # rounds that filled the last batch, groups that it left out
        self._outcomes: dict[str, int] = {}  # verdicts on the last batch, dropped groups included
        self._cache_usage = (0, 0)  # context tokens of the last batch that the engines' caches held, and all of them

    def collect(self) -> list[Group]:
        """A full rollout batch: rollout_reuse * mini_batch_size groups with rewards and advantages, on every rank.

        Raises DynamicSamplingExhausted when dynamic sampling cannot fill the batch in its number of rounds.
        """
        wanted = self.config.trainer.rollout_reuse * self.config.trainer.mini_batch_size
        dynamic = self.config.advantages.dynamic_sampling
        groups: list[Group] = []
        budget = RefillBudget(wanted, dynamic.max_attempts)
        sampled: list[Group] = []
        tokens_before, usage_before = self.generated_tokens, self.engine.cache_usage()
        verdicts_before = self.scorer.counts
        self._attempts = 0
        while len(groups) < wanted:
            self._attempts += 1
            with self.timer("propose"):
                states = self.states.propose(wanted - len(groups))
            candidates = self._sample(states)
            sampled += candidates
            groups += self._informative(candidates, budget) if dynamic.enabled else candidates
        self._dropped = len(sampled) - len(groups)
        self.states.learn(sampled)
        self._batch_tokens = self.generated_tokens - tokens_before
        self._cache_usage = total_usage(usage_before, self.engine.cache_usage())
        self._outcomes = total_counts(verdicts_before, self.scorer.counts)
        self._assign_advantages(groups)
        return groups

    def metrics(self) -> dict[str, float]:
        """What the last rollout batch cost and where it started from; the same for each of its updates."""
        hits, asked = self._cache_usage
        return self.states.metrics | {
            "training/epoch": float(self.states.cursor.epoch),
            "rollout/attempts": float(self._attempts),
            "rollout/dropped_groups": float(self._dropped),
            "rollout/generated_tokens": self._batch_tokens / self.config.trainer.rollout_reuse,
            **{f"verifier/{outcome}": float(count) for outcome, count in self._outcomes.items()},
            **({"rollout/prefix_cache_hits": hits / asked} if asked else {}),
        }

    def save(self, directory: Path) -> None:
        """Write the replay buffer to directory/replay.safetensors, from the first rank; nothing without replay."""
        if self.states.buffer is not None and dist.get_rank() == 0:
            self.states.buffer.save(directory / "replay.safetensors")

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on between two rollout batches, as JSON values; `save` has the buffer."""
        return {
            "streams": self.rounds * dist.get_world_size(),  # of sampling: one for each round and rank
            "generated_tokens": self.generated_tokens,
            "states": self.states.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], directory: Path) -> None:
        """Go on where `state_dict` and `save` were called, with any number of ranks.

        Raises UserError for another prompt set, and for a buffer that cannot be read.
        """
        self.rounds = -(-state["streams"] // dist.get_world_size())
        self.generated_tokens = state["generated_tokens"]
        self.states.load_state_dict(state["states"])
        if self.states.buffer is not None:
            self.states.buffer.load(directory / "replay.safetensors")

    def mini_batches(self, groups: list[Group]) -> Iterator[tuple[list[Group], MiniBatch]]:
        """The batch as rollout_reuse consecutive mini-batches: their groups, and this rank's packed share of each."""
        for part in split_mini_batches(groups, self.config.trainer.mini_batch_size):
            trajectories = [trajectory for group in part for trajectory in group.trajectories]
            owners = [index for index, group in enumerate(part) for _ in group.trajectories]
            with self.timer("pack"):
                mini_batch = build_mini_batch(trajectories, group_index=owners, **self.batch_options)
            yield part, mini_batch

    def _sample(self, prompts: list[Prompt]) -> list[Group]:
        """A scored group for each prompt, all of group_size or of sizes that share the same budget out."""
        rollout = self.config.rollout
        if rollout.allocation == "fixed":
            return self._roll_out(prompts, rollout.group_size)
        low, high = rollout.allocation_range
        groups = self._roll_out(prompts, low)
        right = [sum(t.score > 0 for t in group.trajectories) for group in groups]
        sizes = allocate_responses(right, low, len(prompts) * rollout.group_size, low=low, high=high)
        owners = [group for group, size in zip(groups, sizes, strict=True) for _ in range(size - low)]
        more = self._roll_out([group.prompt for group in owners], 1)
        for group, single in zip(owners, more, strict=True):
            group.trajectories += single.trajectories
        return groups

    def _roll_out(self, prompts: list[Prompt], group_size: int) -> list[Group]:
        """Scored groups of this round in the order of the prompts; fresh and replayed ones are dealt out evenly.

        Each rank scores what it sampled: a verdict that hangs on time must be the same for all ranks.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        order = sorted(range(len(prompts)), key=lambda index: prompts[index].replayed)
        with self.timer("gen"):
            mine = roll_out(
                self.engine,
                [prompts[index] for index in order[rank::world]],
                group_size,
                sampling_settings(self.config, mix_seed(self.config.seed, self.rounds * world + rank)),
                self.decode,
            )
        with self.timer("reward"):
            self.scorer.score(mine)
        with self.timer("gen"):
            self.rounds += 1
            groups = exchange(mine, order)
        self.generated_tokens += sum(t.response_length for group in groups for t in group.trajectories)
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
                [len(group.trajectories) for group in groups],
                normalization=config.normalization,
                eps=config.eps,
                perturb_baseline=config.perturb_baseline,
            )
            for trajectory, advantage in zip(trajectories, advantages.tolist(), strict=True):
                trajectory.advantage = advantage


def exchange(mine: list[Group], order: list[int]) -> list[Group]:
    """All ranks' groups in the order of the prompts, given that rank r holds prompts order[r], order[r + world], ..."""
    world = dist.get_world_size()
    everyone: list[list[Group]] = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine)
    dealt = {index: everyone[turn % world][turn // world] for turn, index in enumerate(order)}
    return [dealt[index] for index in range(len(order))]


def total_usage(before: tuple[int, int], after: tuple[int, int]) -> tuple[int, int]:
    """What all ranks' engines found in their caches, and asked of them, between two readings on each rank."""
    usage = torch.tensor(after) - torch.tensor(before)
    if dist.get_world_size() > 1:
        everyone: list[torch.Tensor] = [usage] * dist.get_world_size()
        dist.all_gather_object(everyone, usage)
        usage = torch.stack(everyone).sum(0)
    return int(usage[0]), int(usage[1])


def total_counts(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What all ranks counted between two readings on each rank."""
    counts = {name: count - before[name] for name, count in after.items()}
    everyone: list[dict[str, int]] = [counts] * dist.get_world_size()
    if len(everyone) > 1:
        dist.all_gather_object(everyone, counts)
    return {name: sum(rank[name] for rank in everyone) for name in counts}


def mix_seed(*numbers: int) -> int:
    """A 31-bit seed from a run's seed and the number of one of its streams (one number or several): neighbouring runs
    and rounds share no stream."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) & 0x7FFFFFFF
