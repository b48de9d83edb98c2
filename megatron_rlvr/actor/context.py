"""Context parallelism: a sequence's tokens lie on several ranks, its loss is still the loss of one whole response.

Rank r of a group of c holds chunks r and 2c-1-r of every sequence's 2c equal chunks (so that causal work is even). The
batch arrives whole, its labels already shifted, and every rank cuts its own tokens out of it. Log-probs of action
tokens are completed over the group before the loss sees them: each rank then forms the same whole loss with the same
log W, lengths and future-KL tails, and its backward passes on the gradients of its own tokens alone, so that Megatron's
sum over the data- and context-parallel group counts each token once.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.distributed as dist

from megatron_rlvr.types import PackedBatch


def zigzag_index(boundaries: list[int], size: int, rank: int) -> torch.Tensor:
    """Global token indices [T/size] that `rank` holds, in local order; every sequence is split on its own.

    Raises ValueError for a sequence whose length is not a multiple of 2 * size.
    """
    if size == 1:
        return torch.arange(boundaries[0], boundaries[-1])
    parts = []
    for start, end in itertools.pairwise(boundaries):
        chunk, rest = divmod(end - start, 2 * size)
        if rest:
            raise ValueError(f"a sequence of {end - start} tokens does not split into 2 * {size} equal chunks")
        parts += [torch.arange(start + c * chunk, start + (c + 1) * chunk) for c in (rank, 2 * size - 1 - rank)]
    return torch.cat(parts)


@dataclasses.dataclass(frozen=True)
class ContextShard:
    """What one context-parallel rank feeds to its model.

    batch   the rank's own tokens: token_ids, position_ids, padding_mask, action_index and labels are local, cu_seqlens
            stay global
    slots   [A_local] int64, place of each local action token among the A action tokens of the whole batch
    """

    batch: PackedBatch
    slots: torch.Tensor


def shard(batch: PackedBatch, size: int, rank: int) -> ContextShard:
    """This rank's part of `batch`, whose sequences must be padded to multiples of 2 * size."""
    columns = batch.token_ids.shape[1]
    boundaries = [0, columns] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    held = zigzag_index(boundaries, size, rank).to(batch.token_ids.device)
    local_of = held.new_full((columns,), -1)
    local_of[held] = torch.arange(len(held), device=held.device)
    row, column = batch.action_index // columns, batch.action_index % columns
    slots = (local_of[column] >= 0).nonzero().squeeze(1)
    local = dataclasses.replace(
        batch,
        token_ids=batch.token_ids[:, held],
        position_ids=batch.position_ids[:, held],
        padding_mask=batch.padding_mask[:, held],
        action_index=row[slots] * len(held) + local_of[column[slots]],
        labels=batch.labels[slots],
    )
    return ContextShard(local, slots)


class _Complete(torch.autograd.Function):
    """[A_local] on each rank -> [A] on all; the gradient of a rank is that of its own tokens."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, slots: torch.Tensor, total: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(slots)
        whole = local.new_zeros(total)
        whole[slots] = local
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        (slots,) = ctx.saved_tensors
        return grad[slots], None, None, None


def complete(local: torch.Tensor, slots: torch.Tensor, total: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Values of all A action tokens from the ranks' own; a collective that ranks without action tokens must join."""
    return _Complete.apply(local, slots, total, group)
