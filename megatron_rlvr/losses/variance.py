"""V(H): how widely the first-token correction spreads among responses to one prompt (Proximal KL Eq. C.4-C.5).

The responses of a prompt may lie in different micro-batches and ranks, where no partial variance is known. So each part
puts its corrections at their places in a vector over the whole mini-batch; the vectors add up as any metric sum does,
and the variances are formed from the whole one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_rlvr.losses.core import IMPOSSIBLE_LOG_RATIO
from megatron_rlvr.losses.errors import LossError
from megatron_rlvr.losses.proximal_kl import future_sum
from megatron_rlvr.losses.segments import Segments

Horizon = int | Literal["full"]

_PREFIX = "proximal_kl/variance/H="
_CORRECTIONS = "/corrections"


@torch.no_grad()
def correction_variance(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    cu_seqlens: Tensor,
    group_size: int,
    *,
    horizon: Horizon = "full",
    beta: float = 0.30,
    cost_clip: float | None = 0.05,
    tail_decay: bool = False,
) -> dict[str, Tensor]:
    """Metric sums of V(H) under the key `proximal_kl/variance/H=<horizon>`; merge over ranks, then finalize.

    logprobs, reference_logprobs [T];  cu_seqlens [S+1]; responses of one prompt stand together, `group_size` of them
    """
    sequences = len(cu_seqlens) - 1
    if sequences % group_size or group_size < 2:
        raise LossError(f"group_size={group_size} does not fit {sequences} responses: V(H) needs whole groups from 2.")
    order = torch.arange(sequences)
    corrections = first_corrections(
        logprobs,
        reference_logprobs,
        cu_seqlens,
        horizons=[horizon],
        sequence_index=order,
        num_sequences=sequences,
        beta=beta,
        cost_clip=cost_clip,
        tail_decay=tail_decay,
    )
    return group_variances(corrections, order // group_size)


@torch.no_grad()
def first_corrections(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    cu_seqlens: Tensor,
    *,
    horizons: Sequence[Horizon],
    sequence_index: Tensor,
    num_sequences: int,
    beta: float = 0.30,
    cost_clip: float | None = 0.05,
    tail_decay: bool = False,
) -> dict[str, Tensor]:
    """One vector [num_sequences] for each horizon: C_1 of the responses given here, 0 for all others of the mini-batch.

    logprobs, reference_logprobs [T];  cu_seqlens [S+1]
    sequence_index  [S] place of each response in the mini-batch; -1: it belongs to none and is left out
    beta, cost_clip the cost per nat and its bound eps_F in nats
    tail_decay      tokens past the horizon count with weights falling to 0 at the response's end (SPEC 4)
    """
    device = logprobs.device
    cu_seqlens, sequence_index = cu_seqlens.to(device, torch.int64), sequence_index.to(device, torch.int64)
    kept = sequence_index >= 0
    sums = {}
    for horizon in horizons:
        log_ratio = logprobs - reference_logprobs
        first = first_token_correction(log_ratio, cu_seqlens, horizon, cost_clip, tail_decay).mul_(beta)
        whole = torch.zeros(num_sequences, dtype=torch.float64, device=device)
        sums[f"{_PREFIX}{horizon}{_CORRECTIONS}"] = whole.index_put_((sequence_index[kept],), first[kept])
    return sums


def group_variances(sums: Mapping[str, Tensor], group_index: Tensor) -> dict[str, Tensor]:
    """The same metric sums with each whole vector of corrections replaced by numerator and denominator of its V(H).

    group_index  [num_sequences] the group of each response, from 0; groups may differ in size, one of a single response
                 has no variance and is left out
    """
    result = dict(sums)
    for key in [key for key in sums if key.endswith(_CORRECTIONS)]:
        values = result.pop(key)
        variances = _sample_variances(values, group_index.to(values.device, torch.int64))
        name = key.removesuffix(_CORRECTIONS)
        result[f"{name}/num"] = variances.sum()
        result[f"{name}/den"] = torch.full_like(variances.sum(), len(variances))
    return result


def _sample_variances(values: Tensor, group_index: Tensor) -> Tensor:
    """[groups of 2 or more] float64, from deviations and not from squares, which would cancel."""
    counts = torch.bincount(group_index).double()
    means = torch.zeros_like(counts).index_add_(0, group_index, values) / counts.clamp(min=1)
    squares = torch.zeros_like(counts).index_add_(0, group_index, (values - means[group_index]).square())
    return squares[counts > 1] / (counts[counts > 1] - 1)


def first_token_correction(
    log_ratio: Tensor, cu_seqlens: Tensor, horizon: Horizon, cost_clip: float | None, tail_decay: bool = False
) -> Tensor:
    """[S] float64: C_1 / beta, the clipped costs of the first min(H, T) tokens of each response, or all with a tail."""
    segments = Segments(cu_seqlens, len(log_ratio))
    bound = IMPOSSIBLE_LOG_RATIO if cost_clip is None else cost_clip
    costs = log_ratio.double().nan_to_num(nan=0.0).clamp(-bound, bound)
    later = future_sum(costs, segments, horizon, tail_decay)
    nonempty = segments.lengths > 0
    first = costs.new_zeros(len(nonempty))
    first[nonempty] = later[cu_seqlens[:-1][nonempty]]
    return first
