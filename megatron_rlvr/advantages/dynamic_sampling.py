"""Dynamic sampling: which groups teach nothing, and how long to look for others (DAPO; SPEC 1).

The verifier's verdicts decide, before any shaping: a length penalty makes the rewards of an all-wrong group differ, yet
there is nothing to learn from it but brevity.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rlvr.advantages.group import AdvantageError
from megatron_rlvr.types import UserError


class DynamicSamplingExhausted(UserError):
    """Too many attempts without a full batch; the message shows what the groups looked like."""


def informative_groups(scores: Tensor, group_size: int) -> Tensor:
    """[S] verifier scores -> [groups] bool: True where the verdicts of a group differ; groups stand together."""
    if scores.dim() != 1 or group_size < 1 or len(scores) % group_size:
        raise AdvantageError(
            f"group_size={group_size} does not divide scores of shape {tuple(scores.shape)}: pass whole groups, [S]."
        )
    if scores.is_floating_point() and bool(torch.isnan(scores).any()):
        raise AdvantageError("verifier scores hold NaN: score every response before groups are chosen.")
    grouped = scores.view(-1, group_size)
    return (grouped != grouped[:, :1]).any(dim=1)


@dataclass
class RefillBudget:
    """Counts the attempts to fill one batch with informative groups; one object per batch.

    wanted        groups the batch needs
    max_attempts  rollout rounds before giving up
    """

    wanted: int
    max_attempts: int
    kept: int = 0
    attempts: int = 0
    all_correct: int = 0
    all_wrong: int = 0
    history: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Groups still to be found."""
        return max(self.wanted - self.kept, 0)

    def admit(self, scores: Tensor, group_size: int, correct_above: float = 0.0) -> Tensor:
        """[groups] bool: which groups of this round to keep, at most those missing. Raises when out of attempts."""
        informative = informative_groups(scores, group_size)
        keep = informative & (informative.cumsum(0) <= self.missing)
        right = (scores.view(-1, group_size) > correct_above).all(dim=1)
        self.all_correct += int((~informative & right).sum())
        self.all_wrong += int((~informative & ~right).sum())
        self.attempts += 1
        self.kept += int(keep.sum())
        self.history.append(int(informative.sum()))
        if self.missing and self.attempts >= self.max_attempts:
            raise DynamicSamplingExhausted(self._explain())
        return keep

    def _explain(self) -> str:
        return (
            f"dynamic sampling found {self.kept} of {self.wanted} informative groups in {self.attempts} rounds "
            f"({self.history} per round; {self.all_correct} groups all correct, {self.all_wrong} all wrong): use other "
            "prompts, larger groups, a higher advantages.dynamic_sampling.max_attempts, or switch it off."
        )
