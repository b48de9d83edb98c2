"""Metric sums of micro-batches, reduced over data-parallel ranks and made known to every pipeline stage."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rlvr.actor import platform
from megatron_rlvr.losses import finalize_metrics, flatten_metrics, merge_metrics, unflatten_metrics
from megatron_rlvr.types import MiniBatch

Sums = dict[str, torch.Tensor]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def reduce_metrics(per_micro_batch: list[Sums], settle: Callable[[Sums], Sums] | None = None) -> dict[str, float]:
    """Named numbers of the whole mini-batch, equal on all ranks; numerators and denominators are reduced, then divided.

    per_micro_batch   metric sums on the last pipeline stage, [] on the others
    settle            what to make of the sums of the whole mini-batch before they are divided
    """
    boxed: list[dict[str, float]] = [{}]
    if per_micro_batch:
        local = merge_metrics(per_micro_batch)
        vectors = flatten_metrics(local)
        group = parallel_state.get_data_parallel_group()  # context-parallel ranks each hold the same whole sums
        for reduction, vector in vectors.items():
            if not len(vector):  # no key of this kind, on any rank: an empty vector lies on the CPU, which NCCL refuses
                continue
            dist.all_reduce(vector, op=_OPERATIONS[reduction], group=group)
        whole = unflatten_metrics(vectors, local)
        boxed[0] = finalize_metrics(whole if settle is None else settle(whole))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(boxed, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return boxed[0]


def padding_share(mini_batch: MiniBatch) -> float:
    """Share of the mini-batch's rows times columns, over all ranks, that hold no token."""
    cells = sum(batch.token_ids.numel() for batch in mini_batch.micro_batches)
    tokens = sum(batch.num_tokens for batch in mini_batch.micro_batches)
    counts = torch.tensor([tokens, cells], dtype=torch.float64, device=platform.device())
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    return 1 - float(counts[0] / counts[1])
