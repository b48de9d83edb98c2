"""The output layer as the loss needs it: log-probs and entropies of action tokens over a vocab-parallel head.

The head selects the positions that predict action tokens *before* it multiplies with the vocabulary, so prompts and
padding cost nothing, and it never gathers the vocabulary: each tensor rank keeps its V/tp columns and three numbers per
token cross the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_rlvr.types import PackedBatch


class VocabParallelLogprob(torch.autograd.Function):
    """log p(label) and entropy of logits [A, V/tp] split over `group`; one MAX and one SUM all-reduce.

    Both come out in float32, [A] each, in nats. The entropy carries no gradient here.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        z = logits.float()
        peak = z.max(-1).values if z.numel() else z.new_zeros(len(z))
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        z = z - peak.unsqueeze(-1)
        width = z.shape[-1]
        local = labels - dist.get_rank(group) * width
        owned = (local >= 0) & (local < width)
        index = local.clamp(0, width - 1).unsqueeze(-1)
        exp = z.exp()
        label_z = z.gather(-1, index).squeeze(-1) * owned
        # A padded vocabulary column is exp(-inf) * -inf: count it as 0.
        sums = torch.stack([exp.sum(-1), torch.nan_to_num(exp * z).sum(-1), label_z])
        dist.all_reduce(sums, group=group)
        total, weighted, label_z = sums
        ctx.save_for_backward(exp.div_(total.unsqueeze(-1)), owned, index)
        ctx.dtype = logits.dtype
        entropy = total.log() - weighted / total
        ctx.mark_non_differentiable(entropy)
        return label_z - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        probability, owned, index = ctx.saved_tensors
        out = -probability * grad.unsqueeze(-1)
        out.scatter_add_(-1, index, (grad * owned).unsqueeze(-1))
        return out.to(ctx.dtype), None, None


class LogprobHead(ColumnParallelLinear):
    """A ColumnParallelLinear that answers with log-probs and entropies when a batch is set, else with logits.

    GPTModel transposes what its output layer returns, so the answer travels as [A, 1, 2] -> [1, A, 2].
    """

    batch: PackedBatch | None
    vocab_size: int

    @classmethod
    def take_over(cls, layer: ColumnParallelLinear, vocab_size: int) -> None:
        """Turn GPTModel's own output layer into this class: parameters, names and tied weights stay where they are."""
        layer.__class__ = cls
        layer.batch, layer.vocab_size = None, vocab_size

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Hidden states [s(/tp), b, h] -> [A, 1, 2] (log-prob, entropy), or logits [s, b, V/tp] without a batch."""
        if self.batch is None:
            return super().forward(input_, weight, runtime_gather_output)
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        hidden = hidden.transpose(0, 1).flatten(0, 1).index_select(0, self.batch.action_index)
        logits = self._mask_padding(F.linear(hidden, self.weight if weight is None else weight))
        logprob, entropy = VocabParallelLogprob.apply(logits, self.batch.labels, self.tp_group)
        return torch.stack([logprob, entropy], -1).unsqueeze(1), None

    def _mask_padding(self, logits: torch.Tensor) -> torch.Tensor:
        """-inf in the columns [V/tp] that only pad the vocabulary."""
        width = logits.shape[-1]
        first_padding = self.vocab_size - dist.get_rank(self.tp_group) * width
        if first_padding >= width:
            return logits
        padding = torch.arange(width, device=logits.device) >= first_padding
        return logits.masked_fill(padding, float("-inf"))
