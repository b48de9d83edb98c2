"""Accuracy on problems that training never sees, sampled through the engine that is at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_rlvr.rollout.engine import Engine, SamplingSettings
from megatron_rlvr.rollout.generation import roll_out
from megatron_rlvr.types import Group, Prompt


@dataclass(frozen=True)
class HeldOutResult:
    """accuracy: mean over problems of the share of right samples (mean@k); standard_error: over problems."""

    accuracy: float
    standard_error: float
    problems: int
    samples: int
    mean_length: float

    def __str__(self) -> str:
        return (
            f"held-out accuracy {self.accuracy:.1%} +- {self.standard_error:.1%} (mean of {self.samples} samples on "
            f"{self.problems} problems), {self.mean_length:.1f} tokens a response"
        )


def evaluate_held_out(
    engine: Engine,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: SamplingSettings,
    decode: Callable[[list[int]], str],
    score: Callable[[list[Group]], None],
) -> HeldOutResult:
    """Sample every problem `samples` times and score; with several ranks each takes its share. Equal on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = roll_out(engine, list(prompts[rank::world]), samples, sampling, decode)
    score(groups)
    rows = torch.zeros(len(prompts), 2, dtype=torch.float64)
    for index, group in zip(range(rank, len(prompts), world), groups, strict=True):
        rows[index, 0] = float(np.mean([t.score > 0 for t in group.trajectories]))
        rows[index, 1] = float(np.mean([t.response_length for t in group.trajectories]))
    everyone: list[torch.Tensor] = [torch.empty(0)] * world
    dist.all_gather_object(everyone, rows)
    accuracy, length = torch.stack(everyone).sum(0).unbind(1)
    error = accuracy.std() / len(prompts) ** 0.5 if len(prompts) > 1 else torch.tensor(float("nan"))
    return HeldOutResult(accuracy.mean().item(), error.item(), len(prompts), samples, length.mean().item())
