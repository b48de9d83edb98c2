"""The output layer as the loss needs it: log-probs and entropies of action tokens over a vocab-parallel head.

The head selects the positions that predict action tokens *before* it multiplies with the vocabulary, so prompts and
padding cost nothing, and it never gathers the vocabulary nor keeps logits: each tensor rank makes its V/tp columns tile
by tile and four numbers per token cross the group (`fused_logprob`).

Coefficients that need a whole response. A policy loss is sum_t c_t * log p(y_t), with detached c_t that may depend on
all log-probs of the response (log W, a clip of the sequence ratio, a tail of future KL). Two passes meet in one
micro-batch of the schedule, which holds whole responses:

1. forward: this head returns all log-probs [A] of the micro-batch; of the vocabulary it leaves one number per token;
2. the last stage's loss function sums them per response and multiplies the detached coefficients in, so that autograd
   arrives at this head with the finished c_t as the upstream gradient of token t;
3. backward: every tile of logits is made again, scaled by c_t and multiplied into the gradients.

Nothing about a coefficient has to be known in 1, and nothing of size [A, V] is alive between 1 and 3. The stages before
the last one run one forward and one backward per micro-batch, as for any loss.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_rlvr.actor.fused_logprob import linear_logprob
from megatron_rlvr.actor.nucleus import nucleus_floor
from megatron_rlvr.types import LogprobDistribution, PackedBatch


class LogprobHead(ColumnParallelLinear):
    """A ColumnParallelLinear that answers with log-probs and entropies when a batch is set, else with logits.

    GPTModel transposes what its output layer returns, so the answer travels as [A, 1, 2] -> [1, A, 2], in float32.
    `distribution` is what log-probs and entropies belong to; the raw softmax unless the caller sets another. A
    truncated one is cut anew in each pass, by the weights that score in it (`nucleus`).
    """

    batch: PackedBatch | None
    vocab_size: int
    distribution: LogprobDistribution

    @classmethod
    def take_over(cls, layer: ColumnParallelLinear, vocab_size: int) -> None:
        """Turn GPTModel's own output layer into this class: parameters, names and tied weights stay where they are."""
        layer.__class__ = cls
        layer.batch, layer.vocab_size, layer.distribution = None, vocab_size, LogprobDistribution()

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Hidden states [s(/tp), b, h] -> [A, 1, 2] (log-prob, entropy), or logits [s, b, V/tp] without a batch."""
        if self.batch is None:
            return super().forward(input_, weight, runtime_gather_output)
        if self.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        hidden = input_.transpose(0, 1).flatten(0, 1).index_select(0, self.batch.action_index)
        if not self.sequence_parallel:
            # After the selection: fewer rows to reduce, and megatron-core 0.16's reduction loses a gradient that is a
            # transposed view (it reduces a contiguous copy and returns the original).
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        weight = self.weight if weight is None else weight
        vocabulary = {"group": self.tp_group, "vocab_size": self.vocab_size}
        floor = None
        if self.distribution.truncated:
            floor = nucleus_floor(hidden, weight, self.distribution, **vocabulary)
        logprobs, entropy = linear_logprob(
            hidden,
            weight,
            self.batch.labels,
            temperature=self.distribution.temperature,
            floor=floor,
            **vocabulary,
        )
        assert entropy is not None
        return torch.stack([logprobs, entropy], -1).unsqueeze(1), None
