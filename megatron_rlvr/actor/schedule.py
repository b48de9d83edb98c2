"""One pass of a mini-batch through Megatron's own pipeline schedule, with the policy loss inside it.

A micro-batch holds whole responses, so a sequence-level coefficient (log W of a response) is known inside the last
stage's loss function, from detached log-probs, before any gradient flows: coefficient and gradient need one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from megatron_rlvr.actor import platform
from megatron_rlvr.actor.context import ContextShard, complete, shard
from megatron_rlvr.actor.head import LogprobHead
from megatron_rlvr.ranges import MegatronRanges
from megatron_rlvr.types import MiniBatch, PackedBatch

# (batch, logprobs [A], entropy [A]) -> (loss to differentiate, metric sums)
LossFunction = Callable[[PackedBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]

# what the head answered [1, A_local, 2], and the places of its tokens among the batch's action tokens
Output = tuple[torch.Tensor, torch.Tensor]


class Schedule:
    """Runs mini-batches through the (possibly interleaved) pipeline of `wrapped` model chunks."""

    def __init__(self, config: TransformerConfig, wrapped: list[Any], heads: list[LogprobHead]) -> None:
        self.config, self.wrapped, self.heads = config, wrapped, heads
        config.timers = MegatronRanges()

    def train(self, mini_batch: MiniBatch, loss_function: LossFunction) -> list[dict[str, torch.Tensor]]:
        """Accumulate gradients of all micro-batches; metric sums per micro-batch on the last stage, [] elsewhere."""

        def loss(batch: PackedBatch, output: Output) -> tuple:
            logprobs, entropy = self._complete(batch, output)
            value, sums = loss_function(batch, logprobs, entropy)
            # The value is final: a token count of 0 keeps Megatron from dividing it again.
            return value, torch.zeros((), dtype=torch.int, device=value.device), sums

        return self._run(mini_batch, loss, forward_only=False)

    @torch.no_grad()
    def logprobs(self, mini_batch: MiniBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(logprobs [A], entropy [A]) per micro-batch on the last stage, [] elsewhere; no gradients."""

        def collect(batch: PackedBatch, output: Output, non_loss_data: bool = True) -> tuple:
            logprobs, entropy = self._complete(batch, output)
            return logprobs.clone(), entropy.clone()

        return self._run(mini_batch, collect, forward_only=True, collect_non_loss_data=True)

    def _run(self, mini_batch: MiniBatch, loss: Callable, **options: Any) -> list:
        batches = mini_batch.micro_batches
        run = get_forward_backward_func()
        iterators = [iter(batches) for _ in self.wrapped]
        interleaved = len(self.wrapped) > 1
        return run(
            forward_step_func=lambda iterator, model: self._forward(iterator, model, loss),
            data_iterator=iterators if interleaved else iterators[0],
            model=self.wrapped if interleaved else self.wrapped[0],
            num_microbatches=len(batches),
            seq_length=batches[0].token_ids.shape[1],
            micro_batch_size=1,
            **options,
        )

    def _forward(self, iterator: Iterator[PackedBatch], model: Any, loss: Callable) -> tuple:
        batch = next(iterator).to(platform.device())
        local = self._local(batch)
        for head in self.heads:
            head.batch = local.batch
        output = model(
            local.batch.token_ids,
            local.batch.position_ids,
            None,
            packed_seq_params=packed_params(batch),
            padding_mask=self._padding(local.batch, model),
        )
        return output, lambda result, **flags: loss(batch, (result, local.slots), **flags)

    def _padding(self, batch: PackedBatch, model: Any) -> torch.Tensor | None:
        """The mask [rows, columns] that keeps padding out of the experts' balance; None where nothing asks for it.

        The first stage splits it over tensor ranks with the embeddings; the stages behind get their part here.
        """
        if not self.config.num_moe_experts or self.config.moe_router_load_balancing_type == "none":
            return None
        mask = batch.padding_mask
        if not self.config.sequence_parallel or get_attr_wrapped_model(model, "pre_process"):
            return mask
        return scatter_to_sequence_parallel_region(mask.transpose(0, 1).contiguous()).transpose(0, 1)

    def _local(self, batch: PackedBatch) -> ContextShard:
        group = parallel_state.get_context_parallel_group()
        return shard(batch, group.size(), group.rank())

    def _complete(self, batch: PackedBatch, output: Output) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and (detached) entropies [A] of all action tokens from what this rank's head answered."""
        result, slots = output
        logprobs, entropy = result[0].unbind(-1)
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return logprobs, entropy.detach()
        total = batch.num_action_tokens
        return complete(logprobs, slots, total, group), complete(entropy.detach(), slots, total, group)


def packed_params(batch: PackedBatch) -> PackedSeqParams | None:
    """Megatron's description of a packed batch; None for a padded one."""
    if batch.cu_seqlens is None:
        return None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        cu_seqlens_q_padded=batch.cu_seqlens,
        cu_seqlens_kv_padded=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
