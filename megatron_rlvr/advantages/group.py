"""Advantages of the responses to one prompt, or one replayed prefix, relative to their group (SPEC 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rlvr.types import UserError

NORMALIZATIONS = ("grpo", "center")


class AdvantageError(UserError, ValueError):
    """Rewards or settings from which no advantage can be made."""


@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    group_size: int | Sequence[int],
    *,
    normalization: str = "grpo",
    eps: float = 1e-6,
    perturb_baseline: bool = False,
) -> Tensor:
    """[S] -> [S]: rewards made relative to their group; groups stand together, a group of equal rewards gets 0.

    group_size        responses per group, or one size per group where they differ (a reallocated budget)
    normalization     "grpo": (R - mean) / (sample std + eps), ReSPO App. C and, with eps 1e-5, Proximal KL Eq. A.2;
                      "center": R - mean
    perturb_baseline  add 1 in groups whose rewards are not all equal (Proximal KL Eq. C.1, an ablation)
    """
    sizes = _sizes(rewards, group_size)
    _check(rewards, sizes, normalization, eps)
    advantages = relative_to_group(rewards.detach().double(), sizes, normalization, eps, float(perturb_baseline))
    return advantages.to(rewards.dtype if rewards.dtype in (torch.float32, torch.float64) else torch.float32)


def relative_to_group(values: Tensor, sizes: Tensor, normalization: str, eps: float, shift: float = 0.0) -> Tensor:
    """[S] float64 -> [S]: the arithmetic of `group_advantages` on checked input; sizes [groups] int64.

    `shift` is added where the group's values differ; where they do not, also in a group of one, the result is 0.
    """
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])

    def spread(per_group: Tensor) -> Tensor:
        return torch.repeat_interleave(per_group, sizes, output_size=len(values))

    centered = values - spread(_reduce(values, "sum", offsets) / sizes)
    if normalization == "grpo":
        std = (_reduce(centered * centered, "sum", offsets) / (sizes - 1)).sqrt()
        centered = centered / spread(std + eps)
    varied = spread(_reduce(values, "max", offsets) > _reduce(values, "min", offsets))
    return torch.where(varied, centered + shift, 0.0)


def _reduce(values: Tensor, how: str, offsets: Tensor) -> Tensor:
    return torch.segment_reduce(values, how, offsets=offsets, unsafe=True)


def _sizes(rewards: Tensor, group_size: int | Sequence[int]) -> Tensor:
    """[groups] int64 on the device of the rewards."""
    if rewards.dim() != 1:
        raise AdvantageError(f"rewards have shape {tuple(rewards.shape)}: pass one per response, [S].")
    if isinstance(group_size, int):
        if group_size < 1 or len(rewards) % group_size:
            raise AdvantageError(
                f"group_size={group_size} does not divide {len(rewards)} rewards: pass whole groups of 1 or more."
            )
        return torch.full((len(rewards) // group_size,), group_size, dtype=torch.int64, device=rewards.device)
    if any(size < 1 for size in group_size) or sum(group_size) != len(rewards):
        raise AdvantageError(
            f"group sizes sum to {sum(group_size)} for {len(rewards)} rewards: pass one positive size per group."
        )
    return torch.tensor(group_size, dtype=torch.int64, device=rewards.device)


def _check(rewards: Tensor, sizes: Tensor, normalization: str, eps: float) -> None:
    if normalization not in NORMALIZATIONS:
        raise AdvantageError(f"normalization={normalization!r} is unknown: give one of {', '.join(NORMALIZATIONS)}.")
    if not eps > 0:
        raise AdvantageError(f"eps={eps} is refused: give a positive number, 1e-6 for ReSPO and 1e-5 for Proximal KL.")
    if normalization == "grpo" and bool((sizes == 1).any()):
        raise AdvantageError("group_size=1 has no spread to normalise by: use at least 2, or normalization=center.")
    bad = ~torch.isfinite(rewards)
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        group = int((sizes.cumsum(0) <= where).sum())
        raise AdvantageError(
            f"reward of response {where} (group {group}) is {float(rewards[where])}: score it with a finite reward."
        )
